"""Named tensors to buckets that can be sent, each with what its receiver should find."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rollout_pool.actors.checksums import checksum
from rollout_pool.actors.weight_records import Bucket, LoraRecord, Manifest, TensorRecord

DEFAULT_BUCKET_BYTES = 256 * 2**20

Named = tuple[str, torch.Tensor]


def grouped(tensors: Iterable[Named], max_bytes: int) -> Iterator[list[Named]]:
    """Neighbours together, as long as they have no more than ``max_bytes``."""
    group: list[Named] = []
    size = 0
    for name, tensor in tensors:
        if group and size + tensor.nbytes > max_bytes:
            yield group
            group, size = [], 0
        group.append((name, tensor))
        size += tensor.nbytes
    if group:
        yield group


def pack(
    groups: Iterable[list[Named]], loras: tuple[LoraRecord, ...] = (), *, as_bytes: bool = True
) -> Iterator[Bucket | Manifest]:
    """A bucket per group, and at last the manifest of them all.

    as_bytes: for the object store; otherwise a bucket holds the tensors themselves.
    """
    records: list[TensorRecord] = []
    for group in groups:
        found = tuple(_record(name, tensor) for name, tensor in group)
        records += found
        yield Bucket(found, [_bytes(tensor) if as_bytes else tensor.detach() for _, tensor in group])
        del group  # before the next is made
    yield Manifest(tuple(records), loras)


def _record(name: str, tensor: torch.Tensor) -> TensorRecord:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorRecord(name, tuple(tensor.shape), dtype, checksum(tensor))


def _bytes(tensor: torch.Tensor) -> Any:
    """uint8 ``[bytes]``; the tensor's own memory where that is on the CPU and in order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
