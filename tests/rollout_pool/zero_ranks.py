"""Two ranks of a ZeRO-3 trainer: ``python zero_ranks.py BUCKET_BYTES`` prints one JSON result per rank.

Not collected by pytest. Each rank goes through the weights in buckets, then gathers all of them at once, and
tells by how much its memory peaked above where it began.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZE = 2
MARK = "result: "
CONFIG = LlamaConfig(
    vocab_size=4000, hidden_size=512, intermediate_size=1400, num_hidden_layers=6, num_attention_heads=8,
    num_key_value_heads=8,
)  # fmt: skip


def launch(bucket_bytes: str) -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = str(door.getsockname()[1])
    command = [sys.executable, "-P", __file__, "--rank", port, bucket_bytes]
    # Freed memory goes back to the system at once, so that the next peak is seen.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    pipes = {"stdout": subprocess.PIPE, "text": True, "env": environment}
    ranks = [subprocess.Popen([*command, str(rank)], **pipes) for rank in range(SIZE)]  # type: ignore[call-overload]
    outputs = [rank.communicate()[0] for rank in ranks]
    lines = [line for output in outputs for line in output.splitlines() if line.startswith(MARK)]
    print(json.dumps([json.loads(line.removeprefix(MARK)) for line in lines]))
    return max(rank.returncode for rank in ranks)


def start(rank: int, port: str) -> Any:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(SIZE), LOCAL_RANK=str(rank), LOCAL_SIZE=str(SIZE),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, DS_ACCELERATOR="cpu",
    )  # fmt: skip
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    ids = torch.arange(8).unsqueeze(0)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    return engine


def memory(what: str) -> int:
    """VmRSS or VmHWM (the peak) of this process, in bytes."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


class Peak:
    """By how much memory peaks within a context."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        self._before = memory("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = memory("VmHWM") - self._before


def run_rank(port: str, bucket_bytes: int, rank: int) -> dict[str, Any]:
    engine = start(rank, port)
    import deepspeed

    from rollout_pool.actors.checksums import checksum
    from rollout_pool.weight_sync.shipment import packed
    from rollout_pool.weight_sync.sources import open_source

    parameters = dict(engine.module.named_parameters())
    is_split = all(parameter.numel() == 0 for parameter in parameters.values() if parameter.ds_numel > 10_000)
    sums: dict[str, str] = {}
    num_buckets = 0
    with Peak() as bucketed:
        for item in packed(open_source(engine, bucket_bytes)):
            if hasattr(item, "payload"):
                num_buckets += 1
                sums |= {record.name: record.checksum for record in item.records}
            del item
    with Peak() as whole, deepspeed.zero.GatheredParameters(list(parameters.values())):
        expected = {name: checksum(parameter) for name, parameter in parameters.items()}
    return {
        "is_split": is_split,
        "num_buckets": num_buckets,
        "is_equal": sums == expected,
        "bucketed": bucketed.bytes,
        "whole": whole.bytes,
        "model": sum(4 * parameter.ds_numel for parameter in parameters.values()),
        "largest": max(4 * parameter.ds_numel for parameter in parameters.values()),
    }


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        print(MARK + json.dumps(run_rank(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))), flush=True)
    else:
        sys.exit(launch(sys.argv[1]))
