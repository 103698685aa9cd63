"""Groups that no actor has yet, and whose turn it is: plain records, without Ray.

Start-time fair queueing (Goyal, Vin, Cheng 1996), twice: between callers, and between the calls of one.
Whoever has been given the fewest tokens is next. One who comes, or comes back, starts level with the one
whose turn it is: there is no credit for having been away. So while a caller's groups wait for their turn, no
other is given more than the tokens of the last group of the former, and of one group of its own; before the
first group of a newcomer, every other is given at most one.

Within a call the longest expected group goes first, then by arrival.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

from rollout_pool.routing import CallKey, GroupWork

KEPT_RECORDS = 64


class Line(Protocol):
    """What takes turns: it holds groups, and knows which of them comes next."""

    @property
    def is_empty(self) -> bool: ...
    @property
    def is_ready(self) -> bool: ...
    def peek(self) -> GroupWork: ...
    def pop(self) -> GroupWork: ...


class LongestFirst:
    """The groups of one call. While ``is_held`` none of them goes out."""

    def __init__(self, is_held: bool = False) -> None:
        self.is_held = is_held
        self._heap: list[tuple[int, int]] = []
        self._waiting: dict[int, GroupWork] = {}

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    @property
    def is_ready(self) -> bool:
        return bool(self._waiting) and not self.is_held

    def push(self, work: GroupWork) -> None:
        """Add a group; one that comes back after a loss has its old ticket, hence its old place."""
        self._waiting[work.ticket] = work
        heapq.heappush(self._heap, (-work.tokens, work.ticket))

    def discard(self, ticket: int) -> None:
        del self._waiting[ticket]

    def peek(self) -> GroupWork:
        while (work := self._waiting.get(self._heap[0][1])) is None:
            heapq.heappop(self._heap)
        return work

    def pop(self) -> GroupWork:
        work = self.peek()
        heapq.heappop(self._heap)
        return self._waiting.pop(work.ticket)


AnyLine = TypeVar("AnyLine", bound=Line)


class Turns(Generic[AnyLine]):
    """Lines that take turns by the tokens that they have been given."""

    def __init__(self) -> None:
        self.lines: dict[Hashable, AnyLine] = {}
        self._given: dict[Hashable, int] = {}
        self._now = 0
        """What the line had been given whose turn it was last; who has no more is as good as new."""
        self._heap: list[tuple[int, int, int, Hashable]] = []
        self._ready: dict[Hashable, tuple[int, int, int]] = {}
        """The entry of the heap that is still true, of every line that is ready."""

    @property
    def is_empty(self) -> bool:
        return not self.lines

    @property
    def is_ready(self) -> bool:
        return bool(self._ready)

    def update(self, key: Hashable) -> None:
        """Take note that this line has changed."""
        line = self.lines[key]
        if line.is_ready:
            if key not in self._ready:
                self._given[key] = max(self._given.get(key, 0), self._now)
            head = line.peek()
            entry = (self._given[key], -head.tokens, head.ticket)
            if self._ready.get(key) != entry:
                self._ready[key] = entry
                heapq.heappush(self._heap, (*entry, key))
            return
        self._ready.pop(key, None)
        if line.is_empty:
            del self.lines[key]
        if not self._ready:  # nobody waits: from here all are level
            self._now = max(self._given.values(), default=self._now)
        if len(self._given) > 2 * len(self.lines) + KEPT_RECORDS:
            self._given = {
                k: given for k, given in self._given.items() if k in self._ready or given > self._now
            }

    def peek(self) -> GroupWork:
        return self.lines[self._next()].peek()

    def pop(self) -> GroupWork:
        """The next group. Raises IndexError when none is ready."""
        key = self._next()
        work = self.lines[key].pop()
        self._now = self._given[key]
        self._given[key] += work.tokens
        self.update(key)
        return work

    def _next(self) -> Hashable:
        while True:
            *entry, key = self._heap[0]
            if self._ready.get(key) == tuple(entry):
                return key
            heapq.heappop(self._heap)


class WorkQueue:
    """All groups that wait, of all calls of all callers."""

    def __init__(self) -> None:
        self._callers: Turns[Turns[LongestFirst]] = Turns()
        self._keys: dict[int, CallKey] = {}
        self._held: set[CallKey] = set()

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def is_ready(self) -> bool:
        """Whether there is a group that may go out."""
        return self._callers.is_ready

    def push(self, work: GroupWork) -> None:
        """Add a group."""
        key = work.key
        self._keys[work.ticket] = key
        calls = self._callers.lines.setdefault(key.caller, Turns())
        calls.lines.setdefault(key.call, LongestFirst(key in self._held)).push(work)
        self._update(key)

    def pop(self) -> GroupWork:
        """Take the next group. Raises IndexError when none may go out."""
        work = self._callers.pop()
        del self._keys[work.ticket]
        return work

    def discard(self, ticket: int) -> bool:
        """Forget a group. Whether it waited here."""
        if (key := self._keys.pop(ticket, None)) is None:
            return False
        self._callers.lines[key.caller].lines[key.call].discard(ticket)
        self._update(key)
        return True

    def hold(self, key: CallKey) -> None:
        """Let no group of this call out until :meth:`release`."""
        self._held.add(key)
        self._set_held(key, True)

    def release(self, key: CallKey) -> None:
        """Let its groups out again, if they were held."""
        if key in self._held:
            self._held.discard(key)
            self._set_held(key, False)

    def _set_held(self, key: CallKey, is_held: bool) -> None:
        calls = self._callers.lines.get(key.caller)
        if calls is not None and key.call in calls.lines:
            calls.lines[key.call].is_held = is_held
            self._update(key)

    def _update(self, key: CallKey) -> None:
        self._callers.lines[key.caller].update(key.call)
        self._callers.update(key.caller)
