"""Roll out tasks with verifiers on a small real model: two CPU actors, four samples per prompt.

    rollout-pool fetch-demo-model
    python examples/demo.py

The tasks and their verifiers are from reasoning-gym; a 135M model gets some of them right, some of the
time, which is what a trainer would learn from. Samples and rewards are written as ``rollout-pool run``
would, and drawn as one HTML page. Needs ``pip install 'rollout-pool[demo]'``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads leave their core to others
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
import reasoning_gym
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.utils import logging as transformers_logging

from rollout_pool import RolloutGroup, RolloutPool, RolloutRequest, demo_model, verify
from rollout_pool.prompt_file import PromptLine
from rollout_pool.records import to_record
from rollout_pool.report.page import write_report
from rollout_pool.run_config import RunConfig
from rollout_pool.trace import TraceFile, trace_path
from rollout_pool.types import PoolStats

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "cpu_demo.yaml"
TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 12},
    "letter_counting": {"min_words": 1, "max_words": 1},
}
CHATS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three colours.",
    "Why do leaves fall in autumn?",
)
NUM_VERIFIED = 6

console = Console(highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Roll out tasks with verifiers on a small real model.")
    parser.add_argument("--problems", type=int, default=8, help="problems of each task (default: 8)")
    parser.add_argument(
        "--output", type=Path, default=Path("demo_output"), metavar="DIR", help="default: demo_output"
    )
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    output = args.output / "samples.jsonl"

    config = RunConfig.load(CONFIG, {"model": str(demo_model.fetch(say=console.print))})
    tasks = {
        name: reasoning_gym.create_dataset(name, seed=config.seed, size=args.problems, **options)
        for name, options in TASKS.items()
    }
    requests = [
        RolloutRequest(chat(entry["question"]), metadata={"task": name, "entry": entry})
        for name, dataset in tasks.items()
        for entry in dataset
    ]
    requests += [RolloutRequest(chat(text), metadata={"task": "chat"}) for text in CHATS]

    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    pool = RolloutPool.remote(config.pool)
    with TraceFile(trace_path(output)) as trace:
        trace.begin(config, len(requests))
        with console.status(f"{config.num_actors} actors load {demo_model.NAME}"):
            trace.add_actors(ray.get(pool.ready.remote()))
            trace.add_stats(ray.get(pool.stats.remote()))
        start = time.monotonic()
        groups = roll_out(pool, requests, config, trace)
        seconds = time.monotonic() - start
        trace.end()
    stats = ray.get(pool.stats.remote())
    ray.shutdown()

    rewards = {group.index: score(group, tasks) for group in groups if group.metadata["task"] != "chat"}
    show_samples(groups, rewards)
    show_rewards(groups, rewards)
    show_figures(groups, seconds, stats)
    write_samples(output, groups, requests, rewards, config)
    write_report(output, output.with_suffix(".html"))
    console.print(f"the report is in {output.with_suffix('.html')}: open it in a browser")
    transformers_logging.disable_progress_bar()
    step = math.ceil(len(groups) / NUM_VERIFIED)
    with console.status("rescoring some groups with a plain forward of the model"):
        console.print(verify(groups[::step], config.model).describe())


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text.strip()}]


def roll_out(
    pool: Any, requests: list[RolloutRequest], config: RunConfig, trace: TraceFile
) -> list[RolloutGroup]:
    """All groups in the order of the requests, with a bar that moves when one finishes."""
    columns = (
        TextColumn("groups"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    groups: list[RolloutGroup] = []
    tokens = 0
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(requests), tokens=0)
        for ref in pool.stream.remote(requests, config.sampling):
            group = ray.get(ref)
            groups.append(group)
            trace.add_group(group)
            trace.add_stats(ray.get(pool.stats.remote()))
            tokens += sum(len(sample.token_ids) for sample in group.samples)
            progress.update(bar, advance=1, tokens=tokens)
    return sorted(groups, key=lambda group: group.index)


def score(group: RolloutGroup, tasks: dict[str, Any]) -> list[float]:
    """The verifier's reward for each sample; the last number of a text counts as its answer."""
    dataset, entry = tasks[group.metadata["task"]], group.metadata["entry"]
    answers = [re.findall(r"-?\d+", sample.text) for sample in group.samples]
    return [dataset.score_answer(found[-1] if found else None, entry) for found in answers]


def write_samples(
    path: Path,
    groups: list[RolloutGroup],
    requests: list[RolloutRequest],
    rewards: dict[int, list[float]],
    config: RunConfig,
) -> None:
    """One line per group, as ``rollout-pool run`` writes them, with the reward in each sample."""
    with path.open("w") as file:
        for group in groups:
            line = PromptLine(group.index, requests[group.index], config.sampling, "")
            record = to_record(line, group, config.results_hash())
            record["request_id"] = group.request_id
            for sample, reward in zip(record["samples"], rewards.get(group.index, ()), strict=False):
                sample["reward"] = reward
            file.write(json.dumps(record) + "\n")


def show_samples(groups: list[RolloutGroup], rewards: dict[int, list[float]]) -> None:
    """One group of each task side by side: the one whose rewards differ most."""
    for task in (*TASKS, "chat"):
        mine = [group for group in groups if group.metadata["task"] == task]
        group = max(mine, key=lambda group: spread(rewards.get(group.index, [0.0])))
        asked = CHATS[mine.index(group)] if task == "chat" else group.metadata["entry"]["question"].strip()
        console.print(f"\n[bold]{task}[/bold]:", escape(asked))
        table = Table(show_header=task != "chat", box=None, pad_edge=False)
        table.add_column("reward", style="green")
        table.add_column("sample")
        for number, sample in enumerate(group.samples):
            reward = f"{rewards[group.index][number]:.2f}" if task != "chat" else ""
            table.add_row(reward, escape(" ".join(sample.text.split())))
        console.print(table)


def spread(rewards: list[float]) -> float:
    return max(rewards) - min(rewards)


def show_rewards(groups: list[RolloutGroup], rewards: dict[int, list[float]]) -> None:
    table = Table(title="mean reward", title_justify="left")
    for column in ("task", "problems", "samples", "mean reward", "mixed groups"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for task in TASKS:
        mine = [rewards[group.index] for group in groups if group.metadata["task"] == task]
        flat = [reward for group in mine for reward in group]
        mixed = sum(spread(group) > 0 for group in mine)
        table.add_row(task, str(len(mine)), str(len(flat)), f"{sum(flat) / len(flat):.2f}", str(mixed))
    console.print()
    console.print(table)


def show_figures(groups: list[RolloutGroup], seconds: float, stats: PoolStats) -> None:
    tokens = sum(len(sample.token_ids) for group in groups for sample in group.samples)
    samples = sum(len(group.samples) for group in groups)
    computed = sum(actor.prefill_tokens for actor in stats.actors)
    saved = sum(actor.prefill_tokens_saved for actor in stats.actors)
    speed = f"[bold]{tokens / seconds:.0f} tokens/s[/bold]"
    console.print(f"{samples} samples, {tokens} new tokens in {seconds:.1f} s: {speed}")
    console.print(f"prompt tokens: {computed} computed, {saved} saved by sharing each among its samples")


if __name__ == "__main__":
    main()
