"""What runs inside one Ray actor: the calls that reach an engine in its thread.

The event loop answers at any moment, whatever the engine is doing. Nothing here imports Ray: the
pool makes a Ray actor of this class.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import rollout_pool
from rollout_pool.actors.engine_thread import EngineThread
from rollout_pool.config import PoolConfig
from rollout_pool.errors import ActorStartError, PoolClosedError, RolloutPoolError
from rollout_pool.requests import failed_group
from rollout_pool.types import EngineStats, ResolvedRequest, RolloutGroup

if TYPE_CHECKING:
    from rollout_pool.actors.engine import Engine


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """Where a rollout actor runs and with what."""

    name: str
    pid: int
    device: str
    threads: int
    """As torch counts them in the engine's thread."""
    memory_plan: str


class RolloutActor:
    """One engine behind asynchronous calls. ``run`` may be called many times at once.

    Loading starts at once, in the engine's thread, so that :meth:`ping` can answer while it goes
    on; :meth:`ready` raises what went wrong with it.
    """

    def __init__(self, config: PoolConfig, name: str, *, threads: int, device: str) -> None:
        keep_checkout_off_path()
        self.name = name
        self._config = config
        self._threads = threads
        self._device = device
        self._info: ActorInfo | None = None
        self._pending: dict[asyncio.Future[RolloutGroup], ResolvedRequest] = {}
        self._is_closed = False
        self._engine = EngineThread(name, self._load)

    async def ping(self) -> None:
        """Answered as soon as the process is up, loaded or not."""

    async def ready(self) -> ActorInfo:
        """Wait until the engine is loaded. Raises what made the loading fail, as one line."""
        try:
            await asyncio.shield(asyncio.wrap_future(self._engine.loaded))
        except RolloutPoolError:
            raise
        except Exception as error:  # of another library: it may be many lines, and need not survive a pickle
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ActorStartError(f"{self.name} could not load {self._config.model}: {reason}") from None
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

    async def stats(self) -> EngineStats:
        """Counters of the engine as of its last step."""
        return self._engine.stats

    async def progress(self) -> int:
        """How many samples have ended since the start, those of unfinished groups included."""
        return self._engine.samples_ended

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
        import torch  # here, not above: the process answers before these imports are done
        from transformers.utils import logging as transformers_logging

        from rollout_pool.actors.engine import Engine

        transformers_logging.disable_progress_bar()  # Ray would send it to the driver line by line
        torch.set_num_threads(self._threads)
        config = self._config
        engine = Engine(
            config.model,
            config.engine,
            tokenizer=config.tokenizer,
            dtype=config.dtype,
            seed=config.seed,
            device=self._device,
            trust_remote_code=config.trust_remote_code,
        )
        threads, plan = torch.get_num_threads(), engine.memory_plan.describe()
        self._info = ActorInfo(self.name, os.getpid(), self._device, threads, plan)
        return engine


def _resolve(finished: asyncio.Future[RolloutGroup], group: RolloutGroup) -> None:
    if not finished.done():
        finished.set_result(group)


def keep_checkout_off_path() -> None:
    """Remove a source checkout of this package from ``sys.path``.

    Ray puts the driver's working directory there. When that is the checkout, its folder ``kernels``
    would be taken for the package of that name, which transformers imports.
    """
    package = Path(rollout_pool.__file__).resolve().parent
    root = (package / "kernels").resolve().parent
    if root != package:  # in a wheel the kernels are inside the package, in a checkout beside it
        sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != root]
