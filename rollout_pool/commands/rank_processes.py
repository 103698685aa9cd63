"""The ranks of a validation as Ray actors: placed, started, called and ended, each wait with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rollout_pool.actors.rank_checks import RankChecks
from rollout_pool.actors.rollout_actor import RankInfo
from rollout_pool.actors.tensor_parallel import RankActors, distance_from_cause, process_environment
from rollout_pool.config import PoolConfig
from rollout_pool.errors import ActorStartError, ConfigError, RolloutPoolError
from rollout_pool.preflight import ActorResources, check_split, plan_actors

AFTERMATH_S = 3.0
"""How long the other ranks are listened to when one has failed: the first to speak need not be the cause."""


class NoAnswerError(RolloutPoolError):
    """A rank let a deadline pass."""


class RankProcesses:
    """The actors of one size. Any failure is a :class:`RolloutPoolError` that names the rank."""

    def __init__(self, handles: Sequence[Any], timeout_s: float) -> None:
        self.places: Sequence[RankInfo] = []
        self._handles = handles
        self._timeout_s = timeout_s

    def load(self) -> None:
        """Have the ranks meet, and load."""
        address = None
        if len(self._handles) > 1:
            (address,) = self._wait([self._handles[0].open.remote()], "open")
        self.call("load", address)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all ranks, which do it at the same time."""
        refs = [getattr(handle, method).remote(*arguments) for handle in self._handles]
        return self._wait(refs, method)

    def call_and_keep(self, method: str, *arguments: Any) -> tuple[list[Any], Callable[[], Any]]:
        """Of pairs: the first parts of all ranks, and how to get rank 0's second part later.

        That stays in Ray's object store, also when the actors are gone.
        """
        pairs = [getattr(h, method).options(num_returns=2).remote(*arguments) for h in self._handles]
        kept = pairs[0][1]

        def fetch() -> Any:
            try:
                return ray.get(kept, timeout=self._timeout_s)
            except RayError as error:
                raise RolloutPoolError(
                    f"{method}: the answer of rank 0 is lost: {_one_line(error)}"
                ) from None

        return self._wait([pair[0] for pair in pairs], method), fetch

    def _wait(self, refs: list[Any], method: str) -> list[Any]:
        deadline = time.monotonic() + self._timeout_s
        waiting = list(refs)
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = [str(rank) for rank, ref in enumerate(refs) if ref in waiting]
                raise NoAnswerError(
                    f"{method}: no answer from rank {', '.join(late)} within {self._timeout_s:g} s"
                )
            if _fault(ready[0]) is not None:
                raise self._cause(refs, method)
        answers: list[Any] = ray.get(refs)
        return answers

    def _cause(self, refs: list[Any], method: str) -> RolloutPoolError:
        """The fault that the others follow from, as far as can be told."""
        ray.wait(refs, num_returns=len(refs), timeout=AFTERMATH_S)
        done = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
        faults = [(rank, fault) for rank, ref in enumerate(refs) if ref in done and (fault := _fault(ref))]
        rank, fault = min(faults, key=lambda found: distance_from_cause(found[1]))
        if isinstance(fault, ConfigError):
            return fault
        return RolloutPoolError(f"{method}: rank {rank} of {len(refs)}: {_one_line(fault)}")


def _fault(ref: Any) -> BaseException | None:
    try:
        ray.get(ref, timeout=0)
    except RayTaskError as error:
        cause = error.cause
        return cause if isinstance(cause, BaseException) else error
    except GetTimeoutError:
        return None
    except RayError as error:
        return error
    return None


@contextmanager
def rank_processes(config: PoolConfig, timeout_s: float) -> Iterator[RankProcesses]:
    """Start one actor per rank of ``config`` and load the model on them; they end with the block.

    Raises UnsupportedModelError or CapacityError before anything starts when the model cannot be split
    or the cluster is too small, and ActorStartError when the cluster had no room within the deadline.
    """
    check_split(config)
    asked = plan_actors(config, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    size = config.tensor_parallel_size
    placement = RankActors(config, f"size {size}", asked.amounts, threads=asked.threads, device=asked.device)
    handles: list[Any] = []
    try:
        for rank, strategy in enumerate(_strategies(placement, size, timeout_s)):
            handles.append(_start(config, rank, asked, strategy, timeout_s))
        ranks = RankProcesses(handles, timeout_s)
        try:
            ranks.places = ranks.call("place")
        except NoAnswerError:
            raise ActorStartError(_no_room(placement, size, timeout_s)) from None
        ranks.load()
        yield ranks
    finally:
        for handle in handles:
            ray.kill(handle)
        placement.kill()


def _strategies(placement: RankActors, size: int, timeout_s: float) -> list[Any]:
    """Where each rank is to run, in the order of ranks."""
    if size == 1:
        return [None]

    async def reserve() -> list[Any]:
        async with asyncio.timeout(timeout_s):
            return [placement.on(bundle.index) for bundle in await placement.reserve()]

    try:
        return asyncio.run(reserve())
    except TimeoutError:
        raise ActorStartError(_no_room(placement, size, timeout_s)) from None


def _start(config: PoolConfig, rank: int, asked: ActorResources, strategy: Any, timeout_s: float) -> Any:
    variables = process_environment(asked.threads, sees_gpus=asked.device != "cpu")
    options = {
        "num_cpus": asked.num_cpus,
        "num_gpus": asked.num_gpus,
        "scheduling_strategy": strategy,
        "runtime_env": {"env_vars": variables},
    }
    how = {"threads": asked.threads, "device": asked.device, "timeout_s": timeout_s}
    return ray.remote(RankChecks).options(**options).remote(config, rank, **how)


def _no_room(placement: RankActors, size: int, timeout_s: float) -> str:
    needs = placement.needs()
    found = f"; they need {needs}" if needs else ""
    return f"the cluster started no {size} processes within {timeout_s:g} s{found}"


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
