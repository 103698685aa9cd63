"""What a trainer holds, as groups of full tensors of bounded size.

Nothing here copies a model: a group is made when it is asked for, and may be dropped before the next.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rollout_pool.actors.weight_packing import DEFAULT_BUCKET_BYTES, Named, grouped
from rollout_pool.actors.weight_places import persistent_buffers
from rollout_pool.actors.weight_records import LoraRecord
from rollout_pool.errors import ConfigError
from rollout_pool.weight_sync.checkpoint_source import checkpoint_tensors
from rollout_pool.weight_sync.peft_source import adapters, has_adapters
from rollout_pool.weight_sync.zero import gathered, is_partitioned


@dataclass(frozen=True)
class Source:
    """Tensors to send. Of a trainer with several ranks, every rank makes one and goes through it."""

    groups: Iterator[list[Named]]
    """On every rank but the first: empty, but going through it is this rank's part of gathering."""
    loras: tuple[LoraRecord, ...] = ()
    is_first_rank: bool = True


def open_source(source: Any, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Source:
    """How to read ``source``.

    Args:
        source: a state dict or another mapping of names to tensors; an iterable of (name, tensor); a folder
            of a checkpoint or a safetensors file; a module, also one wrapped by DDP, torch.compile, DeepSpeed
            (at every ZeRO stage) or PEFT. Of one with LoRA adapters, only these are sent.
        bucket_bytes: the most that a group holds, if it holds more than one tensor.

    Raises :class:`ConfigError` for anything else, and for adapters that cannot be merged exactly.
    """
    if isinstance(source, str | os.PathLike):
        return _plain(checkpoint_tensors(Path(source)), bucket_bytes)
    if isinstance(source, Mapping):
        return _plain(source.items(), bucket_bytes)
    module = unwrapped(source)
    if isinstance(module, torch.nn.Module):
        return _of_module(module, bucket_bytes)
    if isinstance(source, Iterable):
        return _plain(source, bucket_bytes)
    raise ConfigError(
        f"cannot read weights from {type(source).__name__}: pass a state dict, an iterable of "
        "(name, tensor), a checkpoint's path, a module or a DeepSpeed engine"
    )


def unwrapped(source: Any) -> Any:
    """The module inside DDP, a DeepSpeed engine or torch.compile."""
    while True:
        inner = getattr(source, "_orig_mod", None)
        if inner is None and type(source).__name__ in ("DistributedDataParallel", "DeepSpeedEngine"):
            inner = source.module
        if inner is None:
            return source
        source = inner


def _plain(tensors: Iterable[Named], bucket_bytes: int) -> Source:
    return Source(grouped(map(_full, tensors), bucket_bytes))


def _of_module(module: torch.nn.Module, bucket_bytes: int) -> Source:
    loras: tuple[LoraRecord, ...] = ()
    tensors: Iterable[Named]
    if has_adapters(module):
        loras, tensors = adapters(module)
    else:
        tensors = itertools.chain(module.named_parameters(), persistent_buffers(module))
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if is_partitioned(module):
        return Source(gathered(tensors, bucket_bytes, keep=is_first), loras, is_first)
    # Each rank has all of them; only the first sends.
    groups = grouped(map(_full, tensors), bucket_bytes) if is_first else iter(())
    return Source(groups, loras, is_first)


def _full(named: Named) -> Named:
    """The same, unless there is less in it than a full tensor."""
    name, tensor = named
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{name}: weights are tensors, got {type(tensor).__name__}")
    if isinstance(tensor, DTensor):
        raise ConfigError(f"{name} is a DTensor: pass (name, tensor.full_tensor()) pairs, on every rank")
    if hasattr(tensor, "ds_numel") and tensor.numel() != tensor.ds_numel:
        raise ConfigError(f"{name} is partitioned by ZeRO-3: pass the engine or its module, on every rank")
    if tensor.is_meta:
        raise ConfigError(f"{name} has no data (it is on the meta device)")
    return named
