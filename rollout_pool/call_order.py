"""Calls of one process take effect in the order in which it made them.

Ray delivers the calls of an asynchronous actor in any order: a cancel may come before the call that it is
meant for, and calls without a seed of their own get theirs by their order. So the caller's process numbers
what it asks of each pool, and the pool lets what comes early wait.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

LIMIT_S = 2.0
"""What has not come by then may never come: a call that was cancelled before it was sent, or one made to the
process that this pool's process replaces."""


@dataclass(slots=True)
class _Line:
    """The calls of one process."""

    next: int = 1
    """Whose turn it is. It stays so until that one has run, as far as it need not wait."""
    given_up: int = 0
    """What is missing up to here is not waited for."""
    waiting: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    """They were cancelled before their turn."""

    def over(self, number: int) -> None:
        """This one has had its turn, or needs none any more."""
        self.left.add(number)
        self.go_on()

    def give_up(self, number: int) -> None:
        """Let this one go, after those before it that are there."""
        self.given_up = max(self.given_up, number)
        self.go_on()

    def go_on(self) -> None:
        while self.next in self.left or (self.next <= self.given_up and self.next not in self.waiting):
            self.left.discard(self.next)
            self.next += 1
        if (turn := self.waiting.get(self.next)) is not None and not turn.done():
            turn.set_result(None)


class CallOrder:
    """In the pool's process; the callers count from 1."""

    def __init__(self) -> None:
        self._lines: defaultdict[str, _Line] = defaultdict(_Line)

    async def wait(self, process: str, number: int | None) -> None:
        """Until what ``process`` asked for before has come, at most :data:`LIMIT_S`; usually not at all."""
        line = self._lines[process]
        if number is None or number < line.next or number in line.waiting:
            return  # without an order, or sent once more
        if number > line.next:
            loop = asyncio.get_running_loop()
            late = loop.call_later(LIMIT_S, line.give_up, number)
            line.waiting[number] = loop.create_future()
            try:
                await line.waiting[number]
            finally:
                late.cancel()
                del line.waiting[number]
                line.over(number)
        else:
            line.over(number)
