"""Background tasks: no failure is lost, and no caller's context leaks into them."""

from __future__ import annotations

import asyncio
import contextvars
import gc

from rollout_pool.background import TaskSet

caller = contextvars.ContextVar("caller", default="nobody")


def test_failure_of_a_task_reaches_the_owner_and_cancelled_ones_do_not() -> None:
    errors: list[BaseException] = []

    async def fail() -> None:
        raise KeyError("lost")

    async def run() -> None:
        tasks = TaskSet(errors.append)
        tasks.start(asyncio.sleep(60))
        tasks.start(fail())
        gc.collect()
        await asyncio.sleep(0.01)
        tasks.cancel_all()
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert [repr(error) for error in errors] == ["KeyError('lost')"]


def test_task_runs_in_the_owners_context_and_not_in_its_starters() -> None:
    seen: list[str] = []

    async def look() -> None:
        seen.append(caller.get())

    async def run() -> None:
        tasks = TaskSet(lambda error: None)
        caller.set("a caller")
        tasks.start(look())
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert seen == ["nobody"]
