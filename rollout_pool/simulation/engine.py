"""An engine that pretends: slots, continuous batching, a latency, answers that depend on requests alone.

Time passes in segments: between two changes of what is in the slots all steps are alike, so only their
ends are events. What arrives in between takes effect when the running step ends, as in a real engine.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable

from rollout_pool.actors.progress import IDLE, Progress
from rollout_pool.actors.versions import VersionLog
from rollout_pool.simulation.latency import Latency
from rollout_pool.simulation.samples import PendingGroup, PendingRow
from rollout_pool.simulation.workload import Lengths, prompt_tokens
from rollout_pool.types import EngineStats, FinishReason, ResolvedRequest, RolloutGroup

_ALMOST = 1e-9
"""Of a step: what rounding may take from it."""


class SimulatedEngine:
    """What an engine does, as far as a pool can tell. Lives in the running loop's time."""

    def __init__(self, latency: Latency, lengths: Lengths) -> None:
        self.num_slots = latency.num_slots
        self.busy_row_seconds = 0.0
        """Live rows, integrated over time."""
        self.stuck_at: float | None = None
        """Since when it should go on and does not."""
        self._loop = asyncio.get_running_loop()
        self._latency, self._lengths = latency, lengths
        self._live: list[tuple[int, int, PendingRow]] = []
        """A heap by the step after which each ends."""
        self._waiting: deque[PendingRow] = deque()
        self._groups: list[PendingGroup] = []
        self._order = itertools.count()
        self._log = VersionLog()
        self._commands: deque[tuple[int | None, Callable[[], None]]] = deque()
        """What is to be called between two steps, and the version of the weights it brings."""
        self._steps = self._finished = self._drawn = self._prefills = self._computed = 0
        self._since = self._loop.time()
        """When step number ``_steps`` had ended, and any prefills behind it."""
        self._pace = 0.0
        self._slowness = 1.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_stuck = False

    @property
    def idle_since(self) -> float | None:
        """When the last row ended; None while there are others."""
        return None if self._is_busy else self._since

    @property
    def tokens_drawn(self) -> int:
        """By all samples, those that still run included."""
        steps = self._steps_now()
        return self._drawn + sum(steps - row.first_step for _, _, row in self._live)

    @property
    def version(self) -> int:
        """Of the weights."""
        return self._log.current

    def submit(self, request: ResolvedRequest, on_finish: Callable[[RolloutGroup], None]) -> None:
        """Run a group; samples it resumes go on where they ended."""
        group = PendingGroup(request, on_finish)
        rows = group.rows(self._lengths)
        self._groups.append(group)
        self._waiting.extend(rows)
        if len(self._live) < self.num_slots:
            self._wake()

    def abort(self, request_id: str | int) -> None:
        """Its groups come back with what they have, after the running step."""
        if any(group.request.request_id == request_id for group in self._groups):
            self._commands.append((None, lambda: self._abort(request_id)))
            self._wake()

    def commit(self, version: int, on_written: Callable[[], None]) -> None:
        """New weights, between two steps."""
        self._commands.append((version, on_written))
        self._wake()

    def stop(self) -> None:
        """No step ends from now on: what the thread is in never comes back."""
        self._steps = self._steps_now()
        self._is_stuck = True
        self._wake()
        if self._timer is not None:
            self._timer.cancel()

    def slow_down(self, factor: float) -> None:
        """Everything takes ``factor`` times as long as normal, from the next step on."""
        self._slowness = factor
        self._wake()

    def progress(self) -> Progress:
        """As the engine's thread would tell."""
        is_busy = self._is_busy
        return Progress(
            self._finished, self._steps_now() + self._prefills, is_busy, "step" if is_busy else IDLE
        )

    def stats(self) -> EngineStats:
        """Those counters that simulation has."""
        return EngineStats(
            num_slots=self.num_slots,
            live_rows=len(self._live),
            waiting_samples=len(self._waiting),
            prefills=self._prefills,
            prefill_tokens=self._computed,
            decode_steps=self._steps_now(),
            samples_finished=self._finished,
            weight_version=self.version,
        )

    @property
    def _is_busy(self) -> bool:
        return bool(self._live or self._waiting or self._commands)

    def _steps_now(self) -> int:
        if self._is_stuck or not self._live:
            return self._steps
        passed = (self._loop.time() - self._since) / self._pace
        return self._steps + max(0, min(math.floor(passed + _ALMOST), self._live[0][0] - self._steps))

    def _wake(self) -> None:
        """See to what has arrived as soon as the running step, or prefill, is over."""
        now = self._loop.time()
        if self._is_stuck:
            if self.stuck_at is None and self._is_busy:
                self.stuck_at = now
            return
        when = max(now, self._since)
        if self._live:  # prefills and the decode step behind them are one step
            passed = max(1, math.ceil((now - self._since) / self._pace - _ALMOST))
            when = self._since + passed * self._pace
        if self._timer is None or self._timer.when() > when:
            self._set_timer(when)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._turn)

    def _turn(self) -> None:
        """Between two steps: what ended leaves, what waits comes in."""
        self._timer = None
        now = self._loop.time()
        steps = self._steps_now()
        if self._live:
            self.busy_row_seconds += len(self._live) * max(0.0, now - self._since)
        self._steps = steps
        while self._live and self._live[0][0] <= steps:
            row = heapq.heappop(self._live)[2]
            self._end(row, "stop" if row.length < row.group.request.sampling.max_new_tokens else "length")
        held = self._carry_out() + self._admit()
        self._since = now + held * self._slowness
        if self._live:
            self._pace = self._latency.of_step(len(self._live)) * self._slowness
            self._set_timer(self._since + (self._live[0][0] - self._steps) * self._pace)

    def _carry_out(self) -> float:
        """Commands that have arrived; returns the seconds that they take."""
        held = 0.0
        while self._commands:
            version, command = self._commands.popleft()
            if version is None:
                command()
                continue
            held += self._latency.commit_s
            self._log.change(version, self._steps)
            self._loop.call_later(held * self._slowness, command)
        return held

    def _admit(self) -> float:
        """Fill free slots; returns the seconds that the prefills take."""
        held = 0.0
        while self._waiting and len(self._live) < self.num_slots:
            row = self._waiting.popleft()
            if not row.group.is_computed:
                row.group.is_computed = True
                tokens = prompt_tokens(row.group.request) + row.num_begun
                self._prefills += 1
                self._computed += tokens
                held += tokens * self._latency.prompt_token_s
            row.first_step, row.first_version = self._steps, self.version
            ends = self._steps + max(1, row.length - row.num_begun)
            heapq.heappush(self._live, (ends, next(self._order), row))
        return held

    def _abort(self, request_id: str | int) -> None:
        for group in [group for group in self._groups if group.request.request_id == request_id]:
            rows = [row for _, _, row in self._live if row.group is group]
            waiting = [row for row in self._waiting if row.group is group]
            self._live = [entry for entry in self._live if entry[2].group is not group]
            heapq.heapify(self._live)
            self._waiting = deque(row for row in self._waiting if row.group is not group)
            for row in (*rows, *waiting):
                self._end(row, "aborted")

    def _end(self, row: PendingRow, reason: FinishReason) -> None:
        drawn = self._steps - row.first_step if row.first_step >= 0 else 0
        self._drawn += drawn
        self._finished += 1
        group = row.group
        group.samples.append(row.sample(drawn, reason, self._log))
        if len(group.samples) == group.request.sampling.n:
            self._groups.remove(group)
            group.on_finish(group.result())
