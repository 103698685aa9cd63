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

from ray.exceptions import RayError, RayTaskError

from rollout_pool.actors.rollout_actor import ActorInfo
from rollout_pool.actors.tensor_parallel import RankActors
from rollout_pool.background import TaskSet
from rollout_pool.config import PoolConfig
from rollout_pool.errors import ActorStartError, RolloutPoolError
from rollout_pool.routing import ActorLoad
from rollout_pool.types import EngineStats

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.2
"""How often an actor is asked for its progress, which also tells whether it is alive."""
ANSWER_TIMEOUT_S = 60.0
"""An actor whose event loop is silent for so long counts as lost."""
STATS_TIMEOUT_S = 5.0

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

    ``on_room`` is called whenever an actor may take more work; ``on_exhausted`` when no actor is
    left and none can be started. ``joining`` is the context in which a new actor becomes a member: it
    gives it the present weights, and their version. ``new_ranks`` makes the processes of an engine.
    """

    def __init__(
        self,
        config: PoolConfig,
        new_ranks: NewRanks,
        tasks: TaskSet,
        on_room: Callable[[], None],
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
        self._num_replacing = 0

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
        self._num_replacing += 1
        stem, _, generation = member.name.partition(".")
        self._tasks.start(self._replace(f"{stem}.{int(generation or 0) + 1}"))

    def close(self) -> None:
        """Kill every actor, also those that are starting."""
        everyone = [*self._starting.values(), *(member.ranks for member in self.members.values())]
        self._starting.clear()
        self.members.clear()
        for ranks in everyone:
            ranks.kill()

    async def stats(self) -> tuple[EngineStats, ...]:
        """Fresh counters of the actors that answer, in the order of their names."""

        async def ask(handle: Any) -> EngineStats:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                stats: EngineStats = await handle.stats.remote()
                return stats

        handles = [self.members[name].handle for name in sorted(self.members)]
        answers = await asyncio.gather(*map(ask, handles), return_exceptions=True)
        return tuple(answer for answer in answers if isinstance(answer, EngineStats))

    async def _replace(self, name: str) -> None:
        try:
            await self._bring_up(name)
            self._num_replacing -= 1
        except RolloutPoolError as error:
            self._num_replacing -= 1
            logger.error("%s; the pool goes on with %d actors", error, len(self.members))
            if not self.members and not self._num_replacing:
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
        self._on_room()

    async def _wait_until_ready(self, name: str, ranks: RankActors) -> ActorInfo:
        limit = self._config.start_timeout_s
        try:
            async with asyncio.timeout(limit):
                return await ranks.start()
        except TimeoutError:
            reason = f"the model took longer to load than start_timeout_s ({limit:g} s)"
            if ranks.stage != "loading":
                reason = self._why_not_scheduled(ranks)
            raise ActorStartError(f"{name}: {reason}") from None
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, RolloutPoolError):
                raise cause from None
            raise ActorStartError(f"{name} died while it started: {one_line(cause)}") from None

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
        while self.members.get(member.name) is member:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    progress = await member.ranks.progress()
            except TimeoutError:
                return self.lose(member, f"it gave no answer for {ANSWER_TIMEOUT_S:g} s")
            except RayError as error:
                return self.lose(member, one_line(error.cause if isinstance(error, RayTaskError) else error))
            member.load = member.load.on_progress(progress.samples_ended)
            self._on_room()
            await asyncio.sleep(REPORT_INTERVAL_S)


def one_line(error: BaseException) -> str:
    """What an error says, without the table of ids and the general advice that Ray puts around it."""
    text = " ".join(str(error).split()) or type(error).__name__
    reason = text.partition("The actor is dead because ")[2] or text
    return reason.partition(" Some common causes")[0][:300]
