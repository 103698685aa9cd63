"""Layout ragged beside layout aligned, on the same work in one run.

    python benchmarks/layouts.py [--model DIR] [--rounds 3] [--threads 2] [--workloads chat equal] [--small]

Each layout runs in a process of its own, so that its peak memory is its own; the processes take turns,
round by round. The first line of each workload is the result: the time of aligned over that of ragged,
the median of the rounds and their spread. Then, for each layout: seconds, trims, what they moved, the KV
of all slots, and the peak of the resident memory above what the loaded model takes (KV counts there once
it is written). Both layouts have the buffer that the longest row needs, and not a column more.

Workloads (EOS ignored, temperature 1, fixed seeds):
    chat   16 chat prompts of different lengths, 4 requests of 2 samples each, budgets with a long tail,
           32 slots: every slot is used four times
    equal  16 prompts of one length, 4 samples each, one budget, 64 slots: nothing to trim
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out

from turns import Contender

from rollout_pool.demo_model import default_folder

TOPICS = [
    "rain",
    "the capital of France",
    "three prime numbers, and for each of them a sentence that says why it is prime",
    "a bakery near a river",
    "photosynthesis, for a child of eight",
    "why the sky is blue",
    "17 + 25, step by step",
    "a plan for learning to cook in four weeks, one line a week, with a shopping list for the first",
    "the water cycle",
    "a joke about a computer",
    "tides",
    "how bread rises",
    "good habits for a long train journey",
    "what rhymes with light",
    "3.5 kilometres in miles",
    "a fruit, where it grows best, and why the climate suits it",
]
LAYOUTS = ("ragged", "aligned")
WORKLOADS = ("chat", "equal")
MIB = 1 << 20


def requests_of(workload: str, model_dir: str, small: bool) -> tuple[list[Any], int, int]:
    """The requests, the number of slots, and the length of the longest row."""
    from transformers import AutoTokenizer

    from rollout_pool import RolloutRequest, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompts = [
        tokenizer(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": f"Tell me about {topic}."}],
                tokenize=False,
                add_generation_prompt=True,
            ),
            add_special_tokens=False,
        )["input_ids"]
        for topic in (TOPICS[:3] if small else TOPICS)
    ]
    draw = random.Random(7)
    if workload == "equal":
        shortest, new = min(map(len, prompts)), 8 if small else 96
        work = [(prompt[-shortest:], 4, new) for prompt in prompts]
        slots = 4 * len(prompts)
    else:
        most = 12 if small else 224
        tail = [min(most, max(2, int(draw.lognormvariate(3.4, 0.9)))) for _ in range(4 * len(prompts) - 1)]
        budgets = [most, *(min(most, budget) for budget in tail)]
        work = [(prompt, 2, budgets.pop()) for prompt in prompts for _ in range(4)]
        draw.shuffle(work)
        slots = len(work) // 2
    requests = [
        RolloutRequest(prompt, SamplingParams(n=n, max_new_tokens=new, ignore_eos=True, seed=1))
        for prompt, n, new in work
    ]
    return requests, slots, max(len(prompt) + new for prompt, _, new in work)


class Worker(Contender):
    """One layout in a process of its own; runs a round when told to."""

    def __init__(self, layout: str, workload: str, arguments: argparse.Namespace) -> None:
        options = ["--worker", layout, "--workloads", workload, "--model", arguments.model]
        options += ["--small"] if arguments.small else []
        self.layout = layout
        self.rounds: list[dict[str, Any]] = []
        super().__init__(layout, __file__, options, arguments.threads, mark="layout")

    def run(self) -> dict[str, Any]:
        """One round; what it took and made."""
        self.rounds.append(self.round())
        return self.rounds[-1]


def serve(layout: str, workload: str, arguments: argparse.Namespace) -> None:
    """The other side of a :class:`Worker`."""
    import torch

    from rollout_pool import Engine, EngineConfig

    torch.set_num_threads(arguments.threads)
    requests, slots, longest = requests_of(workload, arguments.model, arguments.small)
    config = EngineConfig(num_slots=slots, max_length=longest, layout=layout)
    engine = Engine(arguments.model, config, dtype="float32")
    before = start_of_peak()
    print(json.dumps({"layout": layout}), flush=True)
    for _ in sys.stdin:
        earlier = engine.stats()
        start = time.perf_counter()
        groups = engine.generate(requests)
        seconds = time.perf_counter() - start
        stats = engine.stats()
        samples = [sample.token_ids for group in groups for sample in group.samples]
        answer = {
            "layout": layout,
            "seconds": seconds,
            "tokens": sum(ids.size for ids in samples),
            "steps": stats.decode_steps - earlier.decode_steps,
            "trims": stats.trims - earlier.trims,
            "trimmed_bytes": stats.trimmed_bytes - earlier.trimmed_bytes,
            "kv_bytes": stats.kv_bytes,
            "peak_bytes": peak_memory() - before,
            "samples": [zlib.crc32(ids.tobytes()) for ids in samples],
        }
        print(json.dumps(answer), flush=True)


def start_of_peak() -> int:
    """Forget the peak of loading, and return the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_memory()


def peak_memory() -> int:
    """The most bytes that were resident since :func:`start_of_peak`."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def report(workload: str, ragged: Worker, aligned: Worker) -> dict[str, Any]:
    """Print the ratio first, then what is behind it."""
    pairs = list(zip(ragged.rounds, aligned.rounds, strict=True))
    ratios = [b["seconds"] / a["seconds"] for a, b in pairs]
    same = sum(x == y for x, y in zip(pairs[0][0]["samples"], pairs[0][1]["samples"], strict=True))
    total = len(pairs[0][0]["samples"])
    print(
        f"{workload}: aligned takes {statistics.median(ratios):.2f} of ragged's time "
        f"(rounds {min(ratios):.2f} to {max(ratios):.2f}); {same} of {total} samples have the same tokens"
    )
    for worker in (ragged, aligned):
        last = worker.rounds[-1]
        seconds = [one["seconds"] for one in worker.rounds]
        print(
            f"  {worker.layout:8s} {statistics.median(seconds):7.2f} s "
            f"({min(seconds):.2f} to {max(seconds):.2f}), {last['tokens']} tokens, {last['steps']} steps, "
            f"{last['trims']} trims moved {last['trimmed_bytes'] / MIB:.1f} MiB, "
            f"KV {last['kv_bytes'] / MIB:.1f} MiB, peak +{last['peak_bytes'] / MIB:.1f} MiB"
        )
    rounds = {worker.layout: [strip(one) for one in worker.rounds] for worker in (ragged, aligned)}
    return {"ratios": ratios, "same_samples": same, "samples": total, "rounds": rounds}


def strip(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("samples", "layout")}


def measure(workload: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both layouts, in turns; each goes first in every other round."""
    workers: list[Worker] = []
    try:
        for layout in LAYOUTS:
            workers.append(Worker(layout, workload, arguments))
        for number in range(arguments.rounds):
            for worker in workers if number % 2 == 0 else reversed(workers):
                seconds = worker.run()["seconds"]
                print(f"{workload}, round {number + 1}: {worker.layout} {seconds:.2f} s", file=sys.stderr)
        return report(workload, *workers)
    finally:
        for worker in workers:
            worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default=str(default_folder()), help="by default what fetch-demo-model makes"
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--small", action="store_true", help="3 prompts, at most 12 tokens: does it run?")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--worker", choices=LAYOUTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(arguments.worker, arguments.workloads[0], arguments)
        return
    results = {workload: measure(workload, arguments) for workload in arguments.workloads}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
