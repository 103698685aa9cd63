"""New weights for a model that serves: staged, checked as a whole, and only then written.

Every rank stages all tensors of an update and checks them against its own model. Nothing is written before
all ranks have found nothing wrong, so an update that is incomplete or damaged leaves the old weights
everywhere. Writing is in place: parameters keep their memory and its layout.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic

import torch

from rollout_pool.actors.checksums import checksum
from rollout_pool.actors.lora import LoraBases
from rollout_pool.actors.weight_packing import DEFAULT_BUCKET_BYTES, grouped, pack
from rollout_pool.actors.weight_places import Part, Place, Shard, find_places, write
from rollout_pool.actors.weight_records import Bucket, Manifest, TensorRecord, WeightReceipt, combined
from rollout_pool.errors import WeightSyncError

MAX_LISTED = 8
"""Faults of one update that a message lists."""


@dataclass
class _Staged:
    """What has arrived of one update."""

    version: int
    attempt: int
    places: dict[str, list[Place]]
    """By every name that a trainer may send."""
    records: dict[str, TensorRecord] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    """By the names of places."""
    others: dict[str, torch.Tensor] = field(default_factory=dict)
    """Names the model does not have, which may be adapters."""
    faults: list[str] = field(default_factory=list)
    manifest: Manifest | None = None
    seconds: float = 0.0


class ModelWeights:
    """The weights of one model, or of one rank's shard of it, under a version. The first is 0.

    ``stage`` and ``check`` may run in any thread while the model serves; ``commit`` must not meet a
    forward pass. Whoever sends weights numbers the attempts: what comes late, of one that was given up, is
    not mixed with what the next one brings under the same version.
    """

    def __init__(self, model: torch.nn.Module, shards: Mapping[str, Shard] | None = None) -> None:
        """shards: see :func:`~rollout_pool.actors.weight_places.find_places`."""
        self.version = 0
        self.receipt: WeightReceipt | None = None
        """Of the last commit."""
        self._model = model
        self._shards = shards
        self._staged: _Staged | None = None
        self._given_up = -1
        """The last attempt that nobody waits for any more."""
        self._bases = LoraBases()
        self._lock = threading.Lock()

    def stage(self, version: int, bucket: Bucket, attempt: int = 0) -> None:
        """Look at some tensors of an update and keep them. What is wrong with them is told by :meth:`check`.

        The first bucket of another version, or of a later attempt, discards what was staged before. One of an
        attempt that was given up is passed over.
        """
        with self._lock:
            begin = monotonic()
            staged = self._open(version, attempt)
            if staged is None:
                return
            for record, tensor, is_shared in _tensors(bucket):
                self._stage_one(staged, record, tensor, is_shared)
            staged.seconds += monotonic() - begin

    def check(self, version: int, manifest: Manifest, attempt: int = 0) -> None:
        """Whether what was staged is the whole update, and fits. Raises :class:`WeightSyncError` if not.

        The message names every tensor at fault: missing, unknown, of a wrong shape or dtype, not finite, or
        damaged on its way. Nothing has been written then, and nothing is staged any more.
        """
        with self._lock:
            begin = monotonic()
            staged = self._open(version, attempt)
            if staged is None:
                raise WeightSyncError(f"weights of version {version} were given up by the pool")
            faults = [*_lost(staged, manifest), *staged.faults, *_unfit(staged, manifest)]
            if faults:
                self._staged = None
                raise WeightSyncError(_listing(faults, version))
            staged.manifest = manifest
            staged.seconds += monotonic() - begin

    def commit(self, version: int) -> WeightReceipt:
        """Write what was checked, in place, read it back, and drop what was staged.

        A failure here leaves the weights undefined: the caller must not serve any more.
        """
        with self._lock:
            staged, self._staged = self._staged, None
            if staged is None or staged.version != version or staged.manifest is None:
                raise WeightSyncError(f"weights of version {version} were not staged and checked here")
            begin = monotonic()
            manifest = staged.manifest
            places = {place.name: place for place in find_places(self._model, self._shards)}
            with torch.no_grad():
                if manifest.is_full:
                    self._bases.forget()
                    sums = {name: write(places[name], part) for name, part in staged.parts.items()}
                else:
                    sums = self._bases.merge(manifest.loras, staged.others, staged.parts, places)
            self.receipt = WeightReceipt(
                version=version,
                num_tensors=len(manifest.tensors),
                num_bytes=manifest.nbytes,
                checksum=manifest.checksum,
                weights_checksum=_checksum(places.values(), sums),
                stage_s=staged.seconds,
                commit_s=monotonic() - begin,
            )
            self.version = version
            return self.receipt

    def discard(self, attempt: int) -> None:
        """Forget what this attempt and those before have staged, and what is still to come of them."""
        with self._lock:
            self._given_up = max(self._given_up, attempt)
            if self._staged is not None and self._staged.attempt <= attempt:
                self._staged = None

    def checksum(self) -> str:
        """Of all parameters as they are now: 16 hex digits."""
        return _checksum(find_places(self._model, self._shards), {})

    def export(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Iterator[Bucket | Manifest]:
        """The weights of the last full update, for an actor that comes later. Not of a shard."""
        places = find_places(self._model, self._shards)
        tensors = ((place.name, self._bases.get(place)) for place in places)
        return pack(grouped(tensors, bucket_bytes))

    def _open(self, version: int, attempt: int) -> _Staged | None:
        """What is staged of this attempt. None: it was given up, or a later one has begun."""
        newest = self._given_up if self._staged is None else max(self._given_up, self._staged.attempt - 1)
        if attempt <= newest:
            return None
        if self._staged is None or (self._staged.version, self._staged.attempt) != (version, attempt):
            places: dict[str, list[Place]] = {}
            for place in find_places(self._model, self._shards):
                for name in place.aliases:
                    places.setdefault(name, []).append(place)
            self._staged = _Staged(version, attempt, places)
        return self._staged

    def _stage_one(
        self, staged: _Staged, record: TensorRecord, tensor: torch.Tensor | None, is_shared: bool
    ) -> None:
        name = record.name
        if name in staged.records:
            staged.faults.append(f"{name} came twice")
            return
        staged.records[name] = record
        if tensor is None or checksum(tensor) != record.checksum:
            staged.faults.append(f"{name} was damaged on its way (its checksum differs)")
            return
        places = staged.places.get(name, [])
        if not places:
            staged.others[name] = tensor if is_shared else tensor.cpu()
        for place in places:
            if (fault := _misfit(place, record, tensor)) is not None:
                staged.faults.append(f"{name} {fault}")
                return
            part, dtype = place.part(tensor), place.tensor.dtype
            is_as_sent = part is tensor and dtype == tensor.dtype
            expected = record.checksum if is_as_sent else checksum(part.to(dtype))
            if not is_shared:  # a receive buffer: keep the part alone, and off the device
                part = part.clone() if part.device.type == "cpu" else part.cpu()
            staged.parts[place.name] = Part(part, expected)


def _misfit(place: Place, record: TensorRecord, tensor: torch.Tensor) -> str | None:
    wanted = place.tensor.dtype
    if record.shape != place.full_shape:
        return f"has shape {list(record.shape)}, here it is {list(place.full_shape)}"
    if wanted != tensor.dtype and not (wanted.is_floating_point and tensor.dtype.is_floating_point):
        return f"is {record.dtype}, here it is {str(wanted).removeprefix('torch.')}"
    if not is_finite(tensor):
        return "holds NaN or infinity"
    if wanted != tensor.dtype and not is_finite(tensor.to(wanted)):
        return f"has values too large for {str(wanted).removeprefix('torch.')}"
    return None


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether there is neither NaN nor infinity in ``tensor``; one pass, without a copy."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.element_size() == 1:
        tensor = tensor.float()
    return all(bool(torch.isfinite(bound)) for bound in tensor.aminmax())


def _lost(staged: _Staged, manifest: Manifest) -> Iterator[str]:
    """Where what arrived is not what the manifest announces."""
    announced = {record.name: record for record in manifest.tensors}
    for name, record in announced.items():
        if name not in staged.records:
            yield f"{name} did not arrive"
        elif staged.records[name] != record:
            yield f"{name} is not the tensor that was announced"
    for name in staged.records.keys() - announced.keys():
        yield f"{name} was not announced"


def _unfit(staged: _Staged, manifest: Manifest) -> Iterator[str]:
    """Where the update as a whole does not fit the model."""
    factors = {name for lora in manifest.loras for name in (lora.a, lora.b)}
    for name in staged.others:
        if name not in factors:
            yield f"{name} is not a weight of this model"
    for lora in manifest.loras:
        yield from LoraBases.faults(lora, staged.others, staged.places)
    announced = {record.name: record for record in manifest.tensors}
    for place in dict.fromkeys(place for places in staged.places.values() for place in places):
        values = [announced[name] for name in sorted(place.aliases) if name in announced]
        if not values and place.is_parameter and manifest.is_full:
            yield f"{place.name} is missing"
        if len({value.checksum for value in values}) > 1:
            yield f"{' and '.join(value.name for value in values)} differ, but are one weight here"


def _checksum(places: Iterable[Place], known: Mapping[str, str]) -> str:
    found = [place for place in places if place.is_parameter]
    return combined((place.name, known.get(place.name) or checksum(place.tensor)) for place in found)


def _tensors(bucket: Bucket) -> Iterator[tuple[TensorRecord, torch.Tensor | None, bool]]:
    """(record, tensor, whether its memory is shared rather than this process's own).

    None for a tensor: its bytes do not make one of the announced dtype and shape.
    """
    for record, data in zip(bucket.records, bucket.payload, strict=True):
        if isinstance(data, torch.Tensor):
            fits = tuple(data.shape) == record.shape and str(data.dtype) == f"torch.{record.dtype}"
            yield record, data if fits else None, False
            continue
        if data.nbytes != record.nbytes:
            yield record, None, True
            continue
        with warnings.catch_warnings():  # that shared memory is read-only; nobody writes to it here
            warnings.simplefilter("ignore", UserWarning)
            flat = torch.from_numpy(data) if record.nbytes else torch.empty(0, dtype=torch.uint8)
        yield record, flat.view(getattr(torch, record.dtype)).reshape(record.shape), True


def _listing(faults: list[str], version: int) -> str:
    more = f" (and {len(faults) - MAX_LISTED} more)" if len(faults) > MAX_LISTED else ""
    listed = "; ".join(faults[:MAX_LISTED])
    return f"weights of version {version} were refused: {listed}{more}"
