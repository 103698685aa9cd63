"""One weight sync after the other, as the pool conducts them.

All ranks of all actors stage and check an update while they go on with the old weights. When every one of
them has found it right, the update is decided: the actors write it, and one that fails to is replaced by one
that has it. Anything before that leaves the old weights everywhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from rollout_pool.actors.weight_records import Manifest, WeightReceipt
from rollout_pool.background import TaskSet
from rollout_pool.errors import ActorStartError, ConfigError, RolloutPoolError, WeightSyncError
from rollout_pool.pool_memory import PoolPast
from rollout_pool.weight_sync.arrivals import arrivals
from rollout_pool.weight_sync.rank_calls import Kv, Update, install, lives, reason, write
from rollout_pool.weight_sync.versions import next_version, past_after, require_present

if TYPE_CHECKING:
    from rollout_pool.actors.tensor_parallel import RankActors
    from rollout_pool.recovery import Member

logger = logging.getLogger(__name__)

Policy = Literal["drain", "abort", "in_flight"]
Transport = Literal["object_store", "gloo", "nccl"]
POLICIES: tuple[Policy, ...] = ("drain", "abort", "in_flight")
KV: tuple[Kv, ...] = ("recompute", "keep")

WRITE_TIMEOUT_S = 300.0
"""For one actor to write weights that it has staged: a step of its engine and a copy within its memory."""


class WeightSync:
    """The versions of a pool's weights. ``version`` 0 is the checkpoint that actors load.

    members: those that serve, by name. lose: tells that one is of no use. stopped: keeps the members from
    running samples for as long as its context lasts, by a policy. transport: of weights from a trainer that
    is an actor. keeps_copies: of what others put into the object store, which goes when they end. past: what
    the pool had before this process. remember: keeps that for the next one, in a while.
    """

    def __init__(
        self,
        members: Mapping[str, Member],
        tasks: TaskSet,
        lose: Callable[[Member, str], None],
        stopped: Callable[[Policy], AbstractAsyncContextManager[None]],
        transport: Transport,
        *,
        keeps_copies: bool = False,
        past: PoolPast | None = None,
        remember: Callable[[PoolPast], None] | None = None,
    ) -> None:
        self.version = 0
        self.num_syncs = 0
        """Those that went through, in ``seconds`` together."""
        self.seconds = 0.0
        self._members = members
        self._tasks = tasks
        self._lose = lose
        self._stopped = stopped
        self._transport = transport
        self._keeps_copies = keeps_copies
        self.past = past or PoolPast()
        self._remember = remember
        self._lock = asyncio.Lock()
        self._attempts = count(1)
        self._full: Update | None = None
        self._adapters: Update | None = None
        """On top of the full update."""

    def require_present(self) -> None:
        """Raise :class:`WeightsLostError` when an earlier process had newer weights than the actors have."""
        require_present(self.version, self.past)

    async def run(
        self, source: Any, version: int | None, policy: Policy, kv: Kv, timeout_s: float
    ) -> list[WeightReceipt]:
        """See :meth:`rollout_pool.pool.PoolActor.sync_weights`."""
        _check_choices(policy, kv)
        wanted, called_at, attempt = version, time.monotonic(), 0
        try:
            async with asyncio.timeout(timeout_s) as deadline, self._lock:
                wanted = next_version(version, self.version, self.past)
                attempt = next(self._attempts)
                update = await self._stage(source, wanted, attempt)
                past = past_after(update.manifest, wanted, self.version, self.past)
                async with self._stopped(policy):
                    if self._remember is not None:
                        await asyncio.to_thread(self._remember, past)
                    deadline.reschedule(None)  # from here on there is no way back
                    receipts = await self._commit(update, kv)
            self.num_syncs += 1
            self.seconds += time.monotonic() - called_at
            return receipts
        except TimeoutError:
            raise WeightSyncError(
                f"weights of version {wanted} were not everywhere within timeout_s ({timeout_s:g} s); "
                f"version {self.version} goes on"
            ) from None
        finally:  # nothing is left after a commit, and nothing may be left after a failure, or come late
            for member in self._members.values():
                for rank in member.ranks.handles:
                    rank.discard_weights.remote(attempt)

    @asynccontextmanager
    async def joining(self, name: str, ranks: RankActors, timeout_s: float) -> AsyncIterator[int]:
        """Give a new actor the present weights; no sync begins before the context ends. Yields the version.

        Raises :class:`ActorStartError` when it does not get them: it must not serve.
        """
        async with self._lock:
            try:
                async with asyncio.timeout(timeout_s):
                    for update in (self._full, self._adapters):
                        if update is not None:
                            await install(ranks, await self._with_buckets(update), next(self._attempts))
            except (RayError, TimeoutError, WeightSyncError) as error:
                raise ActorStartError(
                    f"{name} did not get the weights of version {self.version}: {reason(error)}; sync again"
                ) from error
            yield self.version

    async def _stage(self, source: Any, version: int, attempt: int) -> Update:
        """Bring an update to all ranks, and have them check it."""
        buckets: list[Any] = []
        manifest: Manifest | None = None
        calls: dict[Member, list[Any]] = {member: [] for member in self._members.values()}
        is_kept = self._transport == "object_store" or not isinstance(source, ActorHandle)
        async with aclosing(self._arrivals(source, is_kept)) as items:
            async for item in items:
                if isinstance(item, Manifest):
                    manifest = item
                    continue
                for member, pending in calls.items():
                    pending += [
                        rank.stage_weights.remote(version, item, attempt) for rank in member.ranks.handles
                    ]
                if is_kept:
                    buckets.append(item)
                else:
                    await self._of_all(calls)
                    calls = {member: [] for member in calls if member in self._members.values()}
        assert manifest is not None
        await self._of_all(calls)
        left = [member for member in calls if member in self._members.values()]
        checks = {
            member: [rank.check_weights.remote(version, manifest, attempt) for rank in member.ranks.handles]
            for member in left
        }
        await self._of_all(checks)
        return Update(version, manifest, tuple(buckets) if is_kept else None)

    def _arrivals(self, source: Any, is_kept: bool) -> AsyncGenerator[Any, None]:
        if is_kept or self._transport == "object_store":
            return arrivals(source, as_copies=self._keeps_copies)
        from rollout_pool.weight_sync.transport import transported

        receivers = [rank for member in self._members.values() for rank in member.ranks.handles]
        return transported(source, receivers, self._transport)

    async def _with_buckets(self, update: Update) -> Update:
        """An update with something to install, from an actor that has it, if it was not kept."""
        if update.buckets is not None:
            return update
        owner = next((m for m in self._members.values() if m.weight_version == self.version), None)
        if owner is None:
            raise WeightSyncError("no actor is left that has them")
        *buckets, manifest = [reference async for reference in owner.handle.export_weights.remote()]
        return Update(update.version, await manifest, tuple(buckets))

    async def _of_all(self, calls: Mapping[Member, Sequence[Any]]) -> None:
        """Wait for the ranks of each member. One that died is lost; any other failure is the update's."""
        answers = (asyncio.gather(*pending) for pending in calls.values())
        results = await asyncio.gather(*answers, return_exceptions=True)
        for member, result in zip(calls, results, strict=True):
            if not isinstance(result, BaseException):
                continue
            cause = result.cause if isinstance(result, RayTaskError) else result
            if isinstance(cause, RolloutPoolError):
                raise WeightSyncError(f"{member.name}: {cause}; version {self.version} goes on") from None
            if not isinstance(result, RayError):
                raise result
            if await lives(member):
                raise WeightSyncError(
                    f"{member.name} could not read the new weights: {reason(result)}; "
                    f"version {self.version} goes on"
                ) from result
            self._lose(member, reason(result))
        if not any(member in self._members.values() for member in calls):
            raise WeightSyncError(f"no rollout actor is left; a new one gets version {self.version}")

    async def _commit(self, update: Update, kv: Kv) -> list[WeightReceipt]:
        """Write on every member. It goes on when the caller is gone."""
        written: asyncio.Future[list[WeightReceipt]] = asyncio.get_running_loop().create_future()

        async def go_through() -> None:
            try:
                receipts = await self._write(update, kv)
                if not written.done():
                    written.set_result(receipts)
            finally:
                written.cancel()  # the pool is ending, or failed: nobody may wait on

        self._tasks.start(go_through())
        try:
            receipts = await asyncio.shield(written)
        except asyncio.CancelledError:
            await asyncio.wait([written])  # whoever comes next must not meet it half done
            raise
        if not receipts:
            raise WeightSyncError(
                f"every rollout actor was lost while it wrote version {update.version}; new ones get it"
            )
        return receipts

    async def _write(self, update: Update, kv: Kv) -> list[WeightReceipt]:
        self.past = past_after(update.manifest, update.version, self.version, self.past)
        self.version = update.version
        if update.manifest.is_full:
            self._full, self._adapters = update, None
        else:
            self._adapters = update
        members = sorted(self._members.values(), key=lambda member: member.name)
        writing = (asyncio.wait_for(write(member.ranks, update, kv), WRITE_TIMEOUT_S) for member in members)
        results = await asyncio.gather(*writing, return_exceptions=True)
        receipts: list[WeightReceipt] = []
        for member, result in zip(members, results, strict=True):
            if isinstance(result, BaseException):
                self._lose(member, f"it did not write version {update.version}: {reason(result)}")
                continue
            member.weight_version = update.version
            receipts += [dataclasses.replace(receipt, actor=member.name) for receipt in result]
        return receipts


def _check_choices(policy: str, kv: str) -> None:
    if policy not in POLICIES:
        raise ConfigError(f"policy: must be one of {', '.join(POLICIES)}, got {policy!r}")
    if kv not in KV:
        raise ConfigError(f"kv: must be one of {', '.join(KV)}, got {kv!r}")
