"""A Ray actor that pretends: it answers calls late, wrongly or not at all, and dies."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from rollout_pool.actors.progress import Progress
from rollout_pool.actors.weight_records import Manifest, WeightReceipt
from rollout_pool.errors import WeightSyncError
from rollout_pool.simulation.engine import SimulatedEngine
from rollout_pool.simulation.latency import Latency
from rollout_pool.simulation.meter import Meter
from rollout_pool.simulation.workload import Lengths
from rollout_pool.types import EngineStats, ResolvedRequest, RolloutGroup

BAD_BUCKET = "weights that fit no model"


class SimulatedActor:
    """A Ray handle and the :class:`~rollout_pool.actors.rollout_actor.RolloutActor` behind it.

    ``handle.name.remote(...)`` returns a future. Calls arrive in the order in which they were made.
    """

    def __init__(self, name: str, latency: Latency, lengths: Lengths, meter: Meter) -> None:
        self.name = name
        self.engine = SimulatedEngine(latency, lengths)
        self.is_dead = False
        self.is_silent = False
        """It answers nothing any more."""
        self.is_watched = False
        """Whether it was ever asked for its progress: it is a member of the pool then."""
        self.faults: defaultdict[str, deque[Exception | float]] = defaultdict(deque)
        """What comes next of calls of a name: an error, or an answer that is late by so many seconds."""
        self.group_ends: dict[str, float] = {}
        """When the groups were over, or their parts here, by identity."""
        self._latency, self._meter = latency, meter
        self._loop = asyncio.get_running_loop()
        self._calls: deque[tuple[asyncio.Future[Any], str, tuple[Any, ...]]] = deque()
        self._open: dict[asyncio.Future[Any], None] = {}  # not a set: its order is that of the calls
        self._staged: dict[int, list[Any]] = {}
        self._given_up = 0
        self._checked: tuple[int, Manifest] | None = None

    def __getattr__(self, name: str) -> _Method:
        if name not in CALLS:
            raise AttributeError(name)
        return _Method(self, name)

    def call(self, name: str, arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        with self._meter:
            answer: asyncio.Future[Any] = self._loop.create_future()
            answer.add_done_callback(_is_seen)
            if self.is_dead:
                self._loop.call_soon(_fail, answer, _death(self.name))
                return answer
            self._open[answer] = None
            answer.add_done_callback(self._open.pop)
            self._calls.append((answer, name, arguments))
            self._loop.call_later(self._latency.call_s, self._take_call)
            return answer

    def die(self) -> None:
        """Every call that is open, or comes later, fails."""
        if self.is_dead:
            return
        self.is_dead = True
        self.engine.stop()
        for answer in tuple(self._open):
            _fail(answer, _death(self.name))

    def _take_call(self) -> None:
        if self.is_dead or self.is_silent:
            return
        with self._meter:
            answer, name, arguments = self._calls.popleft()
            faults = self.faults.get(name)
            fault = faults.popleft() if faults else None
            carry_out = partial(self._carry_out, answer, name, arguments)
            if isinstance(fault, Exception):
                _fail(answer, _of_task(name, fault))
                if name == "commit_weights":  # half written weights are of no use
                    self.die()
            elif fault is not None:
                self._loop.call_later(fault, carry_out)
            else:
                carry_out()

    def _carry_out(self, answer: asyncio.Future[Any], name: str, arguments: tuple[Any, ...]) -> None:
        if self.is_dead or self.is_silent:
            return
        try:
            CALLS[name](self, partial(_answer, answer), *arguments)
        except WeightSyncError as error:
            _fail(answer, _of_task(name, error))

    def _run(self, reply: Callable[[Any], None], request: ResolvedRequest) -> None:
        def sign(group: RolloutGroup) -> None:
            self.group_ends[request.identity] = self._loop.time()
            reply(group.replace(timing=dataclasses.replace(group.timing, actor=self.name)))

        self.engine.submit(request, sign)

    def _abort(self, reply: Callable[[Any], None], request_id: str | int) -> None:
        self.engine.abort(request_id)
        reply(None)

    def _stats(self, reply: Callable[[EngineStats], None]) -> None:
        reply(self.engine.stats())

    def _progress(self, reply: Callable[[Progress], None]) -> None:
        self.is_watched = True
        reply(self.engine.progress())

    def _stage_weights(self, reply: Callable[[Any], None], version: int, bucket: Any, attempt: int) -> None:
        if attempt > self._given_up:
            self._staged.setdefault(version, []).append(bucket)
        self._loop.call_later(self._latency.stage_s, reply, None)

    def _check_weights(
        self, reply: Callable[[Any], None], version: int, manifest: Manifest, attempt: int
    ) -> None:
        staged = self._staged.get(version, [])
        if BAD_BUCKET in staged:
            raise WeightSyncError("layers.0.weight: has shape [1], the model's has [2]")
        if not staged:
            raise WeightSyncError(f"nothing of version {version} has arrived")
        self._checked = version, manifest
        reply(None)

    def _commit_weights(self, reply: Callable[[Any], None], version: int, kv: str) -> None:
        if self._checked is None or self._checked[0] != version:
            raise WeightSyncError(f"version {version} was not checked")
        manifest = self._checked[1]
        latency = self._latency
        receipt = WeightReceipt(
            version=version,
            num_tensors=len(manifest.tensors),
            num_bytes=manifest.nbytes,
            checksum=manifest.checksum,
            weights_checksum=manifest.checksum,
            stage_s=latency.stage_s,
            commit_s=latency.commit_s,
        )
        self.engine.commit(version, partial(reply, receipt))

    def _discard_weights(self, reply: Callable[[Any], None], attempt: int) -> None:
        self._given_up = max(self._given_up, attempt)
        self._staged.clear()
        reply(None)


CALLS: dict[str, Callable[..., None]] = {
    "run": SimulatedActor._run,
    "abort": SimulatedActor._abort,
    "stats": SimulatedActor._stats,
    "progress": SimulatedActor._progress,
    "stage_weights": SimulatedActor._stage_weights,
    "check_weights": SimulatedActor._check_weights,
    "commit_weights": SimulatedActor._commit_weights,
    "discard_weights": SimulatedActor._discard_weights,
}
"""What a pool calls."""


class _Method:
    """``handle.name``, of which only ``remote`` is used."""

    __slots__ = ("_actor", "_name")

    def __init__(self, actor: SimulatedActor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        return self._actor.call(self._name, arguments)


def _answer(answer: asyncio.Future[Any], value: Any) -> None:
    if not answer.done():
        answer.set_result(value)


def _fail(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


def _is_seen(answer: asyncio.Future[Any]) -> None:
    """As a Ray reference, one that nobody looks at is no reason for a warning."""
    if not answer.cancelled():
        answer.exception()


def _death(name: str) -> RayActorError:
    return RayActorError(error_msg=f"The actor is dead because {name} was ended, as planned")


def _of_task(name: str, error: Exception) -> Exception:
    """As Ray raises what a call raised; its own errors come as they are."""
    if isinstance(error, RayError):
        return error
    raised: Exception = RayTaskError(name, "", error).as_instanceof_cause()
    return raised
