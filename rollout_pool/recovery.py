"""Rollout actors from start to loss.

A lost actor is killed (it may be half alive), replaced by a new one with the same configuration,
and its groups go back to the queue: a sample is a pure function of its request, so a replay gives
what the lost actor would have given. It gets the pool's present weights before it is given any of
them. The ranks of a tensor-parallel group count as one actor: the loss of any is the loss of all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from rollout_pool.actors.progress import Progress
from rollout_pool.actors.rollout_actor import ActorInfo
from rollout_pool.actors.tensor_parallel import RankActors
from rollout_pool.background import TaskSet
from rollout_pool.config import PoolConfig
from rollout_pool.errors import ActorStartError, NoRoomError, RolloutPoolError
from rollout_pool.heartbeat import report_interval, until_lost
from rollout_pool.ray_errors import cause_of, one_line
from rollout_pool.routing import ActorLoad
from rollout_pool.types import EngineStats

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 5.0
NOTICE_S = 10.0
"""An actor that has found no room for so long is worth a line in the log."""
LONGEST_PAUSE_S = 60.0
"""Between two tries to start a replacement; the first is a second, and each is twice the one before."""

NewRanks = Callable[[str], RankActors]
"""Makes the processes, still to be started, of the engine with this name."""


@dataclass(eq=False, slots=True)
class Member:
    """One live rollout actor, or tensor-parallel group of them, and what it was given."""

    name: str
    ranks: RankActors
    info: ActorInfo
    load: ActorLoad
    weight_version: int = 0
    """Of the weights that it has acknowledged."""

    @property
    def handle(self) -> Any:
        """The Ray handle that takes calls."""
        return self.ranks.leader


class Crew:
    """The rollout actors of one pool.

    ``on_room`` is called with an actor that may take more work; ``on_exhausted`` when no actor is
    left and none can be started. ``joining`` is the context in which a new actor becomes a member: it
    gives it the present weights, and their version. ``new_ranks`` makes the processes of an engine.
    """

    def __init__(
        self,
        config: PoolConfig,
        new_ranks: NewRanks,
        tasks: TaskSet,
        on_room: Callable[[Member], None],
        on_exhausted: Callable[[RolloutPoolError], None],
        joining: Callable[[str, RankActors, float], AbstractAsyncContextManager[int]],
    ) -> None:
        self.members: dict[str, Member] = {}
        self.num_lost = 0
        self._config = config
        self._new_ranks = new_ranks
        self._tasks = tasks
        self._on_room = on_room
        self._on_exhausted = on_exhausted
        self._joining = joining
        self._starting: dict[str, RankActors] = {}
        self._hopeful: set[str] = set()
        """The lost actors whose replacement has neither failed for good nor waited in vain for room."""

    async def start(self) -> None:
        """Bring all actors up; all are killed again when one of them fails, and its error raised."""
        names = [f"actor-{index}" for index in range(self._config.num_actors)]
        starts = [asyncio.ensure_future(self._bring_up(name)) for name in names]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            self.close()
            raise

    def lose(self, member: Member, cause: str) -> None:
        """Kill and replace an actor. Its pending calls then fail, so that their groups are replayed."""
        if self.members.get(member.name) is not member:
            return  # another of its groups reported the loss already
        del self.members[member.name]
        self.num_lost += 1
        logger.warning("rollout %s was lost and is replaced: %s", member.name, cause)
        member.ranks.kill()
        self._tasks.start(self._replace(member.name))

    def close(self) -> None:
        """Kill every actor, also those that are starting."""
        everyone = [*self._starting.values(), *(member.ranks for member in self.members.values())]
        self._starting.clear()
        self.members.clear()
        for ranks in everyone:
            ranks.kill()

    async def stats(self) -> dict[str, EngineStats]:
        """Fresh counters of the actors that answer, in the order of their names."""

        async def ask(member: Member) -> EngineStats:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                stats: EngineStats = await member.handle.stats.remote()
                return stats

        members = [self.members[name] for name in sorted(self.members)]
        answers = await asyncio.gather(*map(ask, members), return_exceptions=True)
        found = zip(members, answers, strict=True)
        return {member.name: stats for member, stats in found if isinstance(stats, EngineStats)}

    async def _replace(self, lost: str) -> None:
        """Start another in place of a lost one: again after a failure, and on while there is no room."""
        name, failures = lost, 0
        self._hopeful.add(lost)
        while failures < self._config.max_start_failures:
            name = _next_generation(name)
            try:
                await self._bring_up(name)
            except NoRoomError as error:
                self._do_without(lost, error)
            except RolloutPoolError as error:
                failures += 1
                if failures == self._config.max_start_failures:
                    self._do_without(lost, error)
                else:
                    logger.warning("%s; it is tried again", error)
                    await asyncio.sleep(min(2.0 ** (failures - 1), LONGEST_PAUSE_S))
            else:
                self._hopeful.discard(lost)
                return

    def _do_without(self, lost: str, error: RolloutPoolError) -> None:
        self._hopeful.discard(lost)
        logger.error("%s; the pool goes on with %d actors", error, len(self.members))
        if not self.members and not self._hopeful:
            self._on_exhausted(error)

    async def _bring_up(self, name: str) -> None:
        ranks = self._new_ranks(name)
        self._starting[name] = ranks
        try:
            info = await self._wait_until_ready(name, ranks)
            async with self._joining(name, ranks, self._config.start_timeout_s) as version:
                load = ActorLoad(name, self._config.engine.num_slots)
                member = self.members[name] = Member(name, ranks, info, load, version)
        except BaseException:
            ranks.kill()
            raise
        finally:
            self._starting.pop(name, None)
        self._tasks.start(self._watch(member))
        self._on_room(member)

    async def _wait_until_ready(self, name: str, ranks: RankActors) -> ActorInfo:
        limit = self._config.start_timeout_s
        notice = asyncio.get_running_loop().call_later(NOTICE_S, self._notice, name, ranks)
        try:
            async with asyncio.timeout(limit):
                return await ranks.start()
        except TimeoutError:
            if ranks.stage != "loading":
                raise NoRoomError(f"{name}: {self._why_not_scheduled(ranks)}") from None
            reason = f"the model took longer to load than start_timeout_s ({limit:g} s)"
            raise ActorStartError(f"{name}: {reason}") from None
        except RayError as error:
            cause = cause_of(error)
            if isinstance(cause, RolloutPoolError):
                raise cause from None
            raise ActorStartError(f"{name} died while it started: {one_line(cause)}") from None
        finally:
            notice.cancel()

    def _notice(self, name: str, ranks: RankActors) -> None:
        if ranks.stage != "loading":
            logger.warning("%s has no process yet; it needs %s", name, ranks.needs())

    def _why_not_scheduled(self, ranks: RankActors) -> str:
        config = self._config
        size = config.tensor_parallel_size
        where = ""
        if size > 1:
            where = f" in {size} equal parts"
            where += ", all on one node" if config.tensor_parallel_placement == "strict_pack" else ""
        return (
            f"no process within start_timeout_s ({config.start_timeout_s:g} s); it needs "
            f"{ranks.needs()}{where}: free some, or lower num_actors or what each actor asks for"
        )

    async def _watch(self, member: Member) -> None:
        def on_progress(progress: Progress) -> bool:
            member.load = member.load.on_progress(progress.samples_ended)
            if self.members.get(member.name) is member:
                self._on_room(member)
            return member.load.completed_samples < member.load.submitted_samples

        def pause_s() -> float:
            return report_interval(len(self.members))

        self.lose(member, await until_lost(member.ranks.progress, on_progress, self._config, pause_s))


def _next_generation(name: str) -> str:
    stem, _, generation = name.partition(".")
    return f"{stem}.{int(generation or 0) + 1}"
