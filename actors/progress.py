"""How far a rank has come, as its event loop tells the pool while its thread works.

An answer alone says little: the loop of a process whose thread hangs in a kernel, a collective or a lock
answers as ever. So what counts is what the thread has finished. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Progress:
    """One rollout actor at one moment. The counts only grow."""

    samples_ended: int
    """Since the start and for whatever reason; runs ahead of the groups, which wait for their last."""
    steps: int
    """What the engine's thread has finished: steps, prefills, commands such as to write new weights."""
    is_busy: bool
    """Whether the thread is in something. While it is, ``steps`` must move."""
    doing: str
    """What it is in: "load", "step", "submit", "abort", "weights", or "idle"."""


class Activity:
    """What one thread is in and how much it has finished. Written by that thread, read by any."""

    def __init__(self) -> None:
        self.doing = IDLE
        self.finished = 0

    @contextmanager
    def of(self, doing: str) -> Iterator[None]:
        """The thread is in ``doing`` until the context ends; for good when it ends by an exception."""
        self.doing = doing
        yield
        self.finished += 1
        self.doing = IDLE
