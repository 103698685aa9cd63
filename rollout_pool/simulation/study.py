"""One policy on one number of actors, and what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout_pool.config import EngineConfig, PoolConfig
from rollout_pool.pools import deal, sizes
from rollout_pool.requests import resolve_requests
from rollout_pool.simulation.clock import run_virtually
from rollout_pool.simulation.cluster import Cluster
from rollout_pool.simulation.latency import Latency
from rollout_pool.simulation.policies import POLICIES, Work
from rollout_pool.types import RolloutGroup, RolloutRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Row:
    """Times are virtual seconds from the call on, but for the driver's."""

    policy: str
    num_actors: int
    num_pools: int
    num_groups: int
    new_tokens: int
    """Of the groups that were asked for."""
    makespan_s: float
    p95_s: float
    """When 95% of the groups were back, with all their parts."""
    tail_s: float
    """From the first actor that has nothing left to do, to the end."""
    utilisation: float
    """Slots with a live row in a decode step, over all slots until the end."""
    tokens_per_s: float
    mean_length: float
    """Tokens of a sample that was taken: early cuts prefer the short."""
    driver_us_per_group: float
    """CPU microseconds of the pool on this machine, in one process with the engines, without Ray's share."""
    wasted: float
    """Tokens drawn for groups that nobody took, over all."""


def run_policy(name: str, work: Work, latency: Latency, num_actors: int, num_pools: int = 1) -> Row:
    """Simulate one policy in a pool of its own. The same arguments give the same row, but for CPU time."""
    return run_virtually(_measure(name, work, latency, num_actors, num_pools))


class _Pools:
    """Several pools that a call is dealt out to, as :class:`~rollout_pool.pools.RolloutPools` does it."""

    def __init__(self, pools: Sequence[Any], num_actors: Sequence[int]) -> None:
        self._pools, self._num_actors = pools, num_actors

    async def rollout(
        self, prompts: Sequence[RolloutRequest], sampling: SamplingParams | None = None
    ) -> list[RolloutGroup]:
        parts = deal(resolve_requests(prompts, sampling, seed=0), self._num_actors)
        calls = (pool.rollout(part) for pool, part in zip(self._pools, parts, strict=True))
        return [group for groups in await asyncio.gather(*calls) for group in groups]


async def _measure(name: str, work: Work, latency: Latency, num_actors: int, num_pools: int) -> Row:
    cluster = Cluster(latency, work.lengths)
    length = work.prompt_tokens + work.max_new_tokens
    engine = EngineConfig(num_slots=latency.num_slots, max_length=length)
    num_each = sizes(num_actors, num_pools)
    configs = (PoolConfig(model="simulated", num_actors=num, engine=engine) for num in num_each)
    pools = [cluster.start_pool(config) for config in configs]
    await asyncio.gather(*(pool.ready() for pool in pools))
    front: Any = pools[0] if num_pools == 1 else _Pools(pools, num_each)
    loop = asyncio.get_running_loop()
    began, cpu, of_engines = loop.time(), time.thread_time(), cluster.meter.cpu_s
    groups = await POLICIES[name](front, cluster, work)
    cpu = time.thread_time() - cpu - (cluster.meter.cpu_s - of_engines)
    makespan = loop.time() - began
    row = _row(name, cluster, groups, began, makespan, cpu, work)
    await asyncio.gather(*(pool.shutdown() for pool in pools))
    return row


def _row(
    name: str,
    cluster: Cluster,
    groups: Sequence[RolloutGroup],
    began: float,
    makespan: float,
    cpu: float,
    work: Work,
) -> Row:
    assert all(group.error is None for group in groups)
    tokens = sum(sample.token_ids.size for group in groups for sample in group.samples)
    engines = [actor.engine for actor in cluster.actors]
    drawn = sum(engine.tokens_drawn for engine in engines)
    ends: dict[str, float] = {}
    for actor in cluster.actors:
        for identity, end in actor.group_ends.items():  # a group may have come in parts
            ends[identity] = max(end, ends.get(identity, 0.0))
    in_order = sorted(ends.values())[: work.num_groups]
    idle = [engine.idle_since for engine in engines if engine.idle_since is not None]
    slots = len(engines) * cluster.latency.num_slots
    busy = sum(engine.busy_row_seconds for engine in engines)
    return Row(
        policy=name,
        num_actors=len(engines),
        num_pools=cluster.num_pools,
        num_groups=work.num_groups,
        new_tokens=tokens,
        makespan_s=makespan,
        p95_s=in_order[int(0.95 * (len(in_order) - 1))] - began,
        tail_s=began + makespan - min(idle, default=began + makespan),
        utilisation=busy / (slots * makespan),
        tokens_per_s=tokens / makespan,
        mean_length=tokens / (work.num_groups * work.n),
        driver_us_per_group=cpu / work.num_groups * 1e6,
        wasted=1 - tokens / drawn,
    )
