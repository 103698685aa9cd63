"""Rollouts per second, ours beside what people would otherwise use, on one model in one run.

    python benchmarks/peers.py [--model DIR] [--workload sampled|greedy] [--rounds 3] [--threads 2]

Every peer gets the same model, prompts, budgets, dtype and thread count, and as many rows at once as
it likes of the sizes tried. Each runs in a process of its own; the processes take turns, round by
round, so that a busy machine is unfair to all of them alike. The first round tries every peer with all
its settings, the others repeat the best of each. The first lines are the result: ours over the best of
each peer, the median of the rounds and their spread.

Workloads (EOS ignored, so that all do the same work):
    sampled  16 chat prompts x 8 samples, temperature 1, 96 new tokens
    greedy   16 chat prompts, greedy, 128 new tokens
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out

from turns import Contender

from rollout_pool.demo_model import default_folder

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "List three prime numbers and explain in one sentence each why it is prime.",
    "Hi!",
    "Explain photosynthesis to a child of eight, with an everyday example.",
    "Translate 'good morning, how did you sleep?' into Spanish.",
    "What is 17 + 25? Show the steps.",
    "Name a fruit and say where it grows best, and why the climate there suits it.",
    "Give me a short plan for learning to cook in four weeks, one line a week.",
    "Who wrote Don Quixote?",
    "Summarise the water cycle in two sentences for a poster in a school corridor.",
    "What rhymes with 'light'?",
    "Suggest a name for a small bakery near a river, and a slogan of five words.",
    "Why is the sky blue? Answer as a pirate would, but keep the physics right.",
    "Convert 3.5 kilometres to miles.",
    "Tell me a joke about a computer that goes to the doctor.",
]
WORKLOADS = {
    "sampled": {"n": 8, "temperature": 1.0, "new": 96},
    "greedy": {"n": 1, "temperature": 0.0, "new": 128},
}


def encode(model_dir: str) -> list[list[int]]:
    """The chat prompts as token ids; lengths differ."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return [
        tokenizer(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            ),
            add_special_tokens=False,
        )["input_ids"]
        for question in QUESTIONS
    ]


def ours(model_dir: str, work: dict[str, Any], rows: int) -> Callable[[], int]:
    from rollout_pool import Engine, EngineConfig, SamplingParams

    prompts = encode(model_dir)
    engine = Engine(model_dir, EngineConfig(num_slots=rows, max_length=256))
    sampling = SamplingParams(
        n=work["n"], temperature=work["temperature"], max_new_tokens=work["new"], ignore_eos=True
    )

    def run() -> int:
        return sum(s.token_ids.size for group in engine.generate(prompts, sampling) for s in group.samples)

    return run


def generate(model_dir: str, work: dict[str, Any], rows: int) -> Callable[[], int]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    ordered = sorted(encode(model_dir), key=len)  # neighbours in length share a batch: least padding
    expanded = [prompt for prompt in ordered for _ in range(work["n"])]
    options = {"do_sample": work["temperature"] > 0, "max_new_tokens": work["new"], "pad_token_id": 0}
    if options["do_sample"]:
        options |= {"temperature": work["temperature"], "top_k": 0, "top_p": 1.0}

    def run() -> int:
        count = 0
        for start in range(0, len(expanded), rows):
            batch = expanded[start : start + rows]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
            out = model.generate(ids, attention_mask=mask, eos_token_id=None, **options)
            count += out[:, width:].numel()
        return count

    return run


def generate_batch(model_dir: str, work: dict[str, Any], rows: int) -> Callable[[], int]:
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="sdpa").eval()
    prompts = encode(model_dir)
    config = GenerationConfig(
        do_sample=work["temperature"] > 0,
        max_new_tokens=work["new"],
        num_return_sequences=work["n"],
        eos_token_id=-1,
        pad_token_id=0,
        top_k=0,
        top_p=1.0,
    )
    batching = ContinuousBatchingConfig(
        page_size=64, num_blocks=rows * 6, max_batch_tokens=max(256, rows), max_requests_per_batch=rows
    )

    def run() -> int:
        with torch.inference_mode():
            out = model.generate_batch(
                inputs=prompts, generation_config=config, continuous_batching_config=batching, warmup=False
            )
        return sum(len(result.generated_tokens) for result in out.values())

    return run


PEERS = {"ours": ours, "generate": generate, "generate_batch": generate_batch}
SETTINGS = {
    "sampled": {"ours": (128,), "generate": (32, 64, 128), "generate_batch": (32, 64, 128)},
    "greedy": {"ours": (16,), "generate": (8, 16), "generate_batch": (16,)},
}


class Worker(Contender):
    """One peer with one setting in a process of its own; runs a round when told to."""

    def __init__(self, name: str, rows: int, arguments: argparse.Namespace) -> None:
        self.name = name
        self.rates: list[float] = []
        options = ["--worker", name, "--rows", str(rows)]
        options += ["--model", arguments.model, "--workload", arguments.workload]
        label = f"{name} ({rows} rows)"
        super().__init__(label, __file__, options, arguments.threads, mark="peer", is_quiet=True)

    def run(self) -> float:
        """Tokens per second of one round."""
        self.rates.append(float(self.round()["rate"]))
        return self.rates[-1]


def serve(arguments: argparse.Namespace) -> None:
    """The other side of a :class:`Worker`."""
    import torch

    torch.set_num_threads(arguments.threads)
    work = WORKLOADS[arguments.workload]
    run = PEERS[arguments.worker](arguments.model, work, arguments.rows)
    print(json.dumps({"peer": arguments.worker}), flush=True)
    expected = len(QUESTIONS) * work["n"] * work["new"]
    for _ in sys.stdin:
        start = time.perf_counter()
        tokens = run()
        seconds = time.perf_counter() - start
        if tokens != expected:
            raise SystemExit(f"{arguments.worker} made {tokens} tokens, {expected} were asked for")
        print(json.dumps({"peer": arguments.worker, "rate": tokens / seconds}), flush=True)


def best_of_each(workers: list[Worker]) -> dict[str, Worker]:
    """Each peer's fastest setting so far."""
    names = dict.fromkeys(worker.name for worker in workers)
    return {name: max((w for w in workers if w.name == name), key=lambda w: w.rates[0]) for name in names}


def report(workers: list[Worker], arguments: argparse.Namespace) -> dict[str, Any]:
    """Print ratios first, then the rates behind them."""
    best = best_of_each(workers)
    mine = best["ours"].rates
    result: dict[str, Any] = {"workload": arguments.workload, "threads": arguments.threads, "ratios": {}}
    for name, worker in best.items():
        if name == "ours":
            continue
        ratios = [a / b for a, b in zip(mine, worker.rates, strict=True)]
        result["ratios"][name] = ratios
        print(
            f"ours / {name}: {statistics.median(ratios):.2f}x "
            f"(rounds {min(ratios):.2f} to {max(ratios):.2f}; its best setting: {worker.label})"
        )
    for worker in workers:
        low, high, middle = min(worker.rates), max(worker.rates), statistics.median(worker.rates)
        spread = f"({low:.1f} to {high:.1f}, {len(worker.rates)} rounds)"
        print(f"  {worker.label:28s} {middle:7.1f} tokens/s {spread}")
    result["rates"] = {worker.label: worker.rates for worker in workers}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default=str(default_folder()), help="by default what fetch-demo-model makes"
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="sampled")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--only-rows", type=int, nargs="+", help="of the sizes to try, only these")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--worker", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(arguments)
        return
    workers: list[Worker] = []
    try:
        for name in dict.fromkeys(["ours", *arguments.peers]):
            sizes = SETTINGS[arguments.workload][name]
            wanted = [rows for rows in sizes if rows in (arguments.only_rows or sizes)]
            workers += [Worker(name, rows, arguments) for rows in wanted or sizes]
        for number in range(arguments.rounds):
            # The first round tries every setting; the others repeat each peer's best.
            for worker in workers if number == 0 else best_of_each(workers).values():
                print(f"round {number + 1}: {worker.label} {worker.run():.1f} tokens/s", file=sys.stderr)
        result = report(workers, arguments)
    finally:
        for worker in workers:
            worker.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
