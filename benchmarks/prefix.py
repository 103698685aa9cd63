"""Prompts that samples share beside copies of them (engine.prefix "shared" and "expand"), in turns.

    python benchmarks/prefix.py [--model DIR] [--rounds 3] [--steps 24] [--threads 2] [--cpu-time] [--small]

Two engines on the same weights take turns in one process, so that a busy machine is unfair to both alike.
EOS is ignored; temperature 1, fixed seeds. Every figure is the median over turns, with the quartiles.

Two tables, in Markdown:

1. Whole rollouts: a group of 16 samples of 64 new tokens after a prompt of 1,024. Tokens a second of shared
   over those of expand; the KV of the group as it lies in memory, of its prompt and of its new tokens; and
   how many samples have the same tokens.
2. Decode steps alone, over lengths of prompts and samples of each (16 rows in all, or as many as one group
   has): the time of a step of expand over that of shared. Above 1 sharing is faster; "auto" tells what the
   cost rule does there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rollout_pool import Engine, EngineConfig, RolloutGroup, RolloutRequest, SamplingParams
from rollout_pool.actors.sharing import pays
from rollout_pool.demo_model import default_folder

MODES = ("expand", "shared")
ROWS = 16
MIB = 1 << 20


def engines_for(model: Any, prompt: int, new: int, groups: int, samples: int) -> dict[str, Engine]:
    """One engine per mode, on the same weights."""
    engines = {}
    for mode in MODES:
        sizes = {"max_new_tokens": new, "prompt_tokens": groups * prompt} if mode == "shared" else {}
        config = EngineConfig(
            num_slots=groups * samples,
            max_length=prompt + new,
            prefix=mode,
            prefix_cache_tokens=0,
            **sizes,
        )
        engines[mode] = Engine(model, config)
    return engines


def requests_for(prompt: int, new: int, groups: int, samples: int, vocab: int) -> list[RolloutRequest]:
    generator = torch.Generator().manual_seed(prompt)
    sampling = SamplingParams(n=samples, max_new_tokens=new, ignore_eos=True, seed=1)
    prompts = torch.randint(10, vocab, (groups, prompt), generator=generator).tolist()
    return [RolloutRequest(ids, sampling, request_id=f"group {i}") for i, ids in enumerate(prompts)]


def whole(arguments: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Rollouts from prompt to last token, and the KV of a group."""
    prompt, new, samples = (64, 8, 16) if arguments.small else (1024, 64, 16)
    engines = engines_for(model, prompt, new, 1, samples)
    vocab = engines["expand"].model.config.vocab_size
    requests = requests_for(prompt, new, 1, samples, vocab)
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    results: dict[str, list[RolloutGroup]] = {}
    for number in range(arguments.rounds + 1):
        for mode in MODES if number % 2 else reversed(MODES):
            start = arguments.clock()
            results[mode] = engines[mode].generate(requests)
            if number:  # the first one warms up
                rates[mode].append(samples * new / (arguments.clock() - start))
    same = sum(
        one.token_ids.tolist() == other.token_ids.tolist()
        for one, other in zip(*(results[mode][0].samples for mode in MODES), strict=True)
    )
    ratios = [b / a for a, b in zip(rates["expand"], rates["shared"], strict=True)]
    return {
        "prompt": prompt, "new": new, "samples": samples, "ratios": ratios, "rates": rates,
        "same_samples": same, **{mode: kv_of_group(engines[mode], requests[0]) for mode in MODES},
    }  # fmt: skip


def kv_of_group(engine: Engine, request: RolloutRequest) -> dict[str, int]:
    """Bytes that one running group holds: in all slots, which are its own, and of its prompt outside them."""
    engine.submit(request)
    engine.step()
    stats = engine.stats()
    held = {"slots": stats.kv_bytes, "prompt": stats.shared_kv_bytes}
    while engine.has_work():
        engine.step()
    return held


def steps(prompt: int, samples: int, arguments: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Decode steps of the same rows, in turns."""
    groups = max(1, ROWS // samples)
    new = arguments.steps + 4
    engines = engines_for(model, prompt, new, groups, samples)
    for request in requests_for(prompt, new, groups, samples, engines["expand"].model.config.vocab_size):
        for engine in engines.values():
            engine.submit(request)
    for _ in range(2):  # prefill and first steps
        for engine in engines.values():
            engine.step()
    taken: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(arguments.steps):
        for mode in MODES if number % 2 else reversed(MODES):
            start = arguments.clock()
            engines[mode].step()
            taken[mode].append(arguments.clock() - start)
    ratios = [a / b for a, b in zip(taken["expand"], taken["shared"], strict=True)]
    return {
        "prompt": prompt, "samples": samples, "groups": groups, "ratios": ratios, "seconds": taken,
        "auto": pays(prompt, samples),
    }  # fmt: skip


def spread(values: Sequence[float]) -> str:
    """Median and quartiles."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def print_whole(found: dict[str, Any]) -> None:
    own = found["shared"]["slots"]
    print(
        "| prompt | samples | new tokens | tokens/s, shared over expand | tokens/s of each "
        "| KV of the prompt, expand | shared | times | KV of new tokens | same samples |"
    )
    print("|" + " --- |" * 10)
    in_slots, apart = found["expand"]["slots"] - own, found["shared"]["prompt"]
    rates = [statistics.median(found["rates"][mode]) for mode in MODES]
    print(
        f"| {found['prompt']:,} | {found['samples']} | {found['new']} | {spread(found['ratios'])} "
        f"| {rates[0]:.0f}, {rates[1]:.0f} | {in_slots / MIB:.1f} MiB | {apart / MIB:.1f} MiB "
        f"| {in_slots / apart:.1f} | {own / MIB:.1f} MiB | {found['same_samples']} of {found['samples']} |",
        flush=True,
    )


STEPS_HEADER = """\
| prompt | samples | groups | time of a step, expand over shared | step of expand | auto |
| --- | --- | --- | --- | --- | --- |"""


def print_steps(found: dict[str, Any]) -> None:
    print(
        f"| {found['prompt']:,} | {found['samples']} | {found['groups']} | {spread(found['ratios'])} "
        f"| {1000 * statistics.median(found['seconds']['expand']):.0f} ms "
        f"| {'shared' if found['auto'] else 'expand'} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default=str(default_folder()), help="by default what fetch-demo-model makes"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread, and its own time: for a machine with other work"
    )
    parser.add_argument("--only", choices=("whole", "steps"), help="one of the tables")
    parser.add_argument("--small", action="store_true", help="short prompts, few steps: does it run?")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    if arguments.small:
        arguments.prompts, arguments.samples, arguments.rounds, arguments.steps = [32], [2, 4], 1, 4
    arguments.clock = time.process_time if arguments.cpu_time else time.perf_counter
    torch.set_num_threads(1 if arguments.cpu_time else arguments.threads)
    # As an engine lays weights out that loads them itself; all others borrow them.
    first = Engine(arguments.model, EngineConfig(num_slots=1, max_length=32), dtype="float32")
    results: dict[str, Any] = {}
    if arguments.only != "steps":
        results["whole"] = whole(arguments, first.model)
        print_whole(results["whole"])
        print()
    if arguments.only != "whole":
        print(STEPS_HEADER, flush=True)
        results["steps"] = []
        for prompt in arguments.prompts:
            for samples in arguments.samples:
                results["steps"].append(steps(prompt, samples, arguments, first.model))
                print_steps(results["steps"][-1])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
