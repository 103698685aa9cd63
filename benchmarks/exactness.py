"""Is it the same function? Every claim of exactness, measured on a real model, in one table.

    python benchmarks/exactness.py [--model DIR] [--new-tokens 128] [--quick]

On 16 chat prompts of different lengths in fp32: greedy tokens against single-row ``generate``, for an
engine and for pools of 1 and 2 actors; sampled rollouts (n=4, temperature 1, half as many new tokens)
across pool sizes, prompt orders and splits of a group, seeded and strict; log-probabilities against a
teacher-forced forward; what shared prefill saves; and the memory of an engine over 200 rollouts. Exits
1 when a claim fails.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
import ray
import torch
from peers import encode
from transformers import AutoModelForCausalLM

from rollout_pool import (
    Engine,
    EngineConfig,
    PoolConfig,
    RolloutGroup,
    RolloutPool,
    RolloutRequest,
    Sample,
    SamplingParams,
    verify,
)
from rollout_pool.demo_model import default_folder

PARTS = ("greedy", "strict", "seeded", "sharing", "memory")


@dataclass
class Table:
    """Claims and what was seen, printed as they come."""

    failed: list[str] = field(default_factory=list)

    def add(self, claim: str, seen: str, holds: bool | None = None) -> None:
        """holds None: a figure, not a claim."""
        mark = "" if holds is None else "yes" if holds else "NO"
        print(f"| {claim} | {seen} | {mark} |", flush=True)
        if holds is False:
            self.failed.append(claim)


def on_pool(config: PoolConfig, work: Callable[[object], list[RolloutGroup]]) -> list[RolloutGroup]:
    """Start a pool, let ``work`` use it, shut it down."""
    pool = RolloutPool.remote(config)
    try:
        return work(pool)
    finally:
        ray.get(pool.shutdown.remote())
        ray.kill(pool)


def equal(left: Sample, right: Sample, bits: bool) -> bool:
    """Same tokens and seed; with ``bits`` also the same log-probabilities bit for bit."""
    same = left.token_ids.tolist() == right.token_ids.tolist()
    same = same and (left.seed, left.sample_index) == (right.seed, right.sample_index)
    if not bits:
        return same
    pairs = ((left.logprobs, right.logprobs), (left.sampling_logprobs, right.sampling_logprobs))
    return same and all(a.tobytes() == b.tobytes() for a, b in pairs)


def fraction(left: list[RolloutGroup], right: list[RolloutGroup], bits: bool = False) -> tuple[int, int]:
    """How many samples of the same request and index are equal, of how many."""
    by_key = {(g.request_id, s.sample_index): s for g in right for s in g.samples}
    pairs = [(s, by_key[g.request_id, s.sample_index]) for g in left for s in g.samples]
    return sum(equal(a, b, bits) for a, b in pairs), len(pairs)


def greedy(table: Table, arguments: argparse.Namespace, prompts: list[list[int]]) -> None:
    """Against single-row ``generate``, token by token."""
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=arguments.new_tokens
        )
        expected.append(out[0, len(prompt) :].tolist())
    sampling = SamplingParams(temperature=0.0, max_new_tokens=arguments.new_tokens)
    engine = EngineConfig(num_slots=8, max_length=256)
    runs = {"engine": lambda: Engine(arguments.model, engine, dtype="float32").generate(prompts, sampling)}
    for count in (1, 2):
        config = PoolConfig(model=arguments.model, num_actors=count, dtype="float32", engine=engine)
        runs[f"pool, {count} actor(s)"] = lambda config=config: on_pool(
            config, lambda pool: ray.get(pool.rollout.remote(prompts, sampling))
        )
    for name, run in runs.items():
        groups = run()
        got = [group.samples[0].token_ids.tolist() for group in groups]
        same = sum(a == b for a, b in zip(got, expected, strict=True))
        tokens = sum(map(len, got))
        seen = f"{same}/{len(prompts)} prompts, {tokens} tokens"
        table.add(f"greedy tokens equal generate: {name}, 8 slots", seen, same == len(prompts))


def sampled(table: Table, arguments: argparse.Namespace, prompts: list[list[int]], mode: str) -> None:
    """The same samples whatever the pool's size, the order and the split."""
    sampling = SamplingParams(n=4, max_new_tokens=arguments.new_tokens // 2, seed=1234)
    half = sampling.model_copy(update={"n": 2})
    requests = [RolloutRequest(prompt, request_id=f"prompt-{i}") for i, prompt in enumerate(prompts)]
    shuffled = random.Random(5).sample(requests, len(requests))
    second = [RolloutRequest(r.prompt, request_id=r.request_id, sample_offset=2) for r in requests]
    engine = EngineConfig(num_slots=16, max_length=256, deterministic=mode)

    def pool(count: int) -> PoolConfig:
        return PoolConfig(model=arguments.model, num_actors=count, dtype="float32", engine=engine)

    def run(config: PoolConfig, *calls: tuple[list[RolloutRequest], SamplingParams]) -> list[RolloutGroup]:
        def work(handle: object) -> list[RolloutGroup]:
            return [g for asked, params in calls for g in ray.get(handle.rollout.remote(asked, params))]

        return on_pool(config, work)

    base = run(pool(1), (requests, sampling))
    variants = {
        "2 actors": run(pool(2), (requests, sampling)),
        "2 actors, shuffled order": run(pool(2), (shuffled, sampling)),
        "n=4 as 2 + 2": run(pool(1), (requests, half), (second, half)),
    }
    for name, groups in variants.items():
        tokens, total = fraction(groups, base)
        bits, _ = fraction(groups, base, bits=True)
        is_strict = mode == "strict"
        table.add(f"{mode}: {name} equals 1 actor, tokens", f"{tokens}/{total} samples", tokens == total)
        table.add(f"{mode}: {name} equals 1 actor, bit for bit", f"{bits}/{total} samples",
                  bits == total if is_strict else None)  # fmt: skip
    check = verify(base, arguments.model)
    table.add(f"{mode}: logprobs against a teacher-forced forward",
              f"max {check.max_abs_diff:.1e}, mean {check.mean_abs_diff:.1e}, {check.num_tokens} tokens",
              check.max_abs_diff < 1e-3)  # fmt: skip


def sharing(table: Table, arguments: argparse.Namespace, prompts: list[list[int]]) -> None:
    """One prefill per group against one per sample."""
    sampling = SamplingParams(n=4, max_new_tokens=16, seed=3)
    computed, groups = {}, {}
    for prefix in ("expand", "off"):
        engine = Engine(
            arguments.model, EngineConfig(num_slots=8, max_length=256, prefix=prefix), dtype="float32"
        )
        groups[prefix] = engine.generate(prompts, sampling)
        computed[prefix] = engine.stats().prefill_tokens
    same, total = fraction(groups["expand"], groups["off"])
    table.add("shared prefill gives the same tokens", f"{same}/{total} samples", same == total)
    table.add("prompt tokens computed fall by n=4", f"{computed['off']} to {computed['expand']}",
              computed["off"] == 4 * computed["expand"])  # fmt: skip


def memory(table: Table, arguments: argparse.Namespace, prompts: list[list[int]], calls: int) -> None:
    """Resident memory of a warm engine, and equal results of equal calls."""
    engine = Engine(arguments.model, EngineConfig(num_slots=8, max_length=256), dtype="float32")
    sampling = SamplingParams(n=2, max_new_tokens=8, seed=9)
    process = psutil.Process(os.getpid())
    first = engine.generate(prompts[:4], sampling)
    sizes = []
    for call in range(calls):
        last = engine.generate(prompts[:4], sampling)
        if call % max(1, calls // 10) == 0 or call == calls - 1:
            sizes.append(process.memory_info().rss / 2**20)
    same, total = fraction(last, first)
    table.add(f"{calls} calls: the last equals the first", f"{same}/{total} samples", same == total)
    growth = sizes[-1] - sizes[len(sizes) // 3]
    table.add(f"{calls} calls: resident memory", f"{sizes[0]:.0f} MiB at first, {sizes[-1]:.0f} MiB at last",
              growth < 20)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default=str(default_folder()), help="by default what fetch-demo-model makes"
    )
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="4 prompts, 24 tokens, 20 calls")
    arguments = parser.parse_args()
    prompts = encode(arguments.model)
    if arguments.quick:
        prompts, arguments.new_tokens = prompts[:4], 24
    start = time.time()
    ray.init(include_dashboard=False, log_to_driver=False)
    table = Table()
    calls = 20 if arguments.quick else 200
    parts: dict[str, Callable[[], None]] = {
        "greedy": lambda: greedy(table, arguments, prompts),
        "strict": lambda: sampled(table, arguments, prompts, "strict"),
        "seeded": lambda: sampled(table, arguments, prompts, "seeded"),
        "sharing": lambda: sharing(table, arguments, prompts),
        "memory": lambda: memory(table, arguments, prompts, calls),
    }
    print("| claim | seen | holds |\n| --- | --- | --- |")
    for name in arguments.parts:
        parts[name]()
    print(f"\n{time.time() - start:.0f} s, torch {torch.__version__}, {len(prompts)} prompts")
    if table.failed:
        sys.exit("failed: " + "; ".join(table.failed))


if __name__ == "__main__":
    main()
