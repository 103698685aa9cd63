"""How far a rollout is: a bar on a terminal or in a notebook, a line every few seconds elsewhere.

``track`` shows it for groups that a driver takes from a pool::

    for group in track(pool.stream.remote(prompts, sampling), total=len(prompts), pool=pool):
        ...
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from rollout_pool.live.displays import choose
from rollout_pool.live.rates import Rate, duration
from rollout_pool.types import PoolStats

if TYPE_CHECKING:
    from rollout_pool.types import RolloutGroup

POLL_S = 0.5
STATS_INTERVAL_S = 1.0
GROUP_WINDOW_S = 60.0
LEAST_SPAN_S = 5.0
"""Before that, how long the rest takes is a guess."""


def track(
    groups: Any, total: int, pool: Any = None, *, description: str = "groups", stream: TextIO | None = None
) -> Iterator[RolloutGroup]:
    """Yield the groups of ``pool.stream.remote(...)``, or any groups, and show how far they are.

    total: how many there will be. pool: the pool's handle, to show tokens per second, slots in use and lost
    actors of all its actors, too. description: tells displays apart where several drivers or actors print.
    stream: where to; standard error by default, or the output of a notebook's cell.
    """
    with Progress(total, stream=stream, description=description) as progress:
        fetched = _fetched(groups, pool, progress) if _are_references(groups) else groups
        for group in fetched:
            progress.add_group()
            yield group


def _are_references(groups: Any) -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(groups, ray.ObjectRefGenerator)


def _fetched(references: Any, pool: Any, progress: Progress) -> Iterator[RolloutGroup]:
    """The groups of Ray's generator; meanwhile the pool is asked for its counters."""
    import ray

    stats, asked_at = None, 0.0
    while True:
        if ray.wait([references], timeout=POLL_S)[0]:
            try:
                reference = next(references)
            except StopIteration:
                return
            yield ray.get(reference)
        if pool is None:
            continue
        if stats is None and time.monotonic() - asked_at >= STATS_INTERVAL_S:
            stats, asked_at = pool.stats.remote(), time.monotonic()
        elif stats is not None and ray.wait([stats], timeout=0)[0]:
            progress.update(ray.get(stats))
            stats = None


class Progress:
    """Counts groups on ``stream`` (standard error). A context manager; leaving it ends the display."""

    def __init__(
        self, total: int, done: int = 0, stream: TextIO | None = None, description: str = "groups"
    ) -> None:
        self.total = total
        self.done = done
        self.description = description
        self._stats: PoolStats | None = None
        self._rate = Rate()
        self._groups = Rate(GROUP_WINDOW_S)
        self._groups.add(done)
        self._display = choose(stream)

    def say(self, text: str) -> None:
        """A line that stays; the bar, if any, goes on below it."""
        self._display.say(text)

    def add_group(self) -> None:
        """One more group has finished."""
        self.done += 1
        self._groups.add(self.done)
        self._display.show(self, is_last=self.done == self.total)

    def update(self, stats: PoolStats) -> None:
        """Newer counters of the pool."""
        self._stats = stats
        self._rate.add(sum(actor.new_tokens for actor in stats.actors))
        self._display.show(self)

    @property
    def state(self) -> str:
        """What the pool is doing, as far as it told, and how long the rest will take."""
        parts = []
        if self._stats is not None:
            live = sum(actor.live_rows for actor in self._stats.actors)
            slots = sum(actor.num_slots for actor in self._stats.actors)
            parts += [f"{self._rate.per_second:.0f} tokens/s", f"{live}/{slots} slots in use"]
            if self._stats.actors_lost:
                parts.append(f"{self._stats.actors_lost} actors lost and replaced")
        speed = self._groups.per_second
        if self.done < self.total and speed > 0 and self._groups.span_s >= LEAST_SPAN_S:
            parts.append(f"{duration((self.total - self.done) / speed)} left")
        return ", ".join(parts)

    def __str__(self) -> str:
        return f"{self.done}/{self.total} {self.description}" + (f", {self.state}" if self.state else "")

    def __enter__(self) -> Self:
        self._display.start(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.stop()
