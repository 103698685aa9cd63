"""The pool: a Ray actor that holds the queue and hands groups to rollout actors.

A driver starts one by :class:`rollout_pool.launch.RolloutPool`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

from rollout_pool.account import pool_stats
from rollout_pool.actors.placement import release_own
from rollout_pool.actors.rollout_actor import ActorInfo
from rollout_pool.actors.tensor_parallel import RankActors
from rollout_pool.actors.weight_records import WeightReceipt
from rollout_pool.background import TaskSet
from rollout_pool.callers import Caller, Callers, by_caller, named_by_caller, stream_by_caller
from rollout_pool.calls import Call, Calls
from rollout_pool.config import PoolConfig
from rollout_pool.dispatch import Dispatcher
from rollout_pool.errors import PoolClosedError, RequestError, RolloutPoolError
from rollout_pool.ledger import Ledger
from rollout_pool.live.monitor import Monitor
from rollout_pool.live.snapshot import PoolSnapshot
from rollout_pool.pool_memory import PoolMemory, one_more_start
from rollout_pool.preflight import ActorResources
from rollout_pool.ray_errors import one_line
from rollout_pool.recovery import Crew, NewRanks
from rollout_pool.requests import call_seed, resolve_requests
from rollout_pool.terms import Rest, Terms, Unit
from rollout_pool.types import PoolStats, Prompt, RolloutGroup, RolloutRequest, SamplingParams
from rollout_pool.weight_sync.rank_calls import Kv
from rollout_pool.weight_sync.session import Policy, WeightSync

logger = logging.getLogger(__name__)

MEMORY_TIMEOUT_S = 10.0
CLOSED = "the pool was shut down"


def _rank_actors(config: PoolConfig, asked: ActorResources, name: str) -> RankActors:
    return RankActors(config, name, asked.amounts, threads=asked.threads, device=asked.device)


class PoolActor:
    """The queue, its callers and its actors. Every method is called through Ray, by many at once.

    new_ranks: makes the processes of an engine; by default Ray actors with ``resources`` each. memory: of
    earlier processes of this pool. is_detached: whether it outlives its driver.
    """

    def __init__(
        self,
        config: PoolConfig,
        resources: ActorResources,
        new_ranks: NewRanks | None = None,
        *,
        memory: PoolMemory | None = None,
        is_detached: bool = False,
    ) -> None:
        self._config = config
        self._memory = memory
        past = one_more_start(memory)
        self._ledger = Ledger(config.max_replays)
        self._fault: RolloutPoolError | None = None
        self._tasks = TaskSet(on_error=self._on_background_error)
        self._crew = Crew(
            config,
            new_ranks or partial(_rank_actors, config, resources),
            self._tasks,
            on_room=lambda member: self._dispatcher.offer(member),
            on_exhausted=self._stop,
            joining=lambda *arguments: self._sync.joining(*arguments),
        )
        members, lose = self._crew.members, self._crew.lose
        self._dispatcher = Dispatcher(
            self._ledger, self._tasks, members, lose, self._present_version, config.min_part_samples
        )
        self._calls = Calls(config, self._dispatcher, self._ledger, self._present_version, past.first_call)
        self._callers = Callers(self._tasks)
        self._sync = WeightSync(
            members,
            self._tasks,
            lose,
            self._dispatcher.stopped,
            config.weight_transport,
            keeps_copies=is_detached,
            past=past,
            remember=memory.write if memory is not None else None,
        )
        self._syncing: set[asyncio.Task[Any]] = set()
        self._count = partial(pool_stats, self._ledger, self._dispatcher, self._crew, self._sync)
        self._monitor = Monitor(config, self._crew, self._count)
        self._started = asyncio.Event()
        self._tasks.start(self._start())
        self._tasks.start(self._monitor.run())

    async def ready(self) -> list[ActorInfo]:
        """Wait until all actors have loaded the model.

        Raises what kept one from it: :class:`ConfigError` and its kinds, or
        :class:`ActorStartError` at the latest after ``start_timeout_s``.
        """
        await self._started.wait()
        self._raise_fault()
        return sorted((member.info for member in self._crew.members.values()), key=lambda info: info.name)

    @by_caller
    async def rollout(
        self,
        prompts: Iterable[Prompt | RolloutRequest],
        sampling: SamplingParams | None = None,
        *,
        take: int | None = None,
        unit: Unit = "groups",
        rest: Rest = "cancel",
        max_staleness: int | None = None,
        call_id: str | None = None,
        caller: Caller | None = None,
    ) -> list[RolloutGroup]:
        """Run every prompt and return one group per prompt, in input order, whatever happens.

        Args:
            take: stop when so many groups, or groups with so many samples (``unit``), have finished without
                error; by default none is stopped. The others have the ``error`` "cancelled".
            rest: what becomes of those. ``cancel``: they have no samples. ``partial``: they have what there
                is, ``finish_reason`` "aborted" where it was cut off, for ``RolloutRequest(resume=...)``.
            max_staleness: over that of the configuration. A group with a token of weights that are more
                versions older than those at the end of the call is drawn anew.
            call_id: a name for this call, for :meth:`cancel`. Calls with one name share one turn.
            caller: who calls; given by Ray's handle.

        A prompt that cannot be served has a group with ``error`` and no samples. Raises
        :class:`RequestError` only when an argument as a whole is not what it should be, and
        :class:`QueueFullError`. ``ray.cancel`` on the call cancels its groups; so does a caller's end.
        """
        if caller is not None and caller.note:
            await self._callers.hear(caller)
            return []
        await self._callers.in_turn(caller)
        call = self._open(Terms(take, unit, rest, max_staleness, call_id), caller, is_stream=False)
        try:
            await self._submit(call, prompts, sampling)
            return await call.all()
        finally:
            self._close(call, caller)

    @stream_by_caller
    async def stream(
        self,
        prompts: Iterable[Prompt | RolloutRequest],
        sampling: SamplingParams | None = None,
        *,
        take: int | None = None,
        unit: Unit = "groups",
        rest: Rest = "cancel",
        max_staleness: int | None = None,
        call_id: str | None = None,
        caller: Caller | None = None,
    ) -> AsyncIterator[RolloutGroup]:
        """Like :meth:`rollout`, but yields each group when it finishes; ``index`` is its place.

        After ``take`` no more groups come, or with ``rest="partial"`` what there is of each. How old tokens
        may be is judged when a group is yielded. When the caller is slow, no more than ``stream_window``
        finished groups wait (see docs/streaming.md). What remains is cancelled by ``ray.cancel`` on the
        generator, by dropping it, and when the caller ends.
        """
        if caller is not None and caller.note:
            await self._callers.hear(caller)
            return
        await self._callers.in_turn(caller)
        call = self._open(Terms(take, unit, rest, max_staleness, call_id), caller, is_stream=True)
        try:
            await self._submit(call, prompts, sampling)
            async for group in call.groups():
                yield group
        finally:
            self._close(call, caller)

    @named_by_caller
    async def cancel(
        self,
        request_id: str | int | None = None,
        *,
        call_id: str | None = None,
        everyone: bool = False,
        caller: Caller | None = None,
    ) -> int:
        """Cancel the unfinished groups whose callers named them ``request_id``, or of the call ``call_id``.

        They return to their callers with the ``error`` "cancelled" and the samples there are. Ids may repeat:
        all such groups of this process's calls are meant; with ``everyone``, of all callers' calls. Groups
        without an id of their own are only found by their call. Returns how many were cancelled; while the
        pool starts, it waits.
        """
        if request_id is None and call_id is None:
            raise RequestError("cancel needs a request_id, a call_id, or both")
        await self._callers.in_turn(caller)
        await self._started.wait()  # as the calls before it do, which then go on first
        process = "" if caller is None else caller.process
        return self._calls.cancel(request_id, call_id, None if everyone else process)

    async def sync_weights(
        self,
        source: Any,
        version: int | None = None,
        *,
        policy: Policy = "drain",
        kv: Kv = "recompute",
        timeout_s: float = 600.0,
    ) -> list[WeightReceipt]:
        """Bring every rank of every actor to new weights, or none; returns a receipt per rank.

        Args:
            source: a :class:`~rollout_pool.weight_sync.Shipment`, which ``ship`` makes of a model, a
                DeepSpeed engine, a state dict or a checkpoint; or the handle of a trainer that is a
                :class:`~rollout_pool.weight_sync.WeightSource`, or the handles of all its ranks; or a
                checkpoint's path or a state dict, which the pool then ships itself.
            version: above the present one; by default the next.
            policy: what becomes of groups that an actor has. ``drain``: they finish first. ``abort``:
                they come back with what they have, ``finish_reason`` "aborted", to be resumed; those
                without a token start anew. ``in_flight``: they go on with the new weights from one
                token to the next.
            kv: under ``in_flight``, whether KV of the old weights is computed again or kept.
            timeout_s: until the weights are everywhere, checked, and the actors ready to write them.

        Raises :class:`WeightSyncError` when the update is not above the present version, incomplete, or
        does not fit; it names the tensors, and the present weights go on. Syncs run one after the other.
        """
        await self._started.wait()
        self._raise_fault()
        syncing = asyncio.current_task()
        assert syncing is not None
        self._syncing.add(syncing)
        try:
            return await self._sync.run(source, version, policy, kv, timeout_s)
        except asyncio.CancelledError:
            self._raise_fault()  # by the pool, which ended, if not by the caller
            raise
        finally:
            self._syncing.discard(syncing)

    async def num_actors(self) -> int:
        """How many actors are up and serve."""
        return len(self._crew.members)

    async def stats(self) -> PoolStats:
        """Groups in and out, and the counters of each actor. Answers also after :meth:`shutdown`."""
        return self._count(await self._crew.stats())

    async def snapshot(self) -> PoolSnapshot:
        """The same with rates, places and the last warnings: what ``rollout-pool top`` shows."""
        return await self._monitor.snapshot()

    async def shutdown(self) -> None:
        """End the rollout actors. Unfinished groups return to their callers with an error.

        Later calls of ``rollout``, ``stream`` and ``ready`` raise :class:`PoolClosedError`.
        """
        self._stop(PoolClosedError(CLOSED))
        if self._memory is not None:
            past = dataclasses.replace(self._sync.past, is_closed=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(self._memory.write, past), MEMORY_TIMEOUT_S)

    def __ray_shutdown__(self) -> None:
        """Ray calls this when the last handle is gone; placement groups would stay without it."""
        self._crew.close()

    def _present_version(self) -> int:
        return self._sync.version

    def _open(self, terms: Terms, caller: Caller | None, *, is_stream: bool) -> Call:
        call = self._calls.open(terms, caller.process if caller else "", is_stream=is_stream)
        if caller is not None:
            self._callers.attend(caller, call.leave)
        return call

    async def _submit(
        self, call: Call, prompts: Iterable[Prompt | RolloutRequest], sampling: SamplingParams | None
    ) -> None:
        # Numbered when it is opened, before any wait, so that the order of the calls decides.
        requests = resolve_requests(prompts, sampling, seed=call_seed(self._config.seed, call.number))
        await self._started.wait()
        self._require_open()
        self._calls.submit(call, requests)

    def _close(self, call: Call, caller: Caller | None) -> None:
        self._calls.close(call)
        if caller is not None:
            self._callers.over(caller)

    async def _start(self) -> None:
        try:
            if self._sync.past.is_closed:
                raise PoolClosedError(CLOSED)
            if self._sync.past.num_starts > 1:
                release_own()
            await self._crew.start()
        except RolloutPoolError as error:
            self._stop(error)
        else:
            self._started.set()

    def _stop(self, fault: RolloutPoolError) -> None:
        """Take no more work, because of ``fault``. The first one stays."""
        self._fault = self._fault or fault
        self._tasks.cancel_all()
        for syncing in self._syncing:
            syncing.cancel()
        self._crew.close()
        self._dispatcher.clear()
        self._ledger.cancel_all(str(self._fault))
        self._started.set()

    def _require_open(self) -> None:
        """Raise unless groups can be rolled out, with the weights that the callers believe it has."""
        self._raise_fault()
        self._sync.require_present()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault.with_traceback(None)  # one instance for all callers

    def _on_background_error(self, error: BaseException) -> None:
        logger.critical("the pool failed", exc_info=error)
        self._stop(RolloutPoolError(f"the pool failed: {type(error).__name__}: {one_line(error)}"))
