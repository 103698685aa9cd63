"""Whether an actor still gets on, judged by what it answers.

An actor is lost when it gives no answer for a time, when one of its processes ended, or when it has work
and finishes none of it: a process whose engine hangs answers as ever, so that it answers is not enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ray.exceptions import RayError

from rollout_pool.actors.progress import Progress
from rollout_pool.config import PoolConfig
from rollout_pool.ray_errors import cause_in_one_line

INTERVAL_S = 0.2
"""Between an answer and the next question, in a small pool."""
QUESTIONS_PER_S = 250
"""Of a large pool to all its actors together: each costs the pool's process some time."""
SLICES = 20
"""In which the limit is waited for."""
OVERSLEPT = 2.0
"""A slice that took so many times its length tells of the pool, which stood still, and does not count."""


def report_interval(num_actors: int) -> float:
    """Seconds between two questions to one of so many actors."""
    return max(INTERVAL_S, num_actors / QUESTIONS_PER_S)


class Pulse:
    """What the answers of one actor amount to. Times are seconds of the caller's clock."""

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._steps = -1
        self._moved_at = now

    def cause_of_loss(self, progress: Progress, has_groups: bool, asked_at: float) -> str | None:
        """Take an answer in. Returns why the actor is of no use any more, if it is not.

        has_groups: the actor was given some that have not come back. An answer tells how things stood at
        ``asked_at`` or later; how long it was on its way proves nothing.
        """
        is_owed = progress.is_busy or has_groups
        if progress.steps != self._steps or not is_owed:
            self._steps, self._moved_at = progress.steps, asked_at
        if asked_at - self._moved_at <= self._limit_s:
            return None
        state = f"it is in {progress.doing!r}" if progress.is_busy else "it is idle, and owes groups"
        return f"its engine finished nothing for step_timeout_s ({self._limit_s:g} s): {state}"


async def until_lost(
    ask: Callable[[], Awaitable[Progress]],
    on_progress: Callable[[Progress], bool],
    config: PoolConfig,
    pause_s: Callable[[], float],
) -> str:
    """Ask an actor how far it has come until it is lost; returns why.

    ``on_progress`` gets every answer, and returns whether the actor has groups.
    """
    loop, limit_s = asyncio.get_running_loop(), config.heartbeat_timeout_s
    pulse = Pulse(config.step_timeout_s, loop.time())
    while True:
        asked_at = loop.time()
        try:
            progress = await within(limit_s, ask())
        except TimeoutError:
            return f"it gave no answer for heartbeat_timeout_s ({limit_s:g} s)"
        except RayError as error:
            return cause_in_one_line(error)
        if cause := pulse.cause_of_loss(progress, on_progress(progress), asked_at):
            return cause
        await asyncio.sleep(pause_s())


async def within(limit_s: float, answer: Awaitable[Progress]) -> Progress:
    """Wait for an answer. Raises TimeoutError when none came in ``limit_s`` of this process being awake."""
    loop, call = asyncio.get_running_loop(), asyncio.ensure_future(answer)
    try:
        slices = SLICES
        while slices > 0:
            began_at = loop.time()
            await asyncio.wait({call}, timeout=limit_s / SLICES)
            if call.done():
                return call.result()
            slices -= loop.time() - began_at < OVERSLEPT * limit_s / SLICES
        raise TimeoutError
    finally:
        call.cancel()
