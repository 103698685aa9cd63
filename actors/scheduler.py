"""Which sample gets which slot, and when rows move. Pure Python: no tensors, no clock.

Scheduling is for throughput: nobody waits for a first token. The group with the longest budget goes
first, its samples take the lowest free slots, and slots are filled before the next decode step. A
group that does not fit keeps its prompt's KV until its last sample has a slot; no other group starts
before that, so at most one prompt is held at a time.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass, field

from rollout_pool.actors.sharing import Sharing


@dataclass(eq=False, slots=True)
class GroupState:
    """One group of samples on its way through the slots."""

    group_id: int
    num_samples: int
    budget: int
    """Longest expected number of new tokens; longer ones start earlier."""
    lengths: tuple[int, ...] = ()
    """Of each sample's row when it starts: its prompt, and what it had drawn before if it is resumed."""
    prompt_tokens: int = 0
    max_new_tokens: int = 0
    admitted: int = 0
    finished: int = 0
    slots: set[int] = field(default_factory=set)
    is_shared: bool = False
    """Whether its prompt's KV is kept once, outside the slots; decided when it starts."""

    @property
    def is_complete(self) -> bool:
        return self.finished == self.num_samples


@dataclass(frozen=True, slots=True)
class Admission:
    """Samples ``first`` to ``first + len(slots) - 1`` of a group take ``slots``."""

    group: GroupState
    first: int
    slots: tuple[int, ...]
    columns: tuple[int, ...]
    """Where the row begins in each of these slots."""
    is_last: bool
    """No sample of the group waits after this; its prompt's KV need not be held."""


class Scheduler:
    """Owns the slots: who waits, who runs where, which row moves."""

    def __init__(self, num_slots: int, sharing: Sharing | None = None) -> None:
        """sharing: decides which groups share their prompt's KV; by default none does."""
        self.num_slots = num_slots
        self._sharing = sharing
        self.buckets = batch_buckets(num_slots)
        self.owner: dict[int, GroupState] = {}
        self.held: GroupState | None = None
        self._waiting: list[tuple[int, int, int, GroupState]] = []  # sorted, next one first
        self._free = list(range(num_slots))  # a heap
        self._arrivals = 0

    @property
    def is_full(self) -> bool:
        """Whether no row can decode before :meth:`trim` has dropped columns."""
        return False

    @property
    def num_waiting(self) -> int:
        """Groups of which no sample has started."""
        return len(self._waiting)

    @property
    def num_waiting_samples(self) -> int:
        """Samples that have no slot yet, those of the held group included."""
        held = self.held.num_samples - self.held.admitted if self.held else 0
        return held + sum(entry[-1].num_samples for entry in self._waiting)

    @property
    def num_live(self) -> int:
        """Slots in use."""
        return len(self.owner)

    @property
    def has_work(self) -> bool:
        return bool(self.owner or self._waiting or self.held)

    @property
    def num_rows(self) -> int:
        """Rows that a decode step must cover: up to the highest slot in use, rounded up to a bucket."""
        return self._bucket(max(self.owner, default=-1) + 1)

    def add(self, group: GroupState) -> None:
        """Queue a group; longer budgets first, then by arrival."""
        insort(self._waiting, (*self._rank(group), self._arrivals, group))
        self._arrivals += 1

    def admit(self) -> Admission | None:
        """The next samples to start, or None when no slot is free or nobody can start.

        A group that has to share its prompt waits, with all behind it, while there is no room for the prompt.
        """
        group = self._next() if self._free else None
        if group is None:
            return None
        first = group.admitted
        count = min(group.num_samples - first, len(self._free))
        slots = tuple(heapq.heappop(self._free) for _ in range(count))
        for slot in slots:
            self.owner[slot] = group
        group.slots.update(slots)
        group.admitted += count
        is_last = group.admitted == group.num_samples
        self.held = None if is_last else group
        return Admission(group, first, slots, self._place(group, first, slots), is_last)

    def finish(self, slot: int) -> GroupState:
        """A sample ended: its slot is free. Returns its group."""
        group = self.owner.pop(slot)
        group.slots.remove(slot)
        group.finished += 1
        heapq.heappush(self._free, slot)
        if not group.slots and group.admitted == group.num_samples:
            self._release(group)
        return group

    def cancel(self, group: GroupState) -> list[int]:
        """Drop a group wherever it is; returns the slots that this freed."""
        self._waiting = [entry for entry in self._waiting if entry[-1] is not group]
        if self.held is group:
            self.held = None
        freed = sorted(group.slots)
        for slot in freed:
            del self.owner[slot]
            heapq.heappush(self._free, slot)
        group.slots.clear()
        self._release(group)
        return freed

    def compact(self) -> list[tuple[int, int]]:
        """Moves (source, target) after which a smaller bucket holds all rows; empty when none does.

        Only at the tail, when nobody waits: before that, holes are filled by new samples. Sources lie
        above the new bucket and targets below, so that no row is both.
        """
        if self._waiting or self.held or not self.owner:
            return []
        rows = self._bucket(len(self.owner))
        if rows >= self.num_rows:
            return []
        sources = sorted(slot for slot in self.owner if slot >= rows)
        targets = sorted(slot for slot in range(rows) if slot not in self.owner)[: len(sources)]
        moves = list(zip(sources, targets, strict=True))
        for source, target in moves:
            group = self.owner.pop(source)
            self.owner[target] = group
            group.slots.remove(source)
            group.slots.add(target)
        self._free = [slot for slot in range(self.num_slots) if slot not in self.owner]
        return moves

    def column(self, longest: int) -> int:
        """What the next decode step is told: in layout ``ragged`` the largest position that it writes."""
        return longest

    def column_of(self, slot: int) -> int:
        """Where the row in this slot begins."""
        return 0

    def advance(self) -> None:
        """A decode step was started."""

    def trim(self) -> int:
        """How many columns to drop before the next decode step."""
        return 0

    def _rank(self, group: GroupState) -> tuple[int, int]:
        """Groups of a lower rank start earlier."""
        return (-group.budget, 0)

    def _next(self) -> GroupState | None:
        """The group that starts next, out of the queue."""
        if self.held or not self._waiting:
            return self.held
        group = self._waiting[0][-1]
        if self._sharing is not None:
            shares = self._sharing.decide(
                group.group_id, group.prompt_tokens, group.max_new_tokens, group.num_samples
            )
            if shares is None:
                return None
            group.is_shared = shares
        return self._waiting.pop(0)[-1]

    def _release(self, group: GroupState) -> None:
        if self._sharing is not None and group.is_shared:
            self._sharing.release(group.group_id)

    def _place(self, group: GroupState, first: int, slots: tuple[int, ...]) -> tuple[int, ...]:
        """The column in which each row begins, from sample ``first`` on."""
        return (0,) * len(slots)

    def _bucket(self, rows: int) -> int:
        return next((bucket for bucket in self.buckets if bucket >= rows), self.num_slots)


def batch_buckets(num_slots: int) -> tuple[int, ...]:
    """Batch sizes that decode steps use: 1, 2, 4, 8, then every 8 rows, and all slots."""
    sizes = {1, 2, 4, *range(8, num_slots, 8), num_slots}
    return tuple(sorted(size for size in sizes if size <= num_slots))
