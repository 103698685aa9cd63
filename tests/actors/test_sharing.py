"""Which groups share their prompt, and that none waits for ever."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from rollout_pool.actors.scheduler import GroupState, Scheduler
from rollout_pool.actors.sharing import LEAST_ROWS, LEAST_SAVED, Sharing, pays


def test_sharing_pays_for_long_prompts_of_many_rows() -> None:
    assert pays(1024, 16)
    assert not pays(1024, 1)
    assert not pays(1, 16)
    least = -(-LEAST_SAVED // (LEAST_ROWS - 1))
    assert pays(least, LEAST_ROWS)
    assert not pays(least, LEAST_ROWS - 1)
    assert not pays(least - 1, LEAST_ROWS)


def test_auto_copies_when_there_is_no_room_and_waits_only_when_it_must() -> None:
    sharing = Sharing("auto", num_slots=16, slot_length=1200, prompt_tokens=1500)
    assert sharing.decide(0, 1000, 100, 8) is True
    assert sharing.decide(1, 1000, 100, 8) is False  # no room, but a slot holds it
    assert sharing.decide(2, 1150, 100, 1) is None
    sharing.release(0)
    assert sharing.decide(2, 1150, 100, 1) is True
    assert sharing.num_held == 1150
    assert Sharing("auto", 16, 1200, 5000, by_cost=False).decide(0, 1000, 100, 8) is False
    assert Sharing("expand", 16, 1200, 5000).decide(0, 1150, 100, 8) is False
    assert Sharing("shared", 16, 1200, 10).decide(0, 20, 1, 1) is True  # nobody to wait for


@given(
    groups=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(1, 6)), max_size=15),
    budget=st.integers(1, 120),
    num_slots=st.integers(1, 8),
    mode=st.sampled_from(["shared", "auto"]),
    seed=st.integers(0, 1000),
)
def test_every_group_gets_its_turn_and_prompts_stay_within_their_bound(
    groups: list[tuple[int, int, int]], budget: int, num_slots: int, mode: str, seed: int
) -> None:
    sharing = Sharing(mode, num_slots, slot_length=25, prompt_tokens=budget)  # type: ignore[arg-type]
    scheduler = Scheduler(num_slots, sharing)
    draw = random.Random(seed)
    states = [
        GroupState(number, n, new, (prompt,) * n, prompt, new)
        for number, (prompt, new, n) in enumerate(groups)
    ]
    waiting = list(states)
    while waiting or scheduler.has_work:
        if waiting and draw.random() < 0.5:
            scheduler.add(waiting.pop())
        while (admission := scheduler.admit()) is not None:
            group = admission.group
            assert group.is_shared or group.prompt_tokens + group.max_new_tokens <= 25
        live = {group.group_id for group in scheduler.owner.values() if group.is_shared}
        assert live <= set(sharing._held)
        assert sharing.num_held <= budget or len(sharing._held) == 1
        if scheduler.owner:
            if draw.random() < 0.1:
                scheduler.cancel(draw.choice(list(scheduler.owner.values())))
            else:
                scheduler.finish(draw.choice(list(scheduler.owner)))
        else:
            assert not scheduler.has_work
    assert sharing.num_held == 0
