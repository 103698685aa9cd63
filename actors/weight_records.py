"""What a weight sync sends and gets back. Plain records: no torch, no Ray."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int16": 2, "float16": 2,
    "bfloat16": 2, "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One full tensor, as the trainer has it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch writes it, without "torch."."""
    checksum: str
    """See :func:`rollout_pool.actors.checksums.checksum`."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class LoraRecord:
    """What is added to one weight: ``scaling * B @ A``, transposed for weights stored ``[in, out]``."""

    target: str
    """Name of the weight in the model that is rolled out."""
    a: str
    """Name under which A, ``[rank, in]``, is sent; likewise ``b``, ``[out, rank]``."""
    b: str
    scaling: float
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that one update consists of. It travels apart from the tensors, so that a lost one shows.

    With ``loras`` the update is one of adapters: weights it does not name are those of the last full
    update, or of the checkpoint.
    """

    tensors: tuple[TensorRecord, ...]
    loras: tuple[LoraRecord, ...] = ()

    @property
    def is_full(self) -> bool:
        return not self.loras

    @property
    def nbytes(self) -> int:
        return sum(record.nbytes for record in self.tensors)

    @property
    def checksum(self) -> str:
        """Of all tensors, whatever their order: 16 hex digits."""
        return combined((record.name, record.checksum) for record in self.tensors)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors on their way.

    payload: per record, its bytes as a flat uint8 array (they cross Ray's object store without a copy
    per reader), or the torch tensor itself (for Ray's tensor transports).
    """

    records: tuple[TensorRecord, ...]
    payload: Sequence[Any]


@dataclass(frozen=True, slots=True)
class WeightReceipt:
    """One rank's word that it has the weights of ``version``."""

    version: int
    num_tensors: int
    """Of the update, as received; likewise ``num_bytes`` and ``checksum``. The same on every rank."""
    num_bytes: int
    checksum: str
    weights_checksum: str
    """Of this rank's own parameters, read back after they were written: equal on equal ranks."""
    stage_s: float
    """Seconds of receiving and checking, during which the engine went on."""
    commit_s: float
    """Seconds of writing and reading back, during which it did not."""
    actor: str = ""
    rank: int = 0


def combined(checksums: Iterable[tuple[str, str]]) -> str:
    """One checksum of many (name, checksum), whatever their order: 16 hex digits."""
    lines = "\n".join(f"{name} {value}" for name, value in sorted(checksums))
    return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()
