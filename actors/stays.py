"""Where the samples of one group sat, and when: what a timeline of the slots is drawn from.

Written when a sample takes a slot, moves or gets up, as the host learns of it, and never in a decode
step. On a GPU the host is ahead of the device by the work it has queued, at most a few steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import time

from rollout_pool.types import Stay


class Stays:
    """The stays of one group, those that last and those that are over."""

    def __init__(self) -> None:
        self._present: dict[int, tuple[int, float, float]] = {}
        self._over: list[Stay] = []

    def begin(self, places: Iterable[tuple[int, int]], start: float) -> None:
        """These samples (index, slot) took their slots at ``start``, and their prompts are computed now."""
        ready = time()
        for sample_index, slot in places:
            self._present[sample_index] = (slot, start, ready)

    def move(self, sample_index: int, slot: int) -> None:
        """A sample's row went to another slot."""
        self.end(sample_index)
        now = time()
        self._present[sample_index] = (slot, now, now)

    def end(self, sample_index: int) -> None:
        """A sample left its slot, if it sat in one."""
        if (present := self._present.pop(sample_index, None)) is not None:
            self._over.append(Stay(sample_index, *present, time()))

    def end_all(self) -> None:
        """All samples have left their slots."""
        for sample_index in list(self._present):
            self.end(sample_index)

    def all(self) -> tuple[Stay, ...]:
        """Every stay, in the order of their ends. None lasts on."""
        self.end_all()
        return tuple(self._over)
