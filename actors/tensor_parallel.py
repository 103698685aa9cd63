"""The Ray actors of one engine, which start, answer and end as one.

Without tensor parallelism that is one rollout actor. With it there is one actor per rank, on the
bundles of one placement group: the first rank is the rollout actor with the engine, the others
follow it. No rank is of use without the others, so whatever ends one of them ends them all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout_pool.actors.follower_actor import FollowerActor
from rollout_pool.actors.node_process import NodeProcess
from rollout_pool.actors.placement import Bundle, Placement
from rollout_pool.actors.progress import Progress
from rollout_pool.actors.rollout_actor import ActorInfo, RankInfo, RolloutActor
from rollout_pool.config import PoolConfig
from rollout_pool.errors import ConfigError
from rollout_pool.logs import log_variables
from rollout_pool.threads import WAITING

logger = logging.getLogger(__name__)

AFTERMATH_S = 2.0
"""What a rank that lost another says comes sooner than that the other died; how long that is waited for."""
MORE_CALLS = 10_000
"""That one rank answers at once, besides those that bring groups: each bucket of new weights is one, and a
question whether the rank still gets on must not wait behind them."""


class RankActors:
    """The Ray actors of the engine called ``name``; ``amounts`` is what each asks of Ray.

    :meth:`start` has no deadline: its caller has, and looks at ``stage`` when it is over.
    """

    def __init__(
        self, config: PoolConfig, name: str, amounts: Mapping[str, float], *, threads: int, device: str
    ) -> None:
        self.stage: Literal["placement", "processes", "loading"] = "placement"
        self._config = config
        self._name = name
        self._amounts = dict(amounts)
        self._threads = threads
        self._device = device
        self._size = config.tensor_parallel_size
        self._placement = Placement(name, self._size, amounts, config.tensor_parallel_placement)
        self._handles: list[Any] = []
        self._places: list[RankInfo] = []
        self._processes: list[NodeProcess] = []

    @property
    def leader(self) -> Any:
        """The Ray handle of the :class:`RolloutActor`, which is rank 0."""
        return self._handles[0]

    @property
    def handles(self) -> tuple[Any, ...]:
        """The Ray handles of all ranks, the leader's first."""
        return tuple(self._handles)

    async def start(self) -> ActorInfo:
        """Find room, start all processes, and wait until the engine is loaded on all of them.

        Raises what kept one from it, as RayError or as the rank's own error.
        """
        strategies: list[Any] = [None]
        if self._size > 1:
            strategies = [self.on(bundle.index) for bundle in await self.reserve()]
        self.stage = "processes"
        for rank, strategy in enumerate(strategies):
            self._handles.append(self._create(rank, strategy))
        self._places = await asyncio.gather(*(handle.place.remote() for handle in self._handles))
        self._processes = await asyncio.gather(*(h.__ray_call__.remote(_process) for h in self._handles))
        self.stage = "loading"
        info = await self._load()
        return dataclasses.replace(info, ranks=tuple(self._places))

    async def progress(self) -> Progress:
        """How far the engine has come; it waits for every rank in every step.

        Raises RayError, with a note which one, when any rank is lost, and waits for one that gives no answer.
        """
        calls = [self.leader.progress.remote(), *(handle.ping.remote() for handle in self._handles[1:])]
        progress: Progress
        progress, *_ = await asyncio.gather(*map(self._answer, range(self._size), calls))
        return progress

    def kill(self) -> None:
        """End all processes at once, whatever state they are in, and give their resources back."""
        for handle in self._handles:
            ray.kill(handle)
        self._placement.remove()
        for process in self._processes:
            process.end()

    def needs(self) -> str:
        """What all ranks ask of the cluster, and what of it is there and free."""
        total, free = ray.cluster_resources(), ray.available_resources()
        asked = {name: amount * self._size for name, amount in self._amounts.items()}
        return " and ".join(
            f"{amount:g} {name} of which {free.get(name, 0):g} of {total.get(name, 0):g} are free"
            for name, amount in asked.items()
        )

    async def reserve(self) -> list[Bundle]:
        """Wait for a bundle per rank; returns them in the order of ranks."""
        return await self._placement.reserve()

    def on(self, index: int) -> PlacementGroupSchedulingStrategy:
        """How Ray is told to start something on a reserved bundle."""
        return self._placement.on(index)

    def _create(self, rank: int, strategy: Any | None) -> Any:
        is_on_cores = self._size > 1 and self._device == "cpu"
        options = {
            "num_cpus": self._amounts.get("CPU", 0),
            "num_gpus": self._amounts.get("GPU", 0),
            "max_concurrency": 4 * self._config.engine.num_slots + MORE_CALLS,
            "scheduling_strategy": strategy,
            "runtime_env": {
                "env_vars": process_environment(self._threads, sees_gpus=not is_on_cores) | log_variables()
            },
        }
        how = {"threads": self._threads, "device": self._device}
        if rank > 0:
            return ray.remote(FollowerActor).options(**options).remote(self._config, self._name, rank, **how)
        transports = self._config.weight_transport != "object_store"
        # Left out where it is not needed: it starts threads of its own in an actor.
        extra: dict[str, Any] = {"enable_tensor_transport": True} if transports else {"num_cpus": 0}
        leader = ray.remote(**extra)(RolloutActor).options(**options)
        return leader.remote(self._config, self._name, **how)

    async def _answer(self, rank: int, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except RayError as error:
            if self._size > 1:
                place = self._places[rank]
                error.add_note(f"rank {rank} (process {place.pid} on {place.host})")
            raise

    async def _load(self) -> ActorInfo:
        """The ranks meet and load in lockstep. The first that fails ends it: the others wait for it."""
        leader, *followers = self._handles
        if followers:
            address = await leader.address.remote()
            await asyncio.gather(*(follower.join.remote(address) for follower in followers))
        loads = [asyncio.ensure_future(handle.ready.remote()) for handle in self._handles]
        try:
            await asyncio.wait(loads, return_when=asyncio.FIRST_EXCEPTION)
            if min(map(distance_from_cause, faults := _faults(loads)), default=0) > 1:
                await asyncio.wait(loads, timeout=AFTERMATH_S)
                faults = _faults(loads)
            if faults:
                raise min(faults, key=distance_from_cause)
            info: ActorInfo = loads[0].result()
            return info
        finally:
            for load in loads:
                load.cancel()


def process_environment(threads: int, *, sees_gpus: bool) -> dict[str, str]:
    """The variables of a rank's process, which must be there before torch is imported.

    Otherwise Ray sets its own number of threads, and a fraction of a core counts as 1; and threads that wait
    by spinning for long take the cores from each other on a busy machine (``docs/performance.md``). A rank on
    cores must not see a GPU: Transformers shards onto whatever accelerator a process sees.
    """
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        **WAITING,
    }
    return variables if sees_gpus else {**variables, "CUDA_VISIBLE_DEVICES": ""}


def _faults(loads: Iterable[asyncio.Future[Any]]) -> list[BaseException]:
    return [fault for load in loads if load.done() and (fault := load.exception()) is not None]


def distance_from_cause(fault: BaseException) -> int:
    """A refusal says why, a death is a cause, and a rank that lost another speaks of that one's fault."""
    cause = fault.cause if isinstance(fault, RayTaskError) else fault
    if isinstance(cause, ConfigError):
        return 0
    if isinstance(cause, RayActorError):
        return 1
    return 3 if type(cause).__name__ == "RankLostError" else 2


def _process(_: Any) -> NodeProcess:
    """Runs in the process of a rank."""
    return NodeProcess.here()
