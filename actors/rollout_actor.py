"""What runs inside one Ray actor: the calls that reach an engine in its thread.

The event loop answers at any moment, whatever the engine is doing. Nothing here imports Ray: the
pool makes a Ray actor of this class.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import sys
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import rollout_pool
from rollout_pool.actors.engine_thread import EngineThread
from rollout_pool.actors.progress import Progress
from rollout_pool.actors.weight_receiver import WeightReceiver
from rollout_pool.actors.weight_records import Bucket, Manifest, WeightReceipt
from rollout_pool.config import PoolConfig
from rollout_pool.errors import ActorStartError, PoolClosedError, RolloutPoolError
from rollout_pool.logs import set_up_logs
from rollout_pool.requests import failed_group
from rollout_pool.types import EngineStats, ResolvedRequest, RolloutGroup

if TYPE_CHECKING:
    from rollout_pool.actors.engine import Engine
    from rollout_pool.actors.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One process of an engine, and where it runs."""

    rank: int
    pid: int
    host: str
    device: str
    """"cpu", or "cuda:" and what ``CUDA_VISIBLE_DEVICES`` holds for this process, if anything."""

    @classmethod
    def here(cls, rank: int, device: str) -> RankInfo:
        """Of this process."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if device == "cuda" else ""
        return cls(rank, os.getpid(), socket.gethostname(), f"{device}:{visible}" if visible else device)


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """Where a rollout actor runs and with what."""

    name: str
    pid: int
    device: str
    threads: int
    """As torch counts them in the engine's thread."""
    memory_plan: str
    ranks: tuple[RankInfo, ...] = ()
    """Every process of the engine, in the order of ranks; the first is the actor itself."""


class RolloutActor(WeightReceiver):
    """One engine behind asynchronous calls. ``run`` may be called many times at once.

    Loading starts at once, in the engine's thread, so that :meth:`place` can answer while it goes
    on; :meth:`ready` raises what went wrong with it. Under tensor parallelism this is rank 0, and
    loading waits for the other ranks, which meet it at :meth:`address`.
    """

    def __init__(self, config: PoolConfig, name: str, *, threads: int, device: str) -> None:
        keep_checkout_off_path()
        set_up_logs(actor=name)
        self.name = name
        self._config = config
        self._threads = threads
        self._device = device
        self._info: ActorInfo | None = None
        self._address: Future[str] = Future()
        self._pending: dict[asyncio.Future[RolloutGroup], ResolvedRequest] = {}
        self._is_closed = False
        self._engine = EngineThread(name, self._load)

    async def place(self) -> RankInfo:
        """Answered as soon as the process is up, loaded or not."""
        return RankInfo.here(0, self._device)

    async def address(self) -> str:
        """Where the other ranks of a tensor-parallel group meet this one."""
        return await asyncio.shield(asyncio.wrap_future(self._address))

    async def ready(self) -> ActorInfo:
        """Wait until the engine is loaded. Raises what made the loading fail, as one line."""
        try:
            await asyncio.shield(asyncio.wrap_future(self._engine.loaded))
        except Exception as error:
            raise start_error(self.name, self._config.model, error) from None
        assert self._info is not None
        return self._info

    async def run(self, request: ResolvedRequest) -> RolloutGroup:
        """Run one group to its end. Cancelling the call aborts the group.

        Raises :class:`PoolClosedError` after :meth:`shutdown`.
        """
        await self.ready()
        if self._is_closed:
            raise PoolClosedError(f"{self.name} was shut down")
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[RolloutGroup] = loop.create_future()

        def on_finish(group: RolloutGroup) -> None:
            if not loop.is_closed():  # it is while the process ends, and then nobody waits
                loop.call_soon_threadsafe(_resolve, finished, self._signed(group))

        self._pending[finished] = request
        self._engine.submit(request, on_finish)
        try:
            return await finished
        except asyncio.CancelledError:
            self._engine.abort(request.request_id)
            raise
        finally:
            del self._pending[finished]

    async def abort(self, request_id: str | int) -> None:
        """Stop the groups of this id; what they have so far comes back through :meth:`run`."""
        self._engine.abort(request_id)

    async def commit_weights(self, version: int, kv: Literal["recompute", "keep"]) -> WeightReceipt:
        """Write the staged weights on all ranks, between two steps of the engine; see :class:`Engine`.

        The process does not outlive a failure here, for its weights are neither the old nor the new ones.
        """
        writing = self._engine.call(lambda engine: engine.update_weights(version, kv=kv), "weights")
        await asyncio.wrap_future(writing)
        return await self.weight_receipt(version)

    async def export_weights(self) -> AsyncIterator[Bucket | Manifest]:
        """The weights of the last full update in buckets, and at last their manifest."""
        stream = self._ready_weights().export()
        while (item := await asyncio.to_thread(next, stream, None)) is not None:
            yield item

    async def stats(self) -> EngineStats:
        """Counters of the engine as of its last step."""
        return self._engine.stats

    async def progress(self) -> Progress:
        """How far the engine has come. Answered whatever its thread is in."""
        return self._engine.progress

    async def shutdown(self) -> None:
        """Stop the engine's thread. Groups not finished come back failed."""
        self._is_closed = True
        await asyncio.to_thread(self._engine.stop)
        for finished, request in self._pending.items():
            _resolve(finished, self._signed(failed_group(request, f"{self.name} was shut down")))

    def _signed(self, group: RolloutGroup) -> RolloutGroup:
        return group.replace(timing=dataclasses.replace(group.timing, actor=self.name))

    def _load(self) -> Engine:
        """In the engine's thread, whose number of threads torch keeps apart from that of others."""
        prepare_thread(self._threads)  # here, not above: the process answers before its imports are done
        import torch

        from rollout_pool.actors.engine import Engine

        config = self._config
        is_split = config.tensor_parallel_size > 1
        engine = Engine(
            config.model,
            config.engine,
            tokenizer=config.tokenizer,
            dtype=config.dtype,
            seed=config.seed,
            device=None if is_split else self._device,  # the group has found its ranks' devices
            trust_remote_code=config.trust_remote_code,
            group=self._gather() if is_split else None,
            backend=config.tensor_parallel_backend,
        )
        self.receive_weights(engine.batch.worker, config, 0)
        threads, plan = torch.get_num_threads(), engine.memory_plan.describe()
        place = RankInfo.here(0, self._device)
        self._info = ActorInfo(self.name, place.pid, self._device, threads, plan, (place,))
        return engine

    def _gather(self) -> RankGroup:
        """Wait for the other ranks."""
        try:
            from rollout_pool.actors.rank_group import RankGroup, open_store

            # All on one node, nobody else's business: a port that only this host can reach.
            is_one_node = self._config.tensor_parallel_placement == "strict_pack"
            store, address = open_store("127.0.0.1" if is_one_node else None)
        except BaseException as error:
            self._address.set_exception(start_error(self.name, self._config.model, error))
            raise
        self._address.set_result(address)
        size, limit = self._config.tensor_parallel_size, self._config.start_timeout_s
        return RankGroup.join(address, 0, size, self._device, store=store, timeout_s=limit)


def _resolve(finished: asyncio.Future[RolloutGroup], group: RolloutGroup) -> None:
    if not finished.done():
        finished.set_result(group)


def prepare_thread(threads: int) -> None:
    """Before a thread loads a model: torch's number of threads in it, and no progress bars.

    Ray would send the bars to the driver line by line.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(threads)


def start_error(name: str, model: str, error: BaseException) -> RolloutPoolError:
    """What kept ``name`` from loading: an error of ours as it is, another as one line of text.

    That of another library may be many lines, and need not survive a pickle.
    """
    if isinstance(error, RolloutPoolError):
        return error
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return ActorStartError(f"{name} could not load {model}: {reason}")


def keep_checkout_off_path() -> None:
    """Remove a source checkout of this package from ``sys.path``.

    Ray puts the driver's working directory there. When that is the checkout, its folder ``kernels``
    would be taken for the package of that name, which transformers imports.
    """
    package = Path(rollout_pool.__file__).resolve().parent
    root = (package / "kernels").resolve().parent
    if root != package:  # in a wheel the kernels are inside the package, in a checkout beside it
        sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != root]
