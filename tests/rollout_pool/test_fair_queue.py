"""Whose turn it is, on plain data."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_pool.fair_queue import KEPT_RECORDS, WorkQueue
from rollout_pool.routing import CallKey, GroupWork

sizes = st.tuples(st.integers(1, 40), st.integers(1, 500))
works = st.lists(sizes, max_size=30).map(
    lambda pairs: [GroupWork(ticket, *pair) for ticket, pair in enumerate(pairs)]
)
KEYS = [CallKey(caller, call) for caller in "abc" for call in range(2)]
crowds = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(1, 100)), min_size=1, max_size=60).map(
    lambda drawn: [GroupWork(ticket, 1, size, key) for ticket, (key, size) in enumerate(drawn)]
)


def queue_of(groups: list[GroupWork]) -> WorkQueue:
    queue = WorkQueue()
    for work in groups:
        queue.push(work)
    return queue


def drain(queue: WorkQueue) -> list[GroupWork]:
    return [queue.pop() for _ in range(len(queue))]


@given(works)
def test_in_one_call_the_longest_expected_group_goes_first_and_equals_by_arrival(
    groups: list[GroupWork],
) -> None:
    longest_first = sorted(groups, key=lambda work: -work.num_samples * work.max_new_tokens)
    assert drain(queue_of(groups)) == longest_first  # sorted is stable


@given(works)
def test_calls_of_one_group_each_go_longest_first_too(groups: list[GroupWork]) -> None:
    keyed = [GroupWork(w.ticket, w.num_samples, w.max_new_tokens, CallKey("a", w.ticket)) for w in groups]
    assert [w.tokens for w in drain(queue_of(keyed))] == sorted((w.tokens for w in groups), reverse=True)


@given(works, st.data())
def test_discarded_group_never_leaves_the_queue_and_a_returned_one_has_its_old_place(
    groups: list[GroupWork], data: st.DataObject
) -> None:
    queue = queue_of(groups)
    taken = {queue.pop() for _ in range(data.draw(st.integers(0, len(groups))))}
    gone = {work for work in groups if data.draw(st.booleans())}
    for work in gone:
        assert queue.discard(work.ticket) == (work not in taken)
    for work in taken - gone:
        queue.push(work)
    left = sorted((w for w in groups if w not in gone), key=lambda work: -work.tokens)
    assert drain(queue) == left
    with pytest.raises(IndexError):
        queue.pop()


@settings(deadline=None)
@given(crowds, st.data())
def test_nobody_starves_and_whatever_may_go_out_does(groups: list[GroupWork], data: st.DataObject) -> None:
    """The bounds that fair_queue states, for callers and for the calls of one, as groups come and go."""
    queue, coming = WorkQueue(), list(groups)
    waiting: dict[int, GroupWork] = {}
    order: list[GroupWork] = []
    since: dict[object, int] = {}  # who waits, and since when
    last: dict[object, int] = {}  # the tokens of the last group that someone was given
    while coming or waiting:
        if coming and (not waiting or data.draw(st.booleans())):
            work = coming.pop(0)
            queue.push(work)
            waiting[work.ticket] = work
            for who in (work.key.caller, work.key):
                since.setdefault(who, len(order))
            continue
        work = queue.pop()  # it never refuses while something waits
        del waiting[work.ticket]
        for who, others in (
            (work.key.caller, "abc"),
            (work.key, [k for k in KEYS if k.caller == work.key.caller]),
        ):
            start, before = since.pop(who), last.get(who, 0)
            for other in others:
                given = [w.tokens for w in order[start:] if other in (w.key.caller, w.key)]
                if other != who and given:
                    assert sum(given) <= before + max(given)
            if any(who in (w.key.caller, w.key) for w in waiting.values()):
                since[who] = len(order) + 1
            last[who] = work.tokens
        order.append(work)
    assert sorted(w.ticket for w in order) == [w.ticket for w in groups]


def test_a_caller_with_short_groups_is_not_kept_waiting_by_one_with_long_ones() -> None:
    queue = queue_of([GroupWork(ticket, 8, 1000, CallKey("long")) for ticket in range(100)])
    for _ in range(50):
        queue.pop()
    for ticket in range(100, 120):
        queue.push(GroupWork(ticket, 1, 400, CallKey("short")))
    order = [queue.pop().key.caller for _ in range(42)]
    assert Counter(order[:21]) == {"short": 20, "long": 1}


def test_a_call_that_is_held_lets_others_pass_and_keeps_its_order() -> None:
    keys = CallKey("a", 0), CallKey("a", 1)
    queue = queue_of([GroupWork(ticket, 1, 10 + ticket, keys[ticket % 2]) for ticket in range(6)])
    queue.hold(keys[0])
    queue.push(GroupWork(6, 1, 99, keys[0]))
    assert [queue.pop().ticket for _ in range(3)] == [5, 3, 1]
    assert not queue.is_ready
    assert len(queue) == 4
    queue.release(keys[0])
    assert [queue.pop().ticket for _ in range(4)] == [6, 4, 2, 0]


def test_callers_and_calls_that_are_gone_are_forgotten() -> None:
    queue = WorkQueue()
    for ticket in range(2000):
        queue.push(GroupWork(ticket, 1, 5, CallKey(str(ticket), ticket)))
        queue.pop()
    assert not queue._callers.lines
    assert len(queue._callers._given) <= KEPT_RECORDS + 2
    assert len(queue._callers._heap) <= KEPT_RECORDS
