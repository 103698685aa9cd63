"""What a weight sync costs, beside a plain copy of the same tensors in memory.

    python benchmarks/sync.py [--model DIR] [--rounds 5] [--actors 1] [--only ways...] [--json FILE]

Every way brings the whole model (LoRA: its adapters) from a trainer to rollout actors, checked tensor by
tensor and read back. The copies it is compared with are measured between its rounds, in the driver, on
one thread; a ratio is the median of the rounds over the median of the copies around them.

Ways:
    in process     staged, checked and written within one process; no Ray
    shipped        ``ship(model)`` in the driver, then ``sync_weights``; through the object store
    trainer        a trainer that is a Ray actor; through the object store
    gloo           the same, by Ray's tensor transport
    checkpoint     the path of a safetensors checkpoint, read by the pool
    lora           adapters of rank 16 on all linear layers; merged where they arrive
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_pool.demo_model import default_folder

WAYS = ("in process", "shipped", "trainer", "gloo", "checkpoint", "lora")
MIB = 2**20


@dataclass
class Measured:
    """One way, round by round; seconds."""

    way: str
    num_bytes: int = 0
    total: list[float] = field(default_factory=list)
    stage: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)

    def add(self, seconds: float, receipts: Sequence[Any], copy: float) -> None:
        self.num_bytes = receipts[0].num_bytes
        self.total.append(seconds)
        self.stage.append(max(receipt.stage_s for receipt in receipts))
        self.commit.append(max(receipt.commit_s for receipt in receipts))
        self.copy.append(copy)

    def line(self) -> str:
        median = statistics.median
        ratio = median(self.total) / median(self.copy)
        spread = f"{min(self.total) / median(self.copy):.1f} to {max(self.total) / median(self.copy):.1f}"
        return (
            f"{self.way:12}{ratio:7.1f}x  {spread:16}{median(self.total):8.2f} s  "
            f"stage {median(self.stage):6.2f} s  commit {median(self.commit):6.2f} s  "
            f"{self.num_bytes / MIB:8.1f} MiB  copy {median(self.copy):6.3f} s"
        )


class Copies:
    """A plain copy of all weights of a model into memory that exists: the least that a sync can cost."""

    def __init__(self, model: Any) -> None:
        self._source = [parameter.detach() for parameter in model.parameters()]
        self._target = [tensor.clone() for tensor in self._source]

    def seconds(self) -> float:
        begin = time.perf_counter()
        for target, source in zip(self._target, self._source, strict=True):
            target.copy_(source)
        return time.perf_counter() - begin


def nudge(model: Any) -> None:
    """Other weights, so that nothing is the same twice."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.0001)


def in_process(model: Any, folder: str) -> Callable[[int], list[Any]]:
    from rollout_pool.actors.loading import load_model
    from rollout_pool.actors.weight_records import Manifest
    from rollout_pool.actors.weights import ModelWeights
    from rollout_pool.weight_sync.shipment import packed
    from rollout_pool.weight_sync.sources import open_source

    weights = ModelWeights(load_model(folder, dtype="float32", device="cpu", trust_remote_code=False))

    def run(version: int) -> list[Any]:
        for item in packed(open_source(model)):
            if isinstance(item, Manifest):
                weights.check(version, item)
            else:
                weights.stage(version, item)
        return [weights.commit(version)]

    return run


def through_pool(way: str, model: Any, folder: str, actors: int, scratch: str) -> Callable[[int], list[Any]]:
    """``run(version)`` for one of the ways that need a pool; starts the pool and the trainer."""
    import ray

    from rollout_pool import EngineConfig, PoolConfig, RolloutPool
    from rollout_pool.weight_sync import TensorTransportSource, WeightSource, ship

    transport = "gloo" if way == "gloo" else "object_store"
    config = PoolConfig(
        model=folder,
        num_actors=actors,
        cpus_per_actor=1,
        dtype="float32",
        weight_transport=transport,
        engine=EngineConfig(num_slots=2, max_length=64),
    )
    pool = RolloutPool.remote(config)
    ray.get(pool.ready.remote())

    def sync(source: Any, version: int) -> list[Any]:
        receipts: list[Any] = ray.get(pool.sync_weights.remote(source, version))
        return receipts

    if way in ("trainer", "gloo"):

        class Trainer(TensorTransportSource if way == "gloo" else WeightSource):  # type: ignore[misc]
            def __init__(self, folder: str) -> None:
                import torch
                from transformers import AutoModelForCausalLM

                torch.set_num_threads(1)
                self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

            def rollout_weights(self) -> Any:
                return self._model

        trainer = ray.remote(num_cpus=0)(Trainer).remote(folder)
        return lambda version: sync(trainer, version)
    if way == "checkpoint":
        model.save_pretrained(scratch)
        return lambda version: sync(scratch, version)
    if way == "lora":
        import peft

        settings = peft.LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, settings)
    return lambda version: sync(ship(model), version)


def measure(way: str, args: argparse.Namespace, scratch: str) -> Measured:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    copies = Copies(model)
    if way == "in process":
        run = in_process(model, args.model)
    else:
        run = through_pool(way, model, args.model, args.actors, scratch)
    measured = Measured(way)
    run(1)  # buffers are made, processes connected
    for version in range(2, args.rounds + 2):
        nudge(model)
        copy = min(copies.seconds() for _ in range(3))
        begin = time.perf_counter()
        receipts = run(version)
        seconds = time.perf_counter() - begin
        measured.add(seconds, receipts, statistics.median([copy, min(copies.seconds() for _ in range(3))]))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(default_folder()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=WAYS, metavar="way")
    parser.add_argument("--json", help="write all rounds to this file")
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import tempfile

    import ray

    found = []
    print("way          over a copy  spread", flush=True)
    for way in args.only:
        if way != "in process":
            # A cluster for each: its object store then holds nothing of the last.
            ray.init(address="local", num_cpus=args.actors + 1, include_dashboard=False, log_to_driver=False)
        with tempfile.TemporaryDirectory() as scratch:
            found.append(measure(way, args, scratch))
        if ray.is_initialized():
            ray.shutdown()
        print(found[-1].line(), flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump([vars(measured) for measured in found], file, indent=1)


if __name__ == "__main__":
    main()
