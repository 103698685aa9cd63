"""Where an adapter's rollouts come from, and what it asks of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from rollout_pool.errors import ConfigError, RequestError
from rollout_pool.requests import call_seed
from rollout_pool.types import Logprobs, Prompt, RolloutGroup, RolloutRequest, Sample, SamplingParams

LogprobKind = Literal["logprobs", "sampling_logprobs"]
"""Which of a sample's two log-probabilities a trainer gets where it has room for one.

``logprobs`` is what the trainer recomputes itself (whole vocabulary, divided by the temperature), so
that the ratio of the two is 1 until the weights change. ``sampling_logprobs`` is the probability of
the draw, after top-k, top-p, min-p and penalties.
"""


def roll_out(
    source: Any, prompts: Iterable[Prompt | RolloutRequest], sampling: SamplingParams
) -> list[RolloutGroup]:
    """Roll out on an ``Engine`` or on the handle of a pool: one group per prompt, in input order."""
    if callable(getattr(source, "generate", None)):
        groups: list[RolloutGroup] = source.generate(prompts, sampling)
        return groups
    call = getattr(getattr(source, "rollout", None), "remote", None)
    if call is None:
        raise ConfigError(
            f"rollouts come from an Engine or from the handle of a pool, got {type(source).__name__}"
        )
    import ray

    groups = ray.get(call(list(prompts), sampling))
    return groups


def require_complete(groups: Iterable[RolloutGroup]) -> list[RolloutGroup]:
    """The groups as a list, for a trainer that cannot go on with less than all of them.

    Raises :class:`RequestError` when a group failed, or when a sample has no token.
    """
    groups = list(groups)
    failed = [group for group in groups if group.error is not None]
    if failed:
        raise RequestError(f"{len(failed)} of {len(groups)} groups failed, first {failed[0].error}")
    for group in groups:
        for sample in group.samples:
            if not sample.token_ids.size:
                raise RequestError(
                    f"request {group.request_id!r}, sample {sample.sample_index}: has no tokens "
                    f"(finish_reason {sample.finish_reason!r})"
                )
    return groups


def logprobs_of(sample: Sample, kind: LogprobKind) -> Logprobs:
    """The log-probabilities of that kind, float32, one for each token of the sample."""
    return sample.logprobs if kind == "logprobs" else sample.sampling_logprobs


def check_kind(kind: str) -> None:
    """Raise :class:`ConfigError` unless ``kind`` is a :data:`LogprobKind`."""
    if kind not in ("logprobs", "sampling_logprobs"):
        raise ConfigError(f"logprobs must be 'logprobs' or 'sampling_logprobs', got {kind!r}")


def draw_seed(seed: int, *coordinates: int) -> int:
    """A seed for every place and time that draws: the rank of a process, a step, the number of a call.

    Hashed one after the other, so that no two places share draws. With one seed for all, processes
    that roll out the same prompt would return the same samples.
    """
    for coordinate in coordinates:
        seed = call_seed(seed, coordinate)
    return seed
