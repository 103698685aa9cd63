"""An engine over several ranks, for the tests; ``rank_launcher.py`` starts them.

Not collected by pytest. Rank 0 rolls out and prints its groups as JSON; the others follow.
"""

from __future__ import annotations

from typing import Any

from rollout_pool import Engine, EngineConfig, RolloutRequest, SamplingParams
from rollout_pool.actors.rank_group import RankGroup
from rollout_pool.actors.rank_worker import follow


def as_json(groups: list[Any]) -> list[Any]:
    return [
        {
            "error": group.error,
            "samples": [
                {
                    "tokens": sample.token_ids.tolist(),
                    "logprobs": sample.logprobs.tolist(),
                    "sampling_logprobs": sample.sampling_logprobs.tolist(),
                    "reason": sample.finish_reason,
                    "index": sample.sample_index,
                }
                for sample in group.samples
            ],
        }
        for group in groups
    ]


def requests_of(written: list[dict[str, Any]]) -> list[RolloutRequest]:
    return [RolloutRequest(one["prompt"], SamplingParams.parse(one["sampling"], "test")) for one in written]


def roll_out(
    rank: int,
    size: int,
    address: str,
    store: Any,
    *,
    model: str,
    config: dict[str, Any],
    requests: list[dict[str, Any]],
    backend: str = "transformers",
    rounds: int = 1,
    abort_after: int | None = None,
) -> Any:
    """The groups of every round; with ``abort_after``, each is aborted after so many steps and resumed."""
    group = RankGroup.join(address, rank, size, "cpu", store=store, timeout_s=120)
    options: Any = {"group": group, "backend": backend, "dtype": "float32"}
    if rank:
        follow(model, EngineConfig(**config), **options)
        group.close()
        return None
    engine = Engine(model, EngineConfig(**config), **options)
    wanted = requests_of(requests)
    found = []
    for _ in range(rounds):
        groups = (
            engine.generate(wanted) if abort_after is None else cut_and_resumed(engine, wanted, abort_after)
        )
        found.append(as_json(groups))
    kv = [list(tensor.shape) for tensor in engine.cache.tensors()][:1]
    stats = engine.stats()
    engine.close()
    group.close()
    return {
        "rounds": found,
        "kv": kv,
        "moved": stats.rows_moved,
        "trims": stats.trims,
        "prefills": stats.prefills,
    }


def cut_and_resumed(engine: Engine, requests: list[RolloutRequest], steps: int) -> list[Any]:
    partial: dict[Any, Any] = {}
    for number, one in enumerate(requests):
        named = RolloutRequest(one.prompt, one.sampling, request_id=number)
        engine.submit(named, lambda group: partial.update({group.request_id: group}))
    for _ in range(steps):
        engine.step()
    for number in range(len(requests)):
        engine.abort(number)
    engine.step()
    return engine.generate(
        RolloutRequest(one.prompt, one.sampling, request_id=number, resume=partial[number].samples)
        for number, one in enumerate(requests)
    )


CASES = {"roll_out": roll_out}
