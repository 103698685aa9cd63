"""An update in Ray's object store: buckets that every reader of a node shares, and what they should hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
import torch

from rollout_pool.actors.checksums import checksum
from rollout_pool.actors.weight_records import Bucket, Manifest, TensorRecord
from rollout_pool.weight_sync.sources import DEFAULT_BUCKET_BYTES, Source, open_source


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
    """Buckets, and at last the manifest of them all; nothing where the rank is not the first.

    as_bytes: for the object store; otherwise a bucket holds the tensors themselves.
    """
    records: list[TensorRecord] = []
    for group in source.groups:
        found = tuple(_record(name, tensor) for name, tensor in group)
        records += found
        yield Bucket(found, [_as_bytes(tensor) if as_bytes else tensor.detach() for _, tensor in group])
        del group  # before the next is made
    if source.is_first_rank:
        yield Manifest(tuple(records), source.loras)


def _record(name: str, tensor: torch.Tensor) -> TensorRecord:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorRecord(name, tuple(tensor.shape), dtype, checksum(tensor))


def _as_bytes(tensor: torch.Tensor) -> Any:
    """uint8 ``[bytes]``; the tensor's own memory where that is on the CPU and in order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
