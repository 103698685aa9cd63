"""Where the processes of a simulated pool start and end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ray.exceptions import RayActorError

from rollout_pool.actors.progress import Progress
from rollout_pool.actors.rollout_actor import ActorInfo
from rollout_pool.config import PoolConfig
from rollout_pool.pool import PoolActor
from rollout_pool.preflight import ActorResources
from rollout_pool.simulation.latency import Latency
from rollout_pool.simulation.meter import Meter
from rollout_pool.simulation.process import SimulatedActor
from rollout_pool.simulation.workload import Lengths

StartFault = Literal["dies", "hangs", "finds no room"]


@dataclass
class Cluster:
    """What all processes share. ``start_fault`` says what becomes of the one that starts next."""

    latency: Latency
    lengths: Lengths
    start_fault: Callable[[], StartFault | None] = lambda: None
    meter: Meter = field(default_factory=Meter)
    """CPU time of what only pretends."""
    alive: dict[str, SimulatedRanks] = field(default_factory=dict)
    """Engines whose process is up, by name; loaded or not."""
    num_pools: int = 0
    actors: list[SimulatedActor] = field(default_factory=list)
    """All that there ever were."""

    def start_pool(self, config: PoolConfig) -> PoolActor:
        """The real pool, whose actors are here. In the running loop."""
        self.num_pools += 1
        new_ranks: Any = partial(
            SimulatedRanks, self, f"pool-{self.num_pools}/" if self.num_pools > 1 else ""
        )
        return PoolActor(config, ActorResources(1, 0, 1), new_ranks=new_ranks)


class SimulatedRanks:
    """Stands for :class:`~rollout_pool.actors.tensor_parallel.RankActors` of size 1."""

    def __init__(self, cluster: Cluster, pool: str, name: str) -> None:
        self.stage: Literal["placement", "processes", "loading"] = "processes"
        self.name = pool + name
        self.is_loaded = False
        self.is_killed = asyncio.Event()
        self._cluster = cluster
        self._actors: list[SimulatedActor] = []

    @property
    def leader(self) -> SimulatedActor:
        return self._actors[0]

    @property
    def handles(self) -> tuple[SimulatedActor, ...]:
        return tuple(self._actors)

    async def start(self) -> ActorInfo:
        cluster = self._cluster
        fault = cluster.start_fault()
        if fault == "finds no room":
            await asyncio.get_running_loop().create_future()
        self.stage = "loading"
        self._actors = [SimulatedActor(self.name, cluster.latency, cluster.lengths, cluster.meter)]
        cluster.actors.append(self.leader)
        cluster.alive[self.name] = self
        if fault == "hangs":
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(cluster.latency.start_s)
        if fault == "dies" or self.leader.is_dead:
            self.leader.die()
            raise RayActorError(error_msg="it died while it loaded, as planned")
        self.is_loaded = True
        return ActorInfo(self.name, 0, "cpu", 1, "simulated")

    async def progress(self) -> Progress:
        progress: Progress = await self.leader.progress.remote()
        return progress

    def kill(self) -> None:
        self.is_killed.set()
        self._cluster.alive.pop(self.name, None)
        for actor in self._actors:
            actor.die()

    def needs(self) -> str:
        return "1 CPU of which 0 of 1 are free"
