"""Who has room, told load by load, against a look at all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollout_pool.room import Room
from rollout_pool.routing import ActorLoad, GroupWork

NAMES = [f"actor-{number}" for number in range(5)]


def test_the_least_loaded_by_remaining_tokens_comes_first() -> None:
    room = Room()
    assert room.least_loaded() is None
    room.update(ActorLoad("a", 8).on_submitted(GroupWork(0, 1, 500)))
    room.update(ActorLoad("b", 8).on_submitted(GroupWork(1, 4, 10)))
    assert room.least_loaded() == "b"
    room.update(ActorLoad("c", 8))
    assert room.least_loaded() == "c"
    room.remove("c")
    room.update(ActorLoad("b", 8).on_submitted(GroupWork(1, 12, 10)))  # more than its slots
    assert room.least_loaded() == "a"


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3), st.integers(1, 6)), max_size=200))
def test_it_agrees_with_a_look_at_all_actors(changes: list[tuple[str, int, int]]) -> None:
    room, loads = Room(), {name: ActorLoad(name, 4) for name in NAMES}
    given_out: dict[str, list[GroupWork]] = {name: [] for name in NAMES}
    for load in loads.values():
        room.update(load)
    for ticket, (name, change, size) in enumerate(changes):
        load = loads[name]
        if change == 0:
            given_out[name].append(GroupWork(ticket, size, 10 * size))
            load = load.on_submitted(given_out[name][-1])
        elif change == 1 and given_out[name]:
            load = load.on_completed(given_out[name].pop())
        elif change == 2:
            load = load.on_progress(min(load.submitted_samples, load.completed_samples + size))
        else:  # it is lost, and another one comes
            load, given_out[name] = ActorLoad(name, 4), []
            room.remove(name)
        loads[name] = load
        room.update(load)
        ready = [load for load in loads.values() if load.has_room]
        keys = [(load.remaining_tokens, load.outstanding_samples, load.actor) for load in ready]
        assert room.least_loaded() == (min(keys)[2] if keys else None)


def test_loads_that_change_for_ever_take_no_more_memory() -> None:
    room, load = Room(), ActorLoad("a", 8)
    for ticket in range(10_000):
        load = load.on_submitted(GroupWork(ticket, 1, 10))
        room.update(load)
        load = load.on_completed(GroupWork(ticket, 1, 11))
        room.update(load)
    assert len(room._heap) < 200
