"""Real ranks for the tests, each a process that ``rank_launcher.py`` starts.

Not collected by pytest. A case is a function that every rank runs, in the table ``CASES`` of this script or of
another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from rollout_pool.actors.rank_group import RankGroup, RankLostError, open_store
from rollout_pool.errors import RolloutPoolError

MARK = "result: "
LONG = [0, -1, 2**62, *range(1000)]


def run_rank(script: str, case: str, rank: int, size: int, arguments: str) -> None:
    run = cases_of(script)[case]
    torch.set_num_threads(1)
    store, address = open_store() if rank == 0 else (None, sys.stdin.readline().strip())
    if rank == 0:
        print(address, flush=True)
    result = run(rank, size, address, store, **json.loads(arguments))
    print(MARK + json.dumps(result), flush=True)


def report(result: Any) -> None:
    """Print a result early, for a rank that is about to be killed."""
    print(MARK + json.dumps(result), flush=True)


def messages(rank: int, size: int, address: str, store: Any) -> dict[str, Any]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    os.environ["LOCAL_RANK"] = "before"
    received = []
    for _ in range(2):  # a process may join again after it has left
        group = RankGroup.join(address, rank, size, "cpu", store=store, timeout_s=60)
        during = {name: os.environ.get(name) for name in names}
        for length in (0, 1, 126, 127, 128, len(LONG)):
            if group.is_first:
                group.send(LONG[:length])
            else:
                received.append(group.receive())
        tensor = torch.arange(12.0).reshape(3, 4) * (1 if group.is_first else -1)
        group.share(tensor)
        with torch.inference_mode():
            inference = torch.full((5,), float(rank), dtype=torch.bfloat16)
            group.share(inference)
        torch.distributed.barrier()
        device = str(group.device)
        group.close()
        group.close()
        if rank == 0:
            store, address = open_store()
            with open(os.environ["SECOND_ADDRESS"] + ".part", "w", encoding="ascii") as file:
                file.write(address)
            os.replace(os.environ["SECOND_ADDRESS"] + ".part", os.environ["SECOND_ADDRESS"])
        else:
            address = _wait_for(os.environ["SECOND_ADDRESS"])
    return {
        "received": received,
        "shared": tensor.tolist(),
        "inference": inference.tolist(),
        "during": during,
        "after": {name: os.environ.get(name) for name in names},
        "device": device,
    }


def _wait_for(path: str) -> str:
    while not os.path.exists(path):
        time.sleep(0.02)
    with open(path, encoding="ascii") as file:
        return file.read()


def await_all_joined(rank: int, size: int) -> None:
    """Have rank 0 wait until the others have joined: they may still be at it when it has, and lose it there."""
    store = torch.distributed.distributed_c10d._get_default_store()
    store.set(f"joined/{rank}", "1")
    if rank == 0:
        store.wait([f"joined/{other}" for other in range(size)], timedelta(seconds=60))


def first_is_killed(rank: int, size: int, address: str, store: Any) -> dict[str, Any]:
    group = RankGroup.join(address, rank, size, "cpu", store=store, timeout_s=600)
    await_all_joined(rank, size)
    if group.is_first:
        group.send([int(time.time() * 1e3) + 1000])
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    killed_at = group.receive()[0] / 1e3
    with expect_loss() as outcome:
        group.receive()
    group.close()
    return {"after_s": time.time() - killed_at, **outcome}


def follower_is_killed(rank: int, size: int, address: str, store: Any, victim: int, by: str) -> Any:
    group = RankGroup.join(address, rank, size, "cpu", store=store, timeout_s=600)
    await_all_joined(rank, size)
    if rank == victim:
        group.receive()
        os.kill(os.getpid(), signal.SIGKILL)
    if rank != 0:
        with expect_loss() as outcome:
            tensor = torch.zeros(4)
            while True:
                group.receive()
                if by == "share":
                    group.share(tensor)
        group.close()
        return outcome
    group.send([0])
    begin = time.time()
    with expect_loss() as outcome:
        while time.time() < begin + 60:
            group.send([0])
            if by == "share":
                group.share(torch.zeros(4))
            time.sleep(0.05)
    group.close()
    return {"after_s": time.time() - begin, **outcome}


@contextlib.contextmanager
def expect_loss() -> Any:
    outcome: dict[str, Any] = {"error": None}
    try:
        yield outcome
    except RankLostError as error:
        outcome["error"] = str(error)


def shards(rank: int, size: int, address: str, store: Any, models: list[str], backend: Any) -> Any:
    """Load every model's shard, and run it. One dictionary per model."""
    group = RankGroup.join(address, rank, size, "cpu", store=store, timeout_s=300)
    results = []
    for model in models:
        try:
            results.append(_run_shard(model, group, backend))
        except RolloutPoolError as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
    group.close()
    return results


def _run_shard(name: str, group: RankGroup, backend: Any) -> dict[str, Any]:
    from rollout_pool.actors.linear_layout import lay_out, linears, one_layout
    from rollout_pool.actors.loading import load_model
    from rollout_pool.actors.sharding import load_shard

    shard = load_shard(name, group, dtype="float32", backend=backend, trust_remote_code=False)
    whole = load_model(name, dtype="float32", device="cpu", trust_remote_code=False)
    ids = torch.arange(24).reshape(2, 12) * 7 % 150 + 3
    logits, keys = _logits(shard, ids)
    expected, _ = _logits(whole, ids)
    parts = _parts(shard, whole, group)
    lay_out(shard, one_layout(shard, "transposed"))
    num_transposed = sum(not module.weight.is_contiguous() for module in linears(shard))
    transposed, _ = _logits(shard, ids)
    return {
        "logits": hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
        "shape": list(logits.shape),
        "is_plain": type(logits) is torch.Tensor,
        "difference": float((logits - expected).abs().max()),
        "spread": float(expected.std()),
        "kv_heads": keys.shape[1],
        "all_kv_heads": whole.config.get_text_config().num_key_value_heads
        if hasattr(whole.config.get_text_config(), "num_key_value_heads")
        else whole.config.num_attention_heads,
        "parts": parts,
        "num_transposed": num_transposed,
        "difference_transposed": float((transposed - expected).abs().max()),
    }


def _logits(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A prefill and two steps with a cache, as the engine runs them."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    logits = []
    with torch.inference_mode():
        for piece in (ids[:, :10], ids[:, 10:11], ids[:, 11:]):
            logits.append(model(input_ids=piece, use_cache=True, **{argument: cache}).logits)
    return torch.cat(logits, 1).clone(), cache.layers[0].keys


def _parts(shard: Any, whole: Any, group: RankGroup) -> dict[str, str]:
    """For each parameter: "whole", "split", or how it is wrong."""
    full = dict(whole.named_parameters(remove_duplicate=False))
    found = {}
    for name, parameter in shard.named_parameters(remove_duplicate=False):
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        found[name] = _part(local.detach(), full[name].detach(), group.rank, group.size)
    return found


def _part(local: torch.Tensor, full: torch.Tensor, rank: int, size: int) -> str:
    if torch.equal(local, full):
        return "whole"
    for dim in range(full.dim()):
        for fused in (1, 2, 3):
            if full.shape[dim] % (fused * size) == 0:
                pieces = [block.chunk(size, dim)[rank] for block in full.chunk(fused, dim)]
                if torch.equal(local, torch.cat(pieces, dim)):
                    return "split"
    return f"{tuple(local.shape)} of {tuple(full.shape)}"


CASES: dict[str, Any] = {
    "shards": shards,
    "messages": messages,
    "first_is_killed": first_is_killed,
    "follower_is_killed": follower_is_killed,
}


def cases_of(script: str) -> dict[str, Any]:
    """The table of a script, which stands on no import path."""
    if Path(script).samefile(__file__):
        return CASES
    spec = importlib.util.spec_from_file_location(Path(script).stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cases: dict[str, Any] = module.CASES
    return cases


if __name__ == "__main__":
    script, case, rank, size, arguments = sys.argv[1:]
    run_rank(script, case, int(rank), int(size), arguments)
