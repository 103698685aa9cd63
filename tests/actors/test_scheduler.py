"""The scheduler under random traffic: nobody sits on two chairs, and everybody gets one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_pool.actors.scheduler import Admission, GroupState, Scheduler, batch_buckets


class SchedulerTraffic(RuleBasedStateMachine):
    """Groups arrive, run, end and are cancelled in any order; a plain model of the slots runs beside it."""

    @initialize(num_slots=st.integers(1, 40))
    def start(self, num_slots: int) -> None:
        self.scheduler = Scheduler(num_slots)
        self.groups: dict[int, GroupState] = {}
        self.waiting: set[int] = set()
        self.cancelled: set[int] = set()
        self.sits: dict[int, tuple[int, int]] = {}  # slot: (group, sample)
        self.admitted: Counter[tuple[int, int]] = Counter()
        self.finished: Counter[tuple[int, int]] = Counter()

    @rule(num_samples=st.integers(1, 50), budget=st.integers(1, 5))
    def arrive(self, num_samples: int, budget: int) -> None:
        group = GroupState(len(self.groups), num_samples, budget)
        self.groups[group.group_id] = group
        self.waiting.add(group.group_id)
        self.scheduler.add(group)

    @rule()
    def admit(self) -> None:
        held_before = self.scheduler.held
        waiting_before = {number: self.groups[number] for number in self.waiting}
        admission = self.scheduler.admit()
        if admission is None:
            assert len(self.sits) == self.scheduler.num_slots or (held_before is None and not self.waiting)
            return
        self._take(admission)
        group = admission.group
        if held_before is not None:
            assert group is held_before, "a group whose prompt is held goes first"
        else:
            assert group.group_id in self.waiting
            best = max(waiting_before.values(), key=lambda one: (one.budget, -one.group_id))
            assert group is best, "the longest budget goes first, then the first come"
            self.waiting.remove(group.group_id)
        assert admission.is_last == (self.scheduler.held is None)

    def _take(self, admission: Admission) -> None:
        assert admission.slots
        for number, slot in enumerate(admission.slots, start=admission.first):
            assert slot not in self.sits, "a slot has one owner"
            self.sits[slot] = (admission.group.group_id, number)
            self.admitted[(admission.group.group_id, number)] += 1

    @precondition(lambda self: self.sits)
    @rule(pick=st.integers(0, 1000))
    def finish(self, pick: int) -> None:
        slot = sorted(self.sits)[pick % len(self.sits)]
        sample = self.sits.pop(slot)
        group = self.scheduler.finish(slot)
        assert group is self.groups[sample[0]]
        self.finished[sample] += 1
        done = sum(1 for name in self.finished if name[0] == sample[0])
        assert group.is_complete == (done == group.num_samples)

    @precondition(lambda self: self.groups)
    @rule(pick=st.integers(0, 1000))
    def cancel(self, pick: int) -> None:
        alive = [g for g in self.groups.values() if not g.is_complete and g.group_id not in self.cancelled]
        if not alive:
            return
        group = alive[pick % len(alive)]
        freed = self.scheduler.cancel(group)
        assert sorted(freed) == sorted(
            slot for slot, sample in self.sits.items() if sample[0] == group.group_id
        )
        self.sits = {slot: sample for slot, sample in self.sits.items() if sample[0] != group.group_id}
        self.waiting.discard(group.group_id)
        self.cancelled.add(group.group_id)

    @rule()
    def compact(self) -> None:
        rows_before = self.scheduler.num_rows
        someone_waits = bool(self.waiting) or self.scheduler.held is not None
        moves = self.scheduler.compact()
        if someone_waits:
            assert not moves, "while somebody waits, freed slots are filled, not closed up"
        sources, targets = [s for s, _ in moves], [t for _, t in moves]
        assert len({*sources, *targets}) == 2 * len(moves), "sources and targets are disjoint: no row is lost"
        assert all(source in self.sits for source in sources)
        assert all(target not in self.sits for target in targets)
        for source, target in moves:
            self.sits[target] = self.sits.pop(source)
        if moves:
            rows = self.scheduler.num_rows
            assert rows < rows_before
            assert rows in batch_buckets(self.scheduler.num_slots)
            assert all(target < rows for target in targets)
            assert all(source >= rows for source in sources), "rows that need not move stay"

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        owned = {slot: group.group_id for slot, group in scheduler.owner.items()}
        assert owned == {slot: sample[0] for slot, sample in self.sits.items()}
        assert scheduler.num_live == len(self.sits) <= scheduler.num_slots
        assert all(0 <= slot < scheduler.num_slots for slot in self.sits)
        assert scheduler.num_rows > max(self.sits, default=-1)
        assert scheduler.num_rows in (0, *batch_buckets(scheduler.num_slots))
        assert scheduler.num_waiting == len(self.waiting)
        assert all(count == 1 for count in self.admitted.values()), "a sample is admitted once"
        assert all(count == 1 for count in self.finished.values()), "a sample finishes once"
        partly = [
            group for group in self.groups.values()
            if 0 < group.admitted < group.num_samples and group.group_id not in self.cancelled
        ]  # fmt: skip
        assert partly == ([scheduler.held] if scheduler.held else []), "at most one prompt is held"
        held = sum(group.num_samples - group.admitted for group in partly)
        expected = held + sum(self.groups[number].num_samples for number in self.waiting)
        assert scheduler.num_waiting_samples == expected
        assert scheduler.has_work == bool(self.sits or self.waiting or partly)
        for group in self.groups.values():
            assert group.slots == {slot for slot, sample in self.sits.items() if sample[0] == group.group_id}

    def teardown(self) -> None:
        """Whatever happened, the rest runs to its end: every sample once, all slots free."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10_000):
            if not self.scheduler.has_work:
                break
            self.admit()
            self.compact()
            if self.sits:
                self.finish(7)
            self.the_books_balance()
        assert not self.scheduler.has_work
        for group in self.groups.values():
            if group.group_id not in self.cancelled:
                assert all(
                    self.finished[(group.group_id, number)] == 1 for number in range(group.num_samples)
                )
        assert self.scheduler.owner == {}
        everything = GroupState(-1, self.scheduler.num_slots, 1)
        self.scheduler.add(everything)
        admission = self.scheduler.admit()
        assert admission is not None
        assert sorted(admission.slots) == list(range(self.scheduler.num_slots)), "no slot was lost"


TestSchedulerTraffic = SchedulerTraffic.TestCase
TestSchedulerTraffic.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_group_larger_than_the_slots_is_admitted_in_parts_and_held_until_its_last_sample() -> None:
    scheduler = Scheduler(3)
    big, small = GroupState(0, 7, 10), GroupState(1, 1, 99)
    scheduler.add(big)
    first = scheduler.admit()
    assert first is not None
    assert (first.first, first.slots, first.is_last) == (0, (0, 1, 2), False)
    scheduler.add(small)  # longer, but the held prompt goes first
    assert scheduler.admit() is None
    scheduler.finish(1)
    second = scheduler.admit()
    assert second is not None
    assert (second.group, second.first, second.slots, second.is_last) == (big, 3, (1,), False)
    for slot in (0, 1, 2):
        scheduler.finish(slot)
    third = scheduler.admit()
    assert third is not None
    assert (third.first, third.slots, third.is_last) == (4, (0, 1, 2), True)
    assert scheduler.held is None


def test_samples_take_the_lowest_free_slots_so_that_few_rows_are_computed() -> None:
    scheduler = Scheduler(16)
    scheduler.add(GroupState(0, 6, 1))
    scheduler.admit()
    for slot in (1, 4):
        scheduler.finish(slot)
    scheduler.add(GroupState(1, 3, 1))
    admission = scheduler.admit()
    assert admission is not None
    assert admission.slots == (1, 4, 6)
    assert scheduler.num_rows == 8


@pytest.mark.parametrize(
    ("num_slots", "buckets"),
    [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12)), (24, (1, 2, 4, 8, 16, 24))],
)
def test_buckets_end_with_all_slots(num_slots: int, buckets: tuple[int, ...]) -> None:
    assert batch_buckets(num_slots) == buckets
