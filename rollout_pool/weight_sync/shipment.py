"""An update in Ray's object store: buckets that every reader of a node shares, and what they should hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray

from rollout_pool.actors.weight_packing import DEFAULT_BUCKET_BYTES, pack
from rollout_pool.actors.weight_records import Bucket, Manifest
from rollout_pool.weight_sync.sources import Source, open_source


@dataclass(frozen=True, slots=True)
class Shipment:
    """An update that ``pool.sync_weights`` takes. Its buckets live as long as who shipped them."""

    manifest: Manifest
    buckets: tuple[Any, ...]
    """Ray references to :class:`~rollout_pool.actors.weight_records.Bucket`."""


def ship(source: Any, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Shipment | None:
    """Put weights into Ray's object store, to be taken by ``pool.sync_weights``::

        ray.get(pool.sync_weights.remote(ship(model)))

    Of a trainer with several ranks (DeepSpeed), every rank calls this; the first gets the shipment, the
    others None. Takes what :func:`~rollout_pool.weight_sync.sources.open_source` takes, and raises what
    that raises.
    """
    opened = open_source(source, bucket_bytes)
    references, manifest = [], None
    for item in packed(opened):
        if isinstance(item, Manifest):
            manifest = item
        else:
            references.append(ray.put(item))
        del item
    return Shipment(manifest, tuple(references)) if manifest is not None else None


def packed(source: Source, *, as_bytes: bool = True) -> Iterator[Bucket | Manifest]:
    """Buckets and their manifest, as :func:`~rollout_pool.actors.weight_packing.pack` makes them.

    Nothing where the rank is not the first, which takes part in gathering all the same.
    """
    if source.is_first_rank:
        yield from pack(source.groups, source.loras, as_bytes=as_bytes)
    else:
        assert not list(source.groups)
