"""What runs inside the Ray actor of every rank but the first: a shard that does as rank 0 says.

Nothing here imports Ray: :mod:`rollout_pool.actors.tensor_parallel` makes a Ray actor of this class.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from rollout_pool.actors.engine_thread import LAST_WORDS_S, end_process
from rollout_pool.actors.rollout_actor import RankInfo, keep_checkout_off_path, prepare_thread, start_error
from rollout_pool.actors.weight_receiver import WeightReceiver
from rollout_pool.config import PoolConfig
from rollout_pool.errors import RolloutPoolError
from rollout_pool.logs import set_up_logs

if TYPE_CHECKING:
    from rollout_pool.actors.worker import Worker


class FollowerActor(WeightReceiver):
    """Rank ``rank`` of a tensor-parallel group. Its thread joins, loads its shard and replays rank 0's steps.

    When the thread fails, :meth:`ping` raises why, and soon after the process exits.
    """

    def __init__(self, config: PoolConfig, name: str, rank: int, *, threads: int, device: str) -> None:
        keep_checkout_off_path()
        set_up_logs(actor=name, rank=str(rank))
        self._name = f"rank {rank} of {name}"
        self._config = config
        self._rank = rank
        self._threads = threads
        self._device = device
        self._address: Future[str] = Future()
        self._loaded: Future[None] = Future()
        self._fault: RolloutPoolError | None = None
        threading.Thread(target=self._main, name="follower", daemon=True).start()

    async def place(self) -> RankInfo:
        """Answered as soon as the process is up."""
        return RankInfo.here(self._rank, self._device)

    async def join(self, address: str) -> None:
        """Where rank 0 waits; does not wait for the meeting, and may be called once."""
        self._address.set_result(address)

    async def ready(self) -> None:
        """Wait until the shard is loaded. Raises what made the loading fail, as one line."""
        await asyncio.shield(asyncio.wrap_future(self._loaded))

    async def ping(self) -> None:
        """Raises what ended this rank's thread, as one line."""
        if self._fault is not None:
            raise self._fault

    def _main(self) -> None:
        try:
            self._follow()
        except BaseException as error:
            if self._loaded.done():
                self._fault = RolloutPoolError(f"{self._name} failed: {' '.join(str(error).split())}")
            else:
                self._fault = start_error(self._name, self._config.model, error)
                self._loaded.set_exception(self._fault)
            time.sleep(LAST_WORDS_S)
            end_process(f"{self._name} failed; its process exits")

    def _follow(self) -> None:
        prepare_thread(self._threads)  # imports torch while rank 0 does so, too
        from rollout_pool.actors.rank_group import RankGroup
        from rollout_pool.actors.rank_worker import follow

        config = self._config
        group = RankGroup.join(
            self._address.result(),
            self._rank,
            config.tensor_parallel_size,
            self._device,
            timeout_s=config.start_timeout_s,
        )
        follow(
            config.model,
            config.engine,
            group=group,
            dtype=config.dtype,
            backend=config.tensor_parallel_backend,
            trust_remote_code=config.trust_remote_code,
            on_loaded=self._on_loaded,
        )

    def _on_loaded(self, worker: Worker) -> None:
        self.receive_weights(worker, self._config, self._rank)
        self._loaded.set_result(None)
