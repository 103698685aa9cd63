"""An event loop whose time jumps to the next timer as soon as nothing is ready.

``loop.time()`` is virtual, and so is everything built on it: sleeps, timeouts, deadlines. A loop in which
nothing can ever happen again ends with :class:`StalledError`: in simulation a hang is an error.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class StalledError(Exception):
    """Everybody waits, and no timer is set."""


class _Jumping(selectors.SelectSelector):
    """Instead of waiting it moves the time. No file is ever looked at: nothing real takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StalledError(f"nothing is left that could happen after {self.now:g} s")
        if timeout > 0:
            self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at time 0. Threads and files do not work in it."""

    def __init__(self) -> None:
        self._clock = _Jumping()
        super().__init__(self._clock)

    def time(self) -> float:
        """Virtual seconds."""
        return self._clock.now


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
