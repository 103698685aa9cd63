"""Rounds of a workload: every peer in a process of its own, one after the other, again and again."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from turns import Contender

from speed.peers import DEEPSPEED_PYTHON, OURS, PEERS
from speed.work import Work

SCRIPT = str(Path(__file__).resolve().parents[1] / "peer.py")


class Runner:
    """One peer with one number of rows, and what it has done so far."""

    def __init__(self, name: str, rows: int, work: Work, file: Path) -> None:
        self.name, self.rows, self.work = name, rows, work
        self.rounds: list[dict[str, Any]] = []
        self.unavailable: str | None = None
        self.cold_start_s = 0.0
        self._file = file
        self._process: Contender | None = None
        if not PEERS[name].uses_ray:
            self._start()

    def _start(self) -> None:
        """Load it, and warm it up."""
        python = str(DEEPSPEED_PYTHON) if PEERS[self.name].needs_deepspeed else sys.executable
        if not Path(python).exists():
            self.unavailable = "its environment is not there: make .venv-deepspeed/.ready"
            return
        begin = time.perf_counter()
        options = [self.name, "--work", str(self._file), "--rows", str(self.rows)]
        try:
            self._process = Contender(
                self.label, SCRIPT, options, self.work.threads, mark="peer", is_quiet=True, python=python
            )
        except SystemExit as end:
            self._look({"unavailable": str(end)})
            return
        self.cold_start_s = self.cold_start_s or time.perf_counter() - begin
        self._look(self._process.first_answer)

    @property
    def label(self) -> str:
        return f"{self.name} ({self.rows} rows)"

    @property
    def rates(self) -> list[float]:
        """Tokens per second, round by round."""
        return [one["tokens"] / one["seconds"] for one in self.rounds]

    @property
    def seconds(self) -> float:
        """Of all rounds so far."""
        return sum(one["seconds"] for one in self.rounds)

    def run(self) -> None:
        """One round. Raises SystemExit when it made another number of samples, or of tokens, than asked."""
        if self._process is None and self.unavailable is None and PEERS[self.name].uses_ray:
            self._start()
        if self._process is None:
            return
        try:
            answer = self._process.round()
        except (SystemExit, BrokenPipeError) as end:
            answer = {"unavailable": str(end)}
        self._look(answer)
        if PEERS[self.name].uses_ray:
            self.close()
        if self.unavailable is not None:
            return
        work = self.work
        if answer["samples"] != work.num_samples:
            raise SystemExit(f"{self.label}: {answer['samples']} samples, {work.num_samples} were asked for")
        if not work.eos and answer["tokens"] != work.num_samples * work.max_new:
            raise SystemExit(f"{self.label}: {answer['tokens']} tokens where none ends a sample")
        self.rounds.append(answer)
        print(
            f"  {work.name}, round {len(self.rounds)}: {self.label} {self.rates[-1]:.1f} tokens/s",
            file=sys.stderr,
        )

    def close(self) -> None:
        if self._process is not None:
            self._process.close(30.0 if PEERS[self.name].uses_ray else 0.0)  # with all of its cluster
            self._process = None

    def _look(self, answer: dict[str, Any]) -> None:
        if "unavailable" in answer:
            self.unavailable = answer["unavailable"]
            print(f"  {self.work.name}: {self.label}: {self.unavailable}", file=sys.stderr)
            self.close()
            if self.name == OURS:
                raise SystemExit(f"{self.label}: {self.unavailable}")


def run_work(work: Work, names: Sequence[str], num_rounds: int, patience: float) -> dict[str, Any]:
    """Measure these peers on a workload.

    The first round tries every number of rows, the others repeat each peer's best. patience: a peer other
    than ours that has taken so many seconds with its best number of rows takes part in no further round.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "work.json"
        work.write(file)
        runners: dict[str, list[Runner]] = {}
        try:
            for name in names:
                runners[name] = []
                for rows in PEERS[name].rows(work):
                    runner = Runner(name, rows, work, file)
                    runners[name].append(runner)
                    if runner.unavailable is not None:
                        break
            _take_turns(runners, num_rounds, patience)
        finally:
            for runner in chain.from_iterable(runners.values()):
                runner.close()
    return summary(work, runners)


def _take_turns(runners: dict[str, list[Runner]], num_rounds: int, patience: float) -> None:
    for runner in chain.from_iterable(runners.values()):
        runner.run()
    for tried in runners.values():
        for runner in tried:
            if runner is not best(tried):
                runner.close()  # its memory is of use to the others
    for number in range(1, num_rounds):
        turn = [best(tried) for tried in runners.values()]
        for runner in turn if number % 2 else reversed(turn):
            if runner.rounds and (runner.name == OURS or runner.seconds < patience):
                runner.run()


def best(tried: Sequence[Runner]) -> Runner:
    """The fastest of the first round, of those that ran."""
    return max(tried, key=lambda runner: runner.rates[0] if runner.rounds else -1.0)


def summary(work: Work, runners: dict[str, list[Runner]]) -> dict[str, Any]:
    """What came of it, as it goes into the file of results."""
    found: dict[str, Any] = {}
    for name, tried in runners.items():
        fastest = best(tried)
        if not fastest.rounds:
            found[name] = {"unavailable": fastest.unavailable}
            continue
        rounds = fastest.rounds
        found[name] = {
            "rows": fastest.rows,
            "tried": {str(one.rows): one.rates[0] for one in tried if one.rounds},
            "rates": fastest.rates,
            "speeds": [one["samples" if work.own_code else "tokens"] / one["seconds"] for one in rounds],
            "tokens": [one["tokens"] for one in rounds],
            "first_group_s": statistics.median(one["first_group_s"] for one in rounds),
            "cold_start_s": fastest.cold_start_s,
        }
        if rounds[0]["sum_of_rates"] is not None:
            found[name]["sums_of_rates"] = [one["sum_of_rates"] for one in rounds]
    # Speeds are in tokens; in samples where the model draws the ends, for who draws more long samples makes
    # more tokens in the time that one of them takes.
    mine = found.get(OURS, {}).get("speeds", [])
    ratios = {
        # A peer that was patient only for the first rounds is compared in those.
        name: [a / b for a, b in zip(mine, one["speeds"], strict=False)]
        for name, one in found.items()
        if name != OURS and "speeds" in one
    }
    facts = {
        "prompts": len(work.prompts),
        "prompt_tokens": [min(map(len, work.prompts)), max(map(len, work.prompts))],
        "n": work.n,
        "max_new": work.max_new,
        "max_rows": work.max_rows,
        "temperature": work.temperature,
        "samples": work.num_samples,
    }
    return {"work": facts, "peers": found, "ratios": ratios}
