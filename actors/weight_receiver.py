"""One rank's end of a weight sync, as calls that the pool makes. Nothing here imports Ray."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rollout_pool.actors.weight_records import Bucket, Manifest, WeightReceipt

if TYPE_CHECKING:
    from rollout_pool.actors.weights import ModelWeights
    from rollout_pool.actors.worker import Worker
    from rollout_pool.config import PoolConfig

POLL_INTERVAL_S = 0.01
"""Between two looks whether the rank's own thread has written what rank 0 told it to."""


class WeightReceiver:
    """Mixed into the classes of all ranks. The engine goes on while weights are staged and checked."""

    _weights: ModelWeights | None = None

    def receive_weights(self, worker: Worker, config: PoolConfig, rank: int) -> None:
        """From now on ``worker`` takes new weights. In the thread that has loaded its model."""
        from rollout_pool.actors.weights import ModelWeights

        model, shards = worker.runner.model, {}
        if config.tensor_parallel_size > 1:
            from rollout_pool.actors.shards import find_shards

            shards = find_shards(model, config, rank)
        worker.weights = self._weights = ModelWeights(model, shards)

    async def stage_weights(self, version: int, bucket: Bucket, attempt: int) -> None:
        """Look at some tensors and keep them; :meth:`check_weights` tells what is wrong with them.

        A bucket from Ray's object store is kept where it is, in memory that all processes of the node share.
        """
        await asyncio.to_thread(self._ready_weights().stage, version, bucket, attempt)

    async def check_weights(self, version: int, manifest: Manifest, attempt: int) -> None:
        """Raise :class:`WeightSyncError` unless what was staged is all of it, and fits this rank's model."""
        await asyncio.to_thread(self._ready_weights().check, version, manifest, attempt)

    async def discard_weights(self, attempt: int) -> None:
        """Forget what was staged up to this attempt, and what may still come of it."""
        await asyncio.to_thread(self._ready_weights().discard, attempt)

    async def weight_receipt(self, version: int) -> WeightReceipt:
        """Wait until this rank has weights of ``version``; it is rank 0 that makes it write them."""
        weights = self._ready_weights()
        while weights.version < version:
            await asyncio.sleep(POLL_INTERVAL_S)
        assert weights.receipt is not None
        return weights.receipt

    def _ready_weights(self) -> ModelWeights:
        assert self._weights is not None, "no weights are sent before the model is loaded"
        return self._weights
