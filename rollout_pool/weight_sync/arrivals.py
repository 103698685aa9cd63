"""Whatever ``sync_weights`` is given, as references to buckets one after the other, and the manifest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from rollout_pool.actors.weight_records import Manifest
from rollout_pool.errors import ConfigError, RolloutPoolError, WeightSyncError


async def arrivals(source: Any, *, as_copies: bool = False) -> AsyncGenerator[Any, None]:
    """Ray references to buckets, and at last the :class:`Manifest` itself.

    as_copies: of buckets that this process does not own, and that would go with the one that does.

    source: a :class:`~rollout_pool.weight_sync.shipment.Shipment`; the handle of a trainer that is a
    :class:`~rollout_pool.weight_sync.trainer.WeightSource`, or of each of its ranks; a checkpoint's path; a
    state dict. Raises :class:`WeightSyncError` when the source fails.
    """
    if isinstance(source, ActorHandle):
        source = [source]
    if isinstance(source, str | Mapping):
        from rollout_pool.weight_sync.shipment import ship

        source = await asyncio.to_thread(ship, source)
    if isinstance(source, Sequence) and source and all(isinstance(one, ActorHandle) for one in source):
        async for item in _from_trainer(source):
            yield item
    elif hasattr(source, "manifest") and hasattr(source, "buckets"):
        for reference in source.buckets:
            yield await asyncio.to_thread(ray.put, await reference) if as_copies else reference
        yield source.manifest
    else:
        raise ConfigError(
            f"sync_weights takes a Shipment (see ship), trainer handles, a path or a state dict, "
            f"got {type(source).__name__}"
        )


async def _from_trainer(ranks: Sequence[Any]) -> AsyncGenerator[Any, None]:
    """All ranks gather, the first one sends. The last that it sends is the manifest."""
    first, *others = [rank.weight_buckets.remote() for rank in ranks]
    rest = [asyncio.ensure_future(_to_the_end(stream)) for stream in others]
    try:
        previous = None
        async for reference in first:
            if previous is not None:
                yield previous
            previous = reference
        manifest = await previous if previous is not None else None
        await asyncio.gather(*rest)
    except RayError as error:
        raise WeightSyncError(f"the trainer failed while it sent its weights: {_reason(error)}") from error
    finally:
        for one in rest:
            one.cancel()
    if not isinstance(manifest, Manifest):
        raise WeightSyncError("the trainer sent no weights; is the first handle that of its first rank?")
    yield manifest


async def _to_the_end(stream: Any) -> None:
    async for reference in stream:
        await reference  # nothing comes but what went wrong


def _reason(error: RayError) -> str:
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RolloutPoolError):
        return str(cause)
    return " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
