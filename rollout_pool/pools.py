"""Several pools behind one call, for more actors than one pool's process can serve.

Groups are dealt out before they run, so none moves from one pool to another. Samples depend on their request
alone, so they are those that a single pool would give. See docs/scale.md for when that is worth it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ray

from rollout_pool.actors.rollout_actor import ActorInfo
from rollout_pool.actors.weight_records import WeightReceipt
from rollout_pool.config import PoolConfig
from rollout_pool.errors import ConfigError, RolloutPoolError, WeightSyncError
from rollout_pool.launch import start_pool
from rollout_pool.ray_errors import cause_of, one_line
from rollout_pool.requests import call_seed, resolve_requests
from rollout_pool.types import (
    PoolStats,
    Prompt,
    ResolvedRequest,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
)
from rollout_pool.weight_sync import Shipment, ship
from rollout_pool.weight_sync.rank_calls import Kv
from rollout_pool.weight_sync.session import Policy


class RolloutPools:
    """``num_pools`` pools that share the actors of one configuration. Lives in the driver, and blocks.

    ::

        pools = RolloutPools(PoolConfig(model="...", num_actors=2048), num_pools=4)
        groups = pools.rollout(prompts, SamplingParams(n=8))

    ``handles`` are the pools themselves. Raises what ``RolloutPool.remote`` raises.
    """

    def __init__(self, config: PoolConfig, num_pools: int) -> None:
        if isinstance(num_pools, bool) or not isinstance(num_pools, int):
            raise ConfigError(f"num_pools: must be an integer, got {num_pools!r}")
        if not 1 <= num_pools <= config.num_actors:
            raise ConfigError(
                f"num_pools: must be from 1 to num_actors ({config.num_actors}), got {num_pools}"
            )
        self._seed = config.seed
        self._calls = itertools.count()
        self._version = 0
        self._mixed: str | None = None
        self._sizes = sizes(config.num_actors, num_pools)
        parts = [config.model_copy(update={"num_actors": size}) for size in self._sizes]
        self.handles: tuple[Any, ...] = tuple(start_pool(part, {}, planned_as=config) for part in parts)

    def ready(self) -> list[list[ActorInfo]]:
        """Wait until all actors have loaded the model; by pool."""
        return list(_get([pool.ready.remote() for pool in self.handles]))

    def rollout(
        self, prompts: Iterable[Prompt | RolloutRequest], sampling: SamplingParams | None = None
    ) -> list[RolloutGroup]:
        """One group per prompt, in input order: what one pool with the same configuration would return."""
        calls = [pool.rollout.remote(part) for pool, part in self._dealt(prompts, sampling)]
        return sorted((group for groups in _get(calls) for group in groups), key=lambda group: group.index)

    def stream(
        self, prompts: Iterable[Prompt | RolloutRequest], sampling: SamplingParams | None = None
    ) -> Iterator[RolloutGroup]:
        """The same, each group when it finishes; ``index`` is its place."""
        streams: list[Any] = [pool.stream.remote(part) for pool, part in self._dealt(prompts, sampling)]
        try:
            while streams:
                stream: Any = ray.wait(streams, num_returns=1)[0][0]
                try:
                    reference = next(stream)
                except StopIteration:
                    streams.remove(stream)
                else:
                    yield _get([reference])[0]
        finally:
            for stream in streams:
                ray.cancel(stream)

    def sync_weights(
        self, source: Any, *, policy: Policy = "drain", kv: Kv = "recompute", timeout_s: float = 600.0
    ) -> list[WeightReceipt]:
        """Bring every actor of every pool to new weights; see ``pool.sync_weights``.

        source: a :class:`~rollout_pool.weight_sync.Shipment`, or what ``ship`` makes one of. Each pool takes
        an update whole or not at all. When some did and others did not, :class:`WeightSyncError` says so,
        and nothing is rolled out until a sync has reached all.
        """
        shipment = source if isinstance(source, Shipment) else ship(source)
        self._version += 1
        options = {"policy": policy, "kv": kv, "timeout_s": timeout_s}
        calls = [pool.sync_weights.remote(shipment, self._version, **options) for pool in self.handles]
        receipts, faults = [], []
        for number, call in enumerate(calls):
            try:
                receipts += _get([call])[0]
            except RolloutPoolError as error:
                faults.append((number, error))
        self._mixed = None
        if faults:
            if receipts or len({str(error) for _, error in faults}) > 1:
                told = "; ".join(f"pool {number}: {error}" for number, error in faults)
                self._mixed = f"not all pools have the weights of version {self._version}: {told}; sync again"
                raise WeightSyncError(self._mixed)
            raise faults[0][1]
        return list(receipts)

    def stats(self) -> list[PoolStats]:
        """Of each pool."""
        return list(_get([pool.stats.remote() for pool in self.handles]))

    def shutdown(self) -> None:
        """End all actors."""
        _get([pool.shutdown.remote() for pool in self.handles])

    def _dealt(
        self, prompts: Iterable[Prompt | RolloutRequest], sampling: SamplingParams | None
    ) -> Iterator[tuple[Any, list[ResolvedRequest]]]:
        if self._mixed is not None:
            raise WeightSyncError(self._mixed)
        requests = resolve_requests(prompts, sampling, seed=call_seed(self._seed, next(self._calls)))
        dealt = deal(requests, self._sizes)
        return ((pool, part) for pool, part in zip(self.handles, dealt, strict=True) if part)


def sizes(num_actors: int, num_pools: int) -> list[int]:
    """How many actors each pool has: as equal as can be."""
    return [(num_actors + number) // num_pools for number in range(num_pools)]


def deal(requests: Sequence[ResolvedRequest], num_actors: Sequence[int]) -> list[list[ResolvedRequest]]:
    """Requests for pools with so many actors each: longest expected first, to whoever has least per actor.

    Within a pool they keep their order, which counts among equal ones.
    """
    parts: list[list[ResolvedRequest]] = [[] for _ in num_actors]
    given = [(0.0, number) for number in range(len(num_actors))]
    for request in sorted(requests, key=lambda one: -one.sampling.n * one.sampling.max_new_tokens):
        tokens, number = heapq.heappop(given)
        parts[number].append(request)
        tokens += request.sampling.n * request.sampling.max_new_tokens / num_actors[number]
        heapq.heappush(given, (tokens, number))
    return parts


def _get(calls: list[Any]) -> list[Any]:
    """Their results; the errors of a pool as they are. What is left of the others is cancelled."""
    try:
        return list(ray.get(calls))
    except BaseException as error:
        for call in calls:
            ray.cancel(call)
        cause = cause_of(error)
        if isinstance(cause, RolloutPoolError):
            raise cause from None
        if isinstance(error, ray.exceptions.RayActorError):
            raise RolloutPoolError(f"a pool was lost: {one_line(error)}") from None
        raise
