"""How far a run is: a live bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self, TextIO

from rollout_pool.types import PoolStats

PLAIN_INTERVAL_S = 5.0


class Progress:
    """Counts groups on ``stream`` (standard error). A context manager; leaving it ends the display."""

    def __init__(self, total: int, done: int = 0, stream: TextIO | None = None) -> None:
        self.total = total
        self.done = done
        self._stream = stream or sys.stderr
        self._stats = PoolStats()
        self._rate = Rate()
        self._shown_at = time.monotonic()
        self._bar = _bar(self._stream) if self._stream.isatty() else None
        self._task = (
            self._bar.add_task("starting", total=total, completed=done, state="") if self._bar else None
        )

    def say(self, text: str) -> None:
        """A line that stays; the bar, if any, goes on below it."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            self._shown_at = time.monotonic()
            print(text, file=self._stream, flush=True)

    def add_group(self) -> None:
        """One more group has finished."""
        self.done += 1
        self._show()

    def update(self, stats: PoolStats) -> None:
        """Newer counters of the pool."""
        self._stats = stats
        self._rate.add(sum(actor.new_tokens for actor in stats.actors))
        self._show()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _state(self) -> str:
        live = sum(actor.live_rows for actor in self._stats.actors)
        slots = sum(actor.num_slots for actor in self._stats.actors)
        parts = [f"{self._rate.per_second:.0f} tokens/s", f"{live}/{slots} slots in use"]
        if self._stats.actors_lost:
            parts.append(f"{self._stats.actors_lost} actors lost and replaced")
        return ", ".join(parts)

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description="groups", completed=self.done, state=self._state())
            return
        if time.monotonic() - self._shown_at >= PLAIN_INTERVAL_S:
            self.say(f"{self.done}/{self.total} groups, {self._state()}")


class Rate:
    """Tokens per second over the last seconds. A counter that falls (a lost actor) starts anew."""

    WINDOW_S = 10.0

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []

    def add(self, count: int, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        if self._points and count < self._points[-1][1]:
            self._points.clear()
        self._points.append((now, count))
        while len(self._points) > 2 and now - self._points[1][0] >= self.WINDOW_S:
            del self._points[0]

    @property
    def per_second(self) -> float:
        if len(self._points) < 2:
            return 0.0
        (start, low), (end, high) = self._points[0], self._points[-1]
        return (high - low) / max(end - start, 1e-9)


def _bar(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        console=Console(file=stream),
    )
