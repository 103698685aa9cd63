"""The front under random traffic: all rows end at it, it stays in the buffer, and trims pay for themselves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_pool.actors.aligned_scheduler import PATIENCE, AlignedScheduler
from rollout_pool.actors.scheduler import GroupState


@dataclass
class Row:
    """What a slot holds: where its tokens begin, how many have cells, how many it may still draw."""

    group: GroupState
    start: int
    cells: int
    left: int
    is_over: bool = False


def group_of(number: int, num_samples: int, prompt: int, budget: int) -> GroupState:
    return GroupState(number, num_samples, budget, (prompt,) * num_samples)


class Rows:
    """A plain model of an engine's rows, which does with a scheduler what an engine does."""

    def __init__(self, num_slots: int, length: int, reads_dead_columns: bool) -> None:
        self.scheduler = AlignedScheduler(num_slots, length, reads_dead_columns)
        self.rows: dict[int, Row] = {}
        self.waiting: dict[int, GroupState] = {}  # by arrival
        self.reads_dead_columns = reads_dead_columns
        self.waste = self.waste_ever = self.moved_ever = 0  # columns
        self.overtaken: dict[int, int] = {}
        self.largest = 0
        self.num_trims = 0

    @property
    def dead(self) -> int:
        return min((row.start for row in self.rows.values()), default=0)

    @property
    def head(self) -> GroupState | None:
        """The longest that waits; of equals, the one with the larger budget, then the first come."""
        waiting = sorted(self.waiting.values(), key=lambda g: (-max(g.lengths), -g.budget, g.group_id))
        return waiting[0] if waiting else None

    def add(self, group: GroupState) -> None:
        self.waiting[group.group_id] = group
        self.largest = max(self.largest, group.num_samples)
        self.scheduler.add(group)

    def admit(self) -> bool:
        scheduler, head, held = self.scheduler, self.head, self.scheduler.held
        front_before, was_empty = scheduler.front, not self.rows
        has_slot = len(self.rows) < scheduler.num_slots
        admission = scheduler.admit()
        if admission is None:
            self._check_nobody_could_start(has_slot)
            return False
        group = admission.group
        if was_empty:
            self.waste = 0
            assert group is (held or head), "with no row alive, the longest starts"
            assert scheduler.front == max(group.lengths)
        else:
            assert scheduler.front == front_before, "rows that run are where the front is"
        if held is None:
            self._count_overtaking(head, group)
            del self.waiting[group.group_id]
        samples = range(admission.first, admission.first + len(admission.slots))
        for number, slot, column in zip(samples, admission.slots, admission.columns, strict=True):
            cells = group.lengths[number]
            assert column >= 0
            assert column + cells == scheduler.front, "a prompt ends at the front"
            assert slot not in self.rows
            self.rows[slot] = Row(group, column, cells, group.budget - 1, group.budget == 1)
        return True

    def _check_nobody_could_start(self, has_slot: bool) -> None:
        if not has_slot:
            return
        assert self.rows or not (self.waiting or self.scheduler.held), "nothing stands in the way"
        if self.scheduler.held is not None:
            assert max(self.scheduler.held.lengths) > self.scheduler.front
            return
        fitting = [g for g in self.waiting.values() if max(g.lengths) <= self.scheduler.front]
        if fitting:
            assert self.head is not None
            count = self.overtaken.get(self.head.group_id, 0)
            assert count >= PATIENCE * self.scheduler.num_slots, "a free slot, and a prompt that fits"

    def _count_overtaking(self, head: GroupState | None, group: GroupState) -> None:
        assert head is not None
        if group is head:
            return
        assert max(group.lengths) <= self.scheduler.front < max(head.lengths)
        if group.group_id > head.group_id:
            count = self.overtaken.get(head.group_id, 0) + group.num_samples
            self.overtaken = {head.group_id: count}
            assert count < PATIENCE * self.scheduler.num_slots + self.largest

    def retire(self) -> None:
        for slot in [slot for slot, row in self.rows.items() if row.is_over]:
            assert self.scheduler.finish(slot) is self.rows.pop(slot).group

    def trim(self) -> int:
        dead, live = self.dead, self.scheduler.front - self.dead
        was_full = self.scheduler.is_full
        columns = self.scheduler.trim()
        if columns == 0:
            if self.reads_dead_columns and dead:
                assert self.waste < 2 * live, "steps have not yet read more than the trim would move"
            return 0
        assert columns == dead, "all dead columns go, and no other"
        if not was_full:
            assert self.reads_dead_columns
            assert self.waste >= 2 * live
            self.moved_ever += 2 * live
        for row in self.rows.values():
            row.start -= columns
        self.waste = 0
        self.num_trims += 1
        return columns

    def step(self, early: frozenset[int] = frozenset(), looks: bool = True) -> None:
        """One step of an engine. ``early``: slots that draw a stop id. ``looks``: the host learns of ends."""
        while self.admit():
            pass
        if not any(row.left > 0 for row in self.rows.values()):
            self.retire()
            return
        if not self.trim() and self.scheduler.is_full:
            self.retire()
            if not any(row.left > 0 for row in self.rows.values()):
                return
            assert self.trim() > 0, "with all that ended retired, a full buffer has dead columns"
        assert self.scheduler.front < self.scheduler.length, "the step writes inside the buffer"
        self.compact()
        self.scheduler.advance()
        self.waste += self.dead
        self.waste_ever += self.dead
        for slot, row in self.rows.items():
            row.left -= 1
            if row.is_over:
                continue  # it goes on computing, and nothing of that counts
            row.cells += 1
            row.is_over = row.left <= 0 or slot in early
        if looks:
            self.retire()

    def compact(self) -> None:
        for source, target in self.scheduler.compact():
            self.rows[target] = self.rows.pop(source)

    def cancel(self, group: GroupState) -> None:
        freed = self.scheduler.cancel(group)
        assert sorted(freed) == sorted(slot for slot, row in self.rows.items() if row.group is group)
        self.rows = {slot: row for slot, row in self.rows.items() if row.group is not group}
        self.waiting.pop(group.group_id, None)

    def check(self) -> None:
        scheduler = self.scheduler
        assert 0 <= scheduler.front <= scheduler.length
        assert set(scheduler.owner) == set(self.rows)
        assert scheduler.num_waiting == len(self.waiting)
        for row in self.rows.values():
            assert row.start >= 0
            assert row.is_over or row.start + row.cells == scheduler.front
            assert row.start + row.cells <= scheduler.front
        assert self.moved_ever <= self.waste_ever, "trims cost at most what dead columns did"


class AlignedTraffic(RuleBasedStateMachine):
    """Groups arrive, run, end early or late, and are cancelled in any order."""

    @initialize(num_slots=st.integers(1, 12), length=st.integers(3, 40), reads_dead_columns=st.booleans())
    def start(self, num_slots: int, length: int, reads_dead_columns: bool) -> None:
        self.model = Rows(num_slots, length, reads_dead_columns)
        self.groups: list[GroupState] = []
        self.cancelled: set[int] = set()

    @rule(num_samples=st.integers(1, 14), prompt=st.integers(1, 39), budget=st.integers(1, 40))
    def arrive(self, num_samples: int, prompt: int, budget: int) -> None:
        length = self.model.scheduler.length
        prompt = 1 + (prompt - 1) % (length - 1)
        budget = 1 + (budget - 1) % (length - prompt)
        self.groups.append(group_of(len(self.groups), num_samples, prompt, budget))
        self.model.add(self.groups[-1])

    @rule(early=st.frozensets(st.integers(0, 11), max_size=3), looks=st.booleans(), times=st.integers(1, 6))
    def step(self, early: frozenset[int], looks: bool, times: int) -> None:
        for number in range(times):
            self.model.step(early if number == 0 else frozenset(), looks)
            self.model.check()

    @precondition(lambda self: self.groups)
    @rule(pick=st.integers(0, 1000))
    def cancel(self, pick: int) -> None:
        alive = [g for g in self.groups if not g.is_complete and g.group_id not in self.cancelled]
        if alive:
            group = alive[pick % len(alive)]
            self.model.cancel(group)
            self.cancelled.add(group.group_id)

    @invariant()
    def everything_is_where_it_should_be(self) -> None:
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self) -> None:
        """Whatever happened, everybody is admitted and finishes in the end."""
        if not hasattr(self, "model"):
            return
        for _ in range(20_000):
            if not self.model.scheduler.has_work:
                break
            self.model.step()
            self.model.check()
        assert not self.model.scheduler.has_work
        assert all(group.is_complete for group in self.groups if group.group_id not in self.cancelled)


TestAlignedTraffic = AlignedTraffic.TestCase
TestAlignedTraffic.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_slots=st.integers(1, 8), reads_dead_columns=st.booleans())
def test_groups_that_are_there_from_the_start_never_wait_for_the_front(
    data: st.DataObject, num_slots: int, reads_dead_columns: bool
) -> None:
    """Longest first, every row is at least as long as any prompt that waits, and so is the front."""
    length = 30
    model = Rows(num_slots, length, reads_dead_columns)
    for number in range(data.draw(st.integers(1, 12))):
        prompt = data.draw(st.integers(1, length - 1))
        budget = data.draw(st.integers(1, length - prompt))
        model.add(group_of(number, data.draw(st.integers(1, 10)), prompt, budget))
    for _ in range(5_000):
        if not model.scheduler.has_work:
            break
        model.step(early=frozenset(data.draw(st.sets(st.integers(0, 7), max_size=1))))
        while model.admit():
            pass
        is_everyone_in = not model.waiting and model.scheduler.held is None
        assert is_everyone_in or len(model.rows) == num_slots
    assert not model.scheduler.has_work
    assert model.overtaken == {}


@pytest.mark.parametrize("reads_dead_columns", [True, False])
@pytest.mark.parametrize(("num_slots", "prompt"), [(1, 50), (3, 50), (3, 62), (8, 63)])
def test_a_long_prompt_is_overtaken_by_a_bounded_number_of_later_ones(
    num_slots: int, prompt: int, reads_dead_columns: bool
) -> None:
    """Short prompts that never cease keep the front low, for the trims follow the rows."""
    model = Rows(num_slots, 64, reads_dead_columns)
    long = group_of(num_slots, 1, prompt, 64 - prompt)
    budgets = (8, 5, 16)
    for number in range(2 * num_slots):
        model.add(long if number == num_slots else group_of(number, 1, 4, budgets[number % 3]))
    later = 2 * num_slots
    for _ in range(64 * (PATIENCE + 2)):
        model.step()
        model.check()
        if long.admitted:
            break
        while len(model.waiting) < num_slots + 1:
            model.add(group_of(later, 1, 4, budgets[later % 3]))
            later += 1
    assert long.admitted == 1
    assert model.overtaken.get(num_slots, 0) <= PATIENCE * num_slots


def test_rows_keep_their_starts_when_they_move_to_other_slots() -> None:
    model = Rows(8, 20, reads_dead_columns=False)
    model.add(group_of(0, 5, 9, 4))
    model.add(group_of(1, 1, 3, 15))  # in slot 5, from column 6 on
    model.step()
    assert model.rows[5].start == 6
    for _ in range(2):
        model.step()
    assert list(model.rows) == [5]
    model.step()
    assert model.rows[0].start == 6, "alone, it moved to the first slot"
    while not model.scheduler.is_full:
        model.step()
    assert model.trim() == 6


def test_a_trim_waits_until_steps_have_read_as_much_as_it_moves() -> None:
    """A row of 4 tokens behind 6 dead columns: after steps that read 6 each, 2 * (4 + steps) are reached."""
    model = Rows(2, 64, reads_dead_columns=True)
    model.add(group_of(0, 1, 10, 2))
    model.add(group_of(1, 1, 4, 40))
    model.step()
    steps = 0
    while model.num_trims == 0:
        model.step()
        steps += 1
    # The row has 5 cells after the first step. Before the trim: 6 * k >= 2 * (5 + k), first at k = 3.
    assert steps == 4
    assert model.moved_ever == 2 * 8
