"""When an actor's answers, or their absence, mean that it is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import chain, repeat

import pytest
from ray.exceptions import ActorDiedError

from rollout_pool import PoolConfig
from rollout_pool.actors.progress import Progress
from rollout_pool.heartbeat import Pulse, report_interval, until_lost

LIMIT = 10.0


def at(steps: int, doing: str = "step") -> Progress:
    return Progress(0, steps, doing != "idle", doing)


def causes(*answers: tuple[float, Progress, bool]) -> list[str | None]:
    pulse = Pulse(LIMIT, now=0.0)
    return [pulse.cause_of_loss(progress, has_groups, asked_at) for asked_at, progress, has_groups in answers]


def test_work_that_does_not_get_on_is_a_loss_once_the_limit_has_passed() -> None:
    hangs = causes((1.0, at(7), True), (11.0, at(7), True), (11.2, at(7), True))
    assert hangs[:2] == [None, None]
    assert hangs[2] == "its engine finished nothing for step_timeout_s (10 s): it is in 'step'"
    moves = causes((1.0, at(7), True), (10.9, at(8), True), (20.8, at(9), True), (30.0, at(9), True))
    assert moves == [None] * 4


def test_an_idle_actor_may_stay_so_but_not_while_it_owes_groups() -> None:
    idle = at(7, "idle")
    assert causes((0.0, idle, False), (1000.0, idle, False), (1009.0, idle, True)) == [None] * 3
    assert causes((0.0, idle, True), (10.1, idle, True)) == [
        None,
        "its engine finished nothing for step_timeout_s (10 s): it is idle, and owes groups",
    ]


def test_a_large_pool_asks_each_actor_less_often() -> None:
    assert report_interval(2) == report_interval(50) == 0.2
    assert report_interval(1000) == 4.0


def watch(answers: Iterator[Progress | BaseException | float], **limits: float) -> str:
    """Run a watch on answers: a progress, an error, or seconds for which nothing comes."""

    async def ask() -> Progress:
        answer = next(answers)
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            answer = at(10**9)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def run() -> str:
        config = PoolConfig(model="m", **{"heartbeat_timeout_s": 0.2, "step_timeout_s": 0.2, **limits})
        async with asyncio.timeout(10):
            return await until_lost(ask, lambda progress: True, config, lambda: 0.01)

    return asyncio.run(run())


def test_a_dead_a_silent_and_a_hanging_actor_are_lost_for_what_they_are() -> None:
    assert "died" in watch(iter([at(1), ActorDiedError()]))
    assert watch(chain([at(1)], repeat(30.0))) == "it gave no answer for heartbeat_timeout_s (0.2 s)"
    assert "finished nothing for step_timeout_s (0.2 s)" in watch(at(5) for _ in range(1000))


@pytest.mark.parametrize("still_s", [0.45, 0.6, 1.5], ids=["just under", "just over", "long"])
def test_a_pool_that_stood_still_itself_does_not_blame_its_actors(still_s: float) -> None:
    def answers() -> Iterator[Progress | BaseException | float]:
        yield at(1)
        asyncio.get_running_loop().call_later(0.1, time.sleep, still_s)  # this process, not the actor
        yield 0.2
        yield at(2)
        yield ActorDiedError()

    assert "died" in watch(answers(), heartbeat_timeout_s=0.5)
