"""Routing on plain data: no cluster, no clock."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from rollout_pool.fair_queue import WorkQueue
from rollout_pool.room import Room
from rollout_pool.routing import ActorLoad, GroupWork

sizes = st.tuples(st.integers(1, 40), st.integers(1, 500))
works = st.lists(sizes, max_size=30).map(
    lambda pairs: [GroupWork(ticket, *pair) for ticket, pair in enumerate(pairs)]
)


def next_actor(loads: Iterable[ActorLoad]) -> str | None:
    room = Room()
    for load in loads:
        room.update(load)
    return room.least_loaded()


def test_next_group_goes_to_the_least_loaded_by_remaining_tokens() -> None:
    long = ActorLoad("a", 8).on_submitted(GroupWork(0, 1, 500))
    short = ActorLoad("b", 8).on_submitted(GroupWork(1, 4, 10))
    assert next_actor([long, short]) == "b"
    assert next_actor([long, short, ActorLoad("c", 8)]) == "c"
    assert next_actor([]) is None


def test_actor_holds_one_batch_and_a_small_lookahead() -> None:
    load, sent = ActorLoad("a", 16), 0
    while next_actor([load]) is not None:
        load = load.on_submitted(GroupWork(sent, 1, 10))
        sent += 1
    assert sent == 16 + 4


def test_group_larger_than_the_slots_goes_out_whole_and_blocks_until_it_is_nearly_done() -> None:
    work = GroupWork(0, 100, 10)
    load = ActorLoad("a", 8).on_submitted(work)
    assert next_actor([load]) is None
    assert next_actor([load.on_progress(90)]) is None
    assert next_actor([load.on_progress(91)]) == "a"
    assert load.on_completed(work).remaining_tokens == 0


def test_samples_that_ended_make_room_before_their_group_completes() -> None:
    works = [GroupWork(ticket, 8, 100) for ticket in range(2)]
    load = ActorLoad("a", 8)
    for work in works:
        load = load.on_submitted(work)
    ahead = load.on_progress(9)  # a whole group and one sample of the other
    assert (ahead.outstanding_samples, ahead.remaining_tokens) == (7, 700)
    overtaken = ahead.on_completed(works[0]).on_progress(8)  # a late report changes nothing
    assert (overtaken.outstanding_samples, overtaken.remaining_tokens) == (7, 700)


@given(works, st.integers(1, 3), st.integers(1, 16), st.randoms(use_true_random=False))
def test_no_actor_starves_or_overflows_however_groups_end(
    groups: list[GroupWork], num_actors: int, num_slots: int, random
) -> None:
    loads = {name: ActorLoad(name, num_slots) for name in "abc"[:num_actors]}
    running: dict[int, tuple[str, GroupWork]] = {}
    queue, done = WorkQueue(), []
    for work in groups:
        queue.push(work)
    while len(queue) or running:
        while len(queue) and (name := next_actor(loads.values())) is not None:
            before = loads[name].outstanding_samples
            assert before < num_slots + max(1, num_slots // 4)
            work = queue.pop()
            loads[name] = loads[name].on_submitted(work)
            running[work.ticket] = (name, work)
        for load in loads.values():  # work waits only while everyone has a full batch
            assert not len(queue) or load.outstanding_samples >= num_slots
        name, work = running.pop(random.choice(sorted(running)))
        ended = loads[name].completed_samples + random.randint(0, work.num_samples)
        loads[name] = loads[name].on_progress(ended).on_completed(work)
        done.append(work.ticket)
        assert all(load.outstanding_samples >= 0 <= load.remaining_tokens for load in loads.values())
    assert sorted(done) == [work.ticket for work in groups]
    assert all(load.outstanding_samples == load.remaining_tokens == 0 for load in loads.values())
