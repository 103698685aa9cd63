"""A seeded schedule of failures, played against the real pool while callers use it.

Every caller makes one call after the other with named requests, asks again for what came back with an error
or cut off, and keeps each group once. What must hold is checked while it plays, and :class:`Outcome` tells.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from ray.exceptions import OutOfMemoryError

from rollout_pool.actors.weight_records import Manifest, TensorRecord
from rollout_pool.config import EngineConfig, PoolConfig
from rollout_pool.errors import CapacityError, RolloutPoolError
from rollout_pool.recovery import STATS_TIMEOUT_S
from rollout_pool.simulation.callers import Caller
from rollout_pool.simulation.cluster import Cluster, SimulatedRanks
from rollout_pool.simulation.events import Event
from rollout_pool.simulation.latency import Latency
from rollout_pool.simulation.process import BAD_BUCKET, SimulatedActor
from rollout_pool.simulation.workload import Lengths
from rollout_pool.weight_sync.session import WRITE_TIMEOUT_S, Policy
from rollout_pool.weight_sync.shipment import Shipment

LATENCY = Latency(
    num_slots=4,
    step_s=0.05,
    row_s=0.002,
    prompt_token_s=0.001,
    start_s=0.5,
    stage_s=0.3,
    commit_s=0.05,
)
LENGTHS = Lengths(median=20, sigma_prompt=0.6, sigma_sample=0.6)
SLOW = 10.0
SLOW_FOR_S = 4.0
LATE_S = 1.0
SYNC_TIMEOUT_S = 8.0
JOINING_S = 60.0
"""A new actor waits while syncs are going on, each for its own time at most, and is not watched yet."""
SLACK_S = 0.5
"""What a deadline may be passed by: a heartbeat's interval and a call's way."""


def pool_config(num_actors: int) -> PoolConfig:
    """Of a pool in simulated chaos: deadlines are a few seconds, and any group may go out in parts."""
    return PoolConfig(
        model="simulated",
        num_actors=num_actors,
        engine=EngineConfig(num_slots=LATENCY.num_slots),
        start_timeout_s=4.0,
        step_timeout_s=3.0,
        heartbeat_timeout_s=2.0,
        max_start_failures=20,
        min_part_samples=1,
    )


@dataclass
class Outcome:
    """What a run of chaos came to. ``faults`` must be empty."""

    results: dict[tuple[str, int], tuple[bytes, str]] = field(default_factory=dict)
    """Tokens and finish reason by request and sample."""
    faults: list[str] = field(default_factory=list)
    num_calls: list[int] = field(default_factory=list)
    """Complete ones of each caller."""
    played: Counter[str] = field(default_factory=Counter)
    detected_after_s: list[float] = field(default_factory=list)
    """Seconds from the moment when an actor was stuck or silent until it was killed."""
    stats: Any = None
    ended_by: str | None = None
    """Why the pool took no more calls before the end, if it did."""
    virtual_s: float = 0.0


async def play(
    events: Sequence[Event],
    *,
    num_actors: int = 5,
    num_callers: int = 3,
    num_calls: Sequence[int] = (0, 0, 0),
    ends_by_shutdown: bool = False,
    limit_s: float = 1000.0,
) -> Outcome:
    """Play ``events`` while callers use a pool.

    A caller stops when the last event is over and it has made ``num_calls`` calls, in the middle of none.
    """
    stage = _Stage(num_actors)
    outcome = stage.outcome
    try:
        async with asyncio.timeout(limit_s):
            await stage.pool.ready()
            callers = [
                Caller(stage.pool, str(number), num_calls[number], outcome.faults)
                for number in range(num_callers)
            ]
            running = [asyncio.ensure_future(caller.run()) for caller in callers]
            for event in events:
                await asyncio.sleep(event.after_s)
                outcome.played[event.kind] += 1
                stage.happen(event, callers)
                stage.audit()
            if ends_by_shutdown:
                await stage.pool.shutdown()
            for caller in callers:
                caller.is_ending = True
            await asyncio.gather(*running)
    except TimeoutError:
        outcome.faults.append(f"not over within {limit_s:g} s")
    outcome.stats = await stage.pool.stats()
    if outcome.stats.in_flight:
        outcome.faults.append(f"{outcome.stats.in_flight} groups are in flight and nobody waits for them")
    await stage.pool.shutdown()
    await stage.settle()
    if stage.cluster.alive:
        outcome.faults.append(f"{sorted(stage.cluster.alive)} outlived the pool")
    for caller in callers:
        outcome.results.update(caller.results)
        outcome.num_calls.append(caller.num_complete)
        outcome.ended_by = str(caller.ended_by) if caller.ended_by is not None else outcome.ended_by
    outcome.virtual_s = asyncio.get_running_loop().time()
    return outcome


class _Stage:
    """A pool, its cluster, and what can happen to them."""

    def __init__(self, num_actors: int) -> None:
        self.outcome = Outcome()
        self.cluster = Cluster(LATENCY, LENGTHS, start_fault=self._start_fault)
        self._config = pool_config(num_actors)
        self.pool = self.cluster.start_pool(self._config)
        self._loop = asyncio.get_running_loop()
        self._checks: list[asyncio.Task[None]] = []
        self._bad_starts: list[str] = []
        self._num_syncs = 0

    def happen(self, event: Event, callers: Sequence[Caller]) -> None:
        """Let one event happen to whatever it picks."""
        alive = [ranks for ranks in self.cluster.alive.values() if ranks.is_loaded]
        if event.kind.startswith("start"):
            self._bad_starts.append(event.kind.removeprefix("start "))
        elif event.kind.startswith("sync"):
            self._checks.append(asyncio.ensure_future(self._sync(event, alive)))
        elif event.kind == "cancel":
            callers[event.pick % len(callers)].cancel()
        elif alive:
            self._strike(event, alive)

    def audit(self) -> None:
        """Have the account checked, now; the answer comes when the actors have given theirs."""
        self._checks.append(asyncio.ensure_future(self._audit()))

    async def settle(self) -> None:
        """Wait for all checks."""
        await asyncio.gather(*self._checks)

    def _strike(self, event: Event, alive: Sequence[SimulatedRanks]) -> None:
        victim = alive[event.pick % len(alive)]
        actor: SimulatedActor = victim.leader
        match event.kind:
            case "kill":
                actor.die()
            case "node":
                for ranks in alive[event.pick % 2 :: 2]:
                    ranks.leader.die()
            case "wedge":
                actor.engine.stop()
                self._checks.append(asyncio.ensure_future(self._is_noticed(victim, "stuck")))
            case "silence":
                actor.is_silent = True
                self._checks.append(asyncio.ensure_future(self._is_noticed(victim, "silent")))
            case "slow":
                actor.engine.slow_down(SLOW)
                self._loop.call_later(SLOW_FOR_S, actor.engine.slow_down, 1.0)
            case "late":
                actor.faults["progress"].append(LATE_S)
            case "out of memory":
                actor.faults["run"].append(CapacityError("out of memory, as planned"))
            case "killed for memory":
                actor.faults["run"].append(OutOfMemoryError("killed by the memory monitor, as planned"))

    async def _is_noticed(self, ranks: SimulatedRanks, what: str) -> None:
        """Whoever is stuck or silent is killed within the deadline for it."""
        actor, since = ranks.leader, self._loop.time()
        limit = self._config.heartbeat_timeout_s
        if what == "stuck":  # which shows only when it has something to do
            limit += self._config.step_timeout_s  # the answer that tells may be late itself
            while actor.engine.stuck_at is None and not actor.is_dead:
                await asyncio.sleep(0.5)
            since = self._loop.time() if actor.engine.stuck_at is None else actor.engine.stuck_at
        if not actor.is_watched:
            limit = JOINING_S
        try:
            async with asyncio.timeout_at(since + limit + SLACK_S):
                await ranks.is_killed.wait()
        except TimeoutError:
            self.outcome.faults.append(f"{ranks.name} was {what} since {since:.1f} s and not ended")
        if actor.is_watched:
            self.outcome.detected_after_s.append(self._loop.time() - since)

    async def _sync(self, event: Event, alive: Sequence[SimulatedRanks]) -> None:
        """One weight sync; it comes to an end in time, by receipts of one version or a reason."""
        self._num_syncs += 1
        policies: tuple[Policy, ...] = get_args(Policy)
        buckets = ["some weights"]
        victim = alive[event.pick % len(alive)].leader if alive else None
        match event.kind:
            case "sync of wrong weights":
                buckets.append(BAD_BUCKET)
            case "sync that is late" if victim is not None:
                victim.faults["stage_weights"].append(2 * SYNC_TIMEOUT_S)
            case "sync that is not written" if victim is not None:
                victim.faults["commit_weights"].append(CapacityError("out of memory, as planned"))
        record = TensorRecord("weight", (1,), "float32", f"{self._num_syncs:016x}")
        shipment = Shipment(Manifest((record,)), tuple(buckets))
        began = self._loop.time()
        before = (await self.pool.stats()).weight_version
        policy = policies[event.pick % len(policies)]
        with contextlib.suppress(RolloutPoolError):
            receipts = await self.pool.sync_weights(shipment, policy=policy, timeout_s=SYNC_TIMEOUT_S)
            if len({receipt.version for receipt in receipts}) != 1 or receipts[0].version <= before:
                self.outcome.faults.append(f"a sync above {before} gave {receipts}")
            if BAD_BUCKET in buckets:
                self.outcome.faults.append("wrong weights were taken")
        if self._loop.time() > began + SYNC_TIMEOUT_S + WRITE_TIMEOUT_S + STATS_TIMEOUT_S + SLACK_S:
            self.outcome.faults.append(f"a sync took {self._loop.time() - began:.1f} s")

    def _start_fault(self) -> Any:
        return self._bad_starts.pop(0) if self._bad_starts else None

    async def _audit(self) -> None:
        began = self._loop.time()
        stats = await self.pool.stats()
        accounted = stats.returned + stats.failed + stats.cancelled + stats.in_flight
        if stats.submitted != accounted:
            self.outcome.faults.append(f"{stats.submitted} groups in, {accounted} accounted for")
        if self._loop.time() > began + STATS_TIMEOUT_S + SLACK_S:
            self.outcome.faults.append("stats took too long")
