"""Where the tensors of an update belong in a model, or in one rank's shard of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard

from rollout_pool.actors.checksums import checksum
from rollout_pool.errors import WeightSyncError


class Shard(Protocol):
    """Which part of a full tensor one rank holds."""

    @property
    def full_shape(self) -> tuple[int, ...]: ...

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``full``; a view where it can be one."""
        ...


@dataclass(frozen=True)
class SplitShard:
    """An equal slice of one dimension, or the same slice of each of ``blocks`` that are fused along it."""

    full_shape: tuple[int, ...]
    dim: int
    rank: int
    size: int
    blocks: int = 1

    def take(self, full: torch.Tensor) -> torch.Tensor:
        parts = [block.chunk(self.size, self.dim)[self.rank] for block in full.chunk(self.blocks, self.dim)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


MAX_BLOCKS = 3
"""Of a fused weight: gate and up, or query, key and value."""


def split_candidates(full_shape: Sequence[int], rank: int, size: int) -> Iterator[SplitShard]:
    """Every equal slice that rank ``rank`` of ``size`` may hold of a tensor of this shape."""
    for dim, length in enumerate(full_shape):
        for blocks in range(1, MAX_BLOCKS + 1):
            if length % (size * blocks) == 0:
                yield SplitShard(tuple(full_shape), dim, rank, size, blocks)


@dataclass(frozen=True, eq=False)
class Place:
    """One parameter or persistent buffer of a model."""

    name: str
    aliases: frozenset[str]
    """Every name under which its value may come, its own included: tied weights have several."""
    tensor: torch.Tensor
    """What is written, in place; on a rank of a tensor-parallel group, its part."""
    shard: Shard | None
    is_parameter: bool

    @property
    def full_shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape) if self.shard is None else tuple(self.shard.full_shape)

    def part(self, full: torch.Tensor) -> torch.Tensor:
        """What of ``full`` belongs here, in the dtype of ``full``; a view where it can be one."""
        return full if self.shard is None else self.shard.take(full)


@dataclass(frozen=True)
class Part:
    """What will be written to one place."""

    value: torch.Tensor
    """In the dtype in which it was sent."""
    checksum: str
    """In the dtype of the place."""


def write(place: Place, part: Part) -> str:
    """Copy into a place, whatever the layout of its memory, and read it back. Returns its checksum."""
    place.tensor.copy_(part.value)
    if (found := checksum(place.tensor)) != part.checksum:
        raise WeightSyncError(f"{place.name} does not hold what was written to it")
    return found


def find_places(model: torch.nn.Module, shards: Mapping[str, Shard] | None = None) -> list[Place]:
    """All parameters of ``model``, each once, and the buffers that a checkpoint of it holds.

    shards: by the names of parameters, for ranks that hold parts. What is a ``DTensor`` says so itself.
    """
    shards = shards or {}
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    aliases = {key: frozenset(found) for key, found in names.items()}
    tied = {id(tensor) for tensor in tied_weights(model) or ()}
    for key in tied & aliases.keys():
        aliases[key] = frozenset().union(*(aliases[other] for other in tied if other in aliases))
    places = []
    for key, tensor in tensors.items():
        own = names[key]
        given = next((shards[name] for name in own if name in shards), None)
        local, shard = _local(tensor, given)
        places.append(Place(own[0], aliases[key], local, shard, is_parameter=True))
    for name, buffer in persistent_buffers(model):
        local, shard = _local(buffer, shards.get(name))
        places.append(Place(name, frozenset([name]), local, shard, is_parameter=False))
    return places


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that ``state_dict`` would hold."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _local(tensor: torch.Tensor, shard: Shard | None) -> tuple[torch.Tensor, Shard | None]:
    if not isinstance(tensor, DTensor):
        return tensor.detach(), shard
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local, shard or _placement(tensor)


def _placement(tensor: DTensor) -> Shard | None:
    """How torch has split a tensor over a mesh of one dimension."""
    (placement,) = tensor.placements
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    if placement.is_replicate():
        return None
    dim = placement.dim  # type: ignore[attr-defined]  # of both kinds that are left
    blocks = 1 if type(placement) is TorchShard else placement.split_factor  # type: ignore[attr-defined]
    return SplitShard(shape, dim, mesh.get_local_rank(), mesh.size(), blocks)


def tied_weights(model: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Head and embedding when the configuration ties them; on a shard they may be two tensors."""
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "config"):
        return None
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    config = model.config.get_text_config(decoder=True)
    if head is None or not getattr(config, "tie_word_embeddings", False):
        return None
    return head.weight, embedding.weight
