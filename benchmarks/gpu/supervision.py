"""Runs each part in a process of its own, within its time, and keeps what it saw whatever becomes of it.

A kernel that faults leaves its process without a device, and one that hangs can only be killed. Then a new
process goes on with the next step.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from time import monotonic
from typing import IO, Any

from gpu.parts import Part
from gpu.worker import DEVICE_LOST, MARK, NO_DEVICE

Event = dict[str, Any]


class NoDevice(Exception):
    """There is no CUDA device."""


@dataclass
class Outcome:
    """What is known of a part."""

    part: Part
    budget: float
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    """Steps that the time did not suffice for, or the part itself."""
    broken: list[str] = field(default_factory=list)
    """Steps that ended in an error."""

    @property
    def false_claims(self) -> list[str]:
        return [row["what"] for row in self.rows if row["holds"] is False]

    def add(self, what: str, seen: str) -> None:
        self.rows.append({"what": what, "seen": seen, "holds": None, "figures": {}})


class Supervisor:
    """Runs one part to its end, to the end of its time, or to the end of its processes."""

    def __init__(self, part: Part, budget: float, command: list[str], is_dry: bool) -> None:
        self.outcome = Outcome(part, budget)
        self._command, self._is_dry = command, is_dry
        self._steps: list[str] = []
        self._next = 0
        self._began: float | None = None
        """When the step in flight began."""

    def run(self) -> Outcome:
        outcome, begin = self.outcome, monotonic()
        deadline = begin + outcome.budget
        print(f"part {outcome.part.letter}: {outcome.part.title}", file=sys.stderr, flush=True)
        while True:
            before = self._next
            code = self._run_process(deadline)
            if code == NO_DEVICE:
                raise NoDevice
            if code is None:
                self._stop_for_time()
            elif code and self._began is not None:
                self._break(f"its process ended with code {code}")
            elif code and code != DEVICE_LOST:
                self._end_early(f"the process ended with code {code}; its last lines are above")
            if code in (0, None) or self._next == before or self._next >= len(self._steps):
                break
        outcome.seconds = monotonic() - begin
        return outcome

    def _run_process(self, deadline: float) -> int | None:
        """The exit code of a process that began with the next step; None when it was stopped for time."""
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment.setdefault("MKL_CBWR", "AUTO,STRICT")  # strict mode on a CPU; MKL reads it at its start
        environment.pop("TRITON_INTERPRET", None)
        if self._is_dry:
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
            environment.setdefault("OMP_NUM_THREADS", "1")
        command = [*self._command, "--worker", self.outcome.part.letter, "--first", str(self._next)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        lines: queue.Queue[str | None] = queue.Queue()
        assert process.stdout is not None
        threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True).start()
        try:
            while (line := lines.get(timeout=max(0.0, deadline - monotonic()))) is not None:
                if line.startswith(MARK):
                    self._take(json.loads(line.removeprefix(MARK)))
                else:
                    print(line, end="", file=sys.stderr, flush=True)
            return process.wait()
        except queue.Empty:
            return None
        finally:
            process.kill()
            process.wait()

    def _take(self, event: Event) -> None:
        if "about" in event:
            self.outcome.about = event["about"]
        elif "steps" in event:
            self._steps = event["steps"]
        elif "begin" in event:
            self._began = monotonic()
        elif "end" in event:
            self._began = None
            self._next = event["end"] + 1
            if event["is_broken"]:
                self.outcome.broken.append(self._steps[event["end"]])
            for row in event["rows"]:
                self.outcome.rows.append({**row, "step_seconds": event["seconds"]})
                mark = {True: "yes ", False: "NO  ", None: ""}[row["holds"]]
                print(f"  {mark}{row['what']}: {row['seen']}", file=sys.stderr, flush=True)

    def _stop_for_time(self) -> None:
        """Name what was not reached."""
        outcome = self.outcome
        spent = f"the part's {outcome.budget:.0f} s were used up"
        if not self._steps:
            outcome.skipped.append(outcome.part.title)
            outcome.add(outcome.part.title, f"skipped: {spent} before its first step")
            return
        if self._began is not None:
            name = self._steps[self._next]
            outcome.skipped.append(name)
            outcome.add(name, f"stopped after {monotonic() - self._began:.0f} s: {spent}")
            self._next += 1
        for name in self._steps[self._next :]:
            outcome.skipped.append(name)
            outcome.add(name, f"skipped: {spent}")

    def _break(self, seen: str) -> None:
        name = self._steps[self._next]
        self.outcome.broken.append(name)
        self.outcome.add(name, seen)
        self._next, self._began = self._next + 1, None

    def _end_early(self, seen: str) -> None:
        self.outcome.broken.append(self.outcome.part.title)
        self.outcome.add(self.outcome.part.title, seen)


def _forward(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
