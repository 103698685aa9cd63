"""Calls take effect in the order in which one process made them, whatever order they come in."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from rollout_pool.call_order import LIMIT_S, CallOrder
from rollout_pool.simulation.clock import run_virtually

PROCESSES = "ab"


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[str, int, float]]:
    """Calls of two processes, and when each comes: within the limit of the first, in any order."""
    return [
        (process, number, draw(st.integers(0, 18)) / 10)
        for process in PROCESSES
        for number in range(1, draw(st.integers(1, 8)) + 1)
    ]


def effects(calls: list[tuple[str, int | None, float]], cancelled: dict[int, float] | None = None) -> list:
    """What took effect, in order, and when. ``cancelled``: calls that are, by their place, and when."""
    order, seen = CallOrder(), []

    async def call(process: str, number: int | None, at: float, start: float) -> None:
        await asyncio.sleep(at)
        await order.wait(process, number)
        seen.append((process, number, round(asyncio.get_running_loop().time() - start, 3)))

    async def run() -> None:
        loop = asyncio.get_running_loop()
        tasks = [asyncio.ensure_future(call(*what, loop.time())) for what in calls]
        for index, at in (cancelled or {}).items():
            loop.call_later(at, tasks[index].cancel)
        await asyncio.gather(*tasks, return_exceptions=True)

    run_virtually(run())
    return seen


@given(arrivals())
def test_calls_take_effect_in_their_order_and_as_soon_as_all_before_have_come(calls) -> None:
    seen = effects(calls)
    for process in PROCESSES:
        came = {number: at for who, number, at in calls if who == process}
        mine = [(number, time) for who, number, time in seen if who == process]
        assert [number for number, _ in mine] == sorted(came)
        for number, time in mine:
            assert time == round(max(came[earlier] for earlier in range(1, number + 1)), 3)


def test_what_never_comes_is_waited_for_once() -> None:
    calls = [("a", 4, 0.0), ("a", 3, 0.5), ("a", 7, 1.0), ("a", 8, 30.0), ("b", 1, 0.1)]
    assert effects(calls) == [
        ("b", 1, 0.1),
        ("a", 3, LIMIT_S),  # with 4, which was the first to come
        ("a", 4, LIMIT_S),
        ("a", 7, 1.0 + LIMIT_S),
        ("a", 8, 30.0),
    ]


def test_a_call_that_is_cancelled_while_it_waits_is_not_waited_for() -> None:
    seen = effects([("a", 2, 0.0), ("a", 3, 0.0), ("a", 1, 0.5)], cancelled={0: 0.2})
    assert seen == [("a", 1, 0.5), ("a", 3, 0.5)]


def test_a_call_without_a_number_or_sent_again_does_not_wait() -> None:
    calls = [("a", None, 0.0), ("a", 1, 0.1), ("a", 1, 0.2), ("a", 2, 0.3), ("a", 1, 0.4)]
    assert effects(calls) == calls
