"""Scheduling for layout ``aligned``, in which all rows write the same column: the front.

A prompt is placed so that it ends just before the front, so it must not be longer than the front is far.
The longest go first: the first one sets the front, and the others fit. Columns before the start of
the earliest live row are dead, and a trim shifts all rows to the left over them. Pure Python.
"""

from __future__ import annotations

from bisect import bisect_left

from rollout_pool.actors.scheduler import GroupState, Scheduler

PATIENCE = 4
"""Batches of samples that arrived later and may start before a prompt that does not fit; then the rows
are let run out, and it starts. Without a bound, a stream of short prompts would keep it waiting for ever."""


class AlignedScheduler(Scheduler):
    """A :class:`Scheduler` that also knows the front.

    No row is longer than ``length``, so a buffer of that many columns suffices for ever: when the front
    reaches its end, a row that begins in column 0 is over, and so there are columns to trim.

    ``reads_dead_columns``: whether a step pays for dead columns. Then they are trimmed as soon as the
    steps since the last trim have read as many of them as the trim moves (read and write), so that both
    together cost at most twice what the better of the two would; otherwise only when it must be.
    """

    def __init__(self, num_slots: int, length: int, reads_dead_columns: bool) -> None:
        super().__init__(num_slots)
        self.length = length
        self.front = 0
        self._reads_dead_columns = reads_dead_columns
        self._starts: dict[int, int] = {}
        self._waste = 0
        self._overtaken: dict[int, int] = {}

    @property
    def is_full(self) -> bool:
        """Whether the front is at the end of the buffer."""
        return self.front == self.length

    def column(self, longest: int) -> int:
        """The front, which every row writes."""
        return self.front

    def column_of(self, slot: int) -> int:
        """Where the row in this slot begins."""
        return self._starts[slot]

    def advance(self) -> None:
        """A step was started: every row wrote the front."""
        self.front += 1
        self._waste += self._dead

    def trim(self) -> int:
        """How many columns to drop now; when that is some, the front and all starts have moved by them."""
        dead = self._dead
        pays = self._reads_dead_columns and self._waste >= 2 * (self.front - dead)
        if not dead or not (self.is_full or pays):
            return 0
        self.front -= dead
        self._starts = {slot: start - dead for slot, start in self._starts.items()}
        self._waste = 0
        return dead

    def finish(self, slot: int) -> GroupState:
        del self._starts[slot]
        return super().finish(slot)

    def cancel(self, group: GroupState) -> list[int]:
        freed = super().cancel(group)
        for slot in freed:
            del self._starts[slot]
        return freed

    def compact(self) -> list[tuple[int, int]]:
        moves = super().compact()
        for source, target in moves:
            self._starts[target] = self._starts.pop(source)
        return moves

    @property
    def _dead(self) -> int:
        return min(self._starts.values(), default=0)

    def _rank(self, group: GroupState) -> tuple[int, int]:
        return (-max(group.lengths), -group.budget)

    def _next(self) -> GroupState | None:
        """The longest prompt that fits before the front; with no row alive, the longest of all."""
        if not self.owner:
            self.front = self._waste = 0
        if self.held is not None:
            return self.held if self._fits(self.held) else None
        if not self._waiting:
            return None
        at = bisect_left(self._waiting, -self.front, key=lambda entry: entry[0]) if self.owner else 0
        if at == len(self._waiting) or (at and not self._may_overtake(at)):
            return None
        return self._waiting.pop(at)[-1]

    def _may_overtake(self, at: int) -> bool:
        """Whether the longest prompt, which does not fit, still lets that one pass; later ones count."""
        *_, arrival, longest = self._waiting[0]
        *_, later, group = self._waiting[at]
        if later < arrival:
            return True
        overtaken = self._overtaken.get(longest.group_id, 0)
        if overtaken >= PATIENCE * self.num_slots:
            return False
        self._overtaken = {longest.group_id: overtaken + group.num_samples}
        return True

    def _fits(self, group: GroupState) -> bool:
        return not self.owner or max(group.lengths) <= self.front

    def _place(self, group: GroupState, first: int, slots: tuple[int, ...]) -> tuple[int, ...]:
        self.front = max(self.front, *group.lengths)
        lengths = group.lengths[first : first + len(slots)]
        columns = tuple(self.front - length for length in lengths)
        self._starts.update(zip(slots, columns, strict=True))
        return columns
