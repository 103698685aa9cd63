"""Weights from a trainer straight into the memory of rollout actors, by Ray's tensor transport.

Ray's collective groups of gloo take torch's default group, of which a process has one: neither the trainer
nor the actors may have theirs. Members come and go with replacements, so every sync makes its own group.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal

import ray
from ray.exceptions import RayError, RayTaskError

from rollout_pool.actors.weight_packing import DEFAULT_BUCKET_BYTES
from rollout_pool.actors.weight_records import Bucket, Manifest
from rollout_pool.errors import ConfigError, WeightSyncError
from rollout_pool.weight_sync.trainer import WeightSource

GROUP = "default"
"""Of this name Ray ends torch's group together with its own; of any other, the old members stay in it."""


class TensorTransportSource(WeightSource):
    """A :class:`WeightSource` for pools with ``weight_transport: gloo`` or ``nccl``; of one rank."""

    def prepare_weights(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        """Begin to send."""
        import torch

        from rollout_pool.weight_sync.shipment import packed
        from rollout_pool.weight_sync.sources import open_source

        if torch.distributed.is_initialized():
            raise ConfigError("this trainer has its own process group; use weight_transport: object_store")
        source = open_source(self.rollout_weights(), bucket_bytes)
        if source.loras:
            raise ConfigError("adapters are small: send them by weight_transport: object_store")
        self._packed = packed(source, as_bytes=False)

    def advance_weights(self) -> Manifest | None:
        """Make the next bucket; the manifest when there is none."""
        self._bucket = next(self._packed)
        return self._bucket if isinstance(self._bucket, Manifest) else None

    @ray.method(tensor_transport="gloo")
    def gloo_bucket(self) -> Bucket | Manifest:
        """The bucket that was made."""
        return self._bucket

    @ray.method(tensor_transport="nccl")
    def nccl_bucket(self) -> Bucket | Manifest:
        """The bucket that was made."""
        return self._bucket


async def transported(
    trainer: Any, receivers: Sequence[Any], transport: Literal["gloo", "nccl"]
) -> AsyncGenerator[Any, None]:
    """References to buckets in the trainer's memory, and at last the manifest.

    Each must have been received everywhere before the next is asked for. When one of the processes dies
    meanwhile, Ray kills those that it was connected with: they are replaced.
    """
    from ray.experimental.collective import create_collective_group, destroy_collective_group

    if not hasattr(trainer, "prepare_weights"):
        raise ConfigError(f"weight_transport {transport} needs a trainer that is a TensorTransportSource")
    try:
        await trainer.prepare_weights.remote()
        await asyncio.to_thread(create_collective_group, [trainer, *receivers], transport, GROUP)
        try:
            while (manifest := await trainer.advance_weights.remote()) is None:
                yield getattr(trainer, f"{transport}_bucket").remote()
            yield manifest
        finally:
            await asyncio.to_thread(_end, destroy_collective_group)
    except (RayError, RuntimeError) as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, ConfigError):
            raise cause from None
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
        raise WeightSyncError(f"the trainer failed while it sent its weights: {reason}") from error


def _end(destroy: Any) -> None:
    """Leave no group behind, whoever is left in it."""
    try:
        destroy(GROUP)
    except (RayError, ValueError):  # Ray has ended it itself, after a failure
        return
