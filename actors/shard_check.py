"""Whether a rank's tensors are its parts of the checkpoint's, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from rollout_pool.actors.checkpoint import Checkpoint
from rollout_pool.actors.checksums import checksum
from rollout_pool.actors.rank_records import Share
from rollout_pool.actors.weight_places import split_candidates, tied_weights

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_shares(model: PreTrainedModel, checkpoint: Checkpoint, rank: int, size: int) -> list[Share]:
    """Compare every tensor of rank ``rank``'s shard with the checkpoint, one at a time.

    The checkpoint is the only source: how the model was to be split is not asked, but found. A parameter
    that the checkpoint does not have is reported as such, unless it is tied to one that it has.
    """
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    dtypes = {name: tensor.dtype for name, tensor in named.items()}
    shares: list[Share] = []
    seen: set[int] = set()
    for name, full in checkpoint.tensors(model, dtypes):
        if id(named[name]) not in seen:
            seen.add(id(named[name]))
            shares.append(compare(name, _local(named[name]), full, rank, size))
    tied = _untied_head(model)
    for name, parameter in model.named_parameters():
        if id(parameter) in seen:
            continue
        local = _local(parameter)
        whole = checkpoint.tensor(tied[name], model, dtypes) if name in tied else None
        shares.append(_unknown(name, local) if whole is None else compare(name, local, whole, rank, size))
    return shares


def compare(name: str, local: torch.Tensor, full: torch.Tensor, rank: int, size: int) -> Share:
    """``local`` against the part of ``full`` that it comes closest to. Both on the CPU, in one dtype."""
    best: tuple[int, str, torch.Tensor] | None = None
    for layout, part in parts(full, local.shape, rank, size):
        num_wrong = int((_bits(local) != _bits(part)).sum())
        if best is None or num_wrong < best[0]:
            best = (num_wrong, layout, part)
        if num_wrong == 0:
            break
    if best is None:
        return _unknown(name, local, full)
    num_wrong, layout, part = best
    error = (local.double() - part.double()).abs().nan_to_num(nan=float("inf"))
    return Share(
        name=name,
        layout=layout,
        elements=local.numel(),
        full_elements=full.numel(),
        num_wrong=num_wrong,
        largest_error=float(error.max()) if num_wrong else 0.0,
        total=float(local.double().sum()),
        full_total=float(full.double().sum()),
        checksum=checksum(local),
        expected=checksum(part),
    )


def parts(full: torch.Tensor, shape: torch.Size, rank: int, size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every part of ``full`` with this shape that rank ``rank`` of ``size`` may hold, with its name.

    All of it, or an equal slice of one dimension, or the same of each of a few equal blocks that were fused
    along it.
    """
    if full.shape == shape:
        yield "replicated", full
    if size == 1 or full.dim() != len(shape):
        return
    for shard in split_candidates(full.shape, rank, size):
        wanted = [n // size if dim == shard.dim else n for dim, n in enumerate(full.shape)]
        if list(shape) == wanted:
            of_blocks = f" of {shard.blocks} blocks" if shard.blocks > 1 else ""
            yield f"split in dimension {shard.dim}{of_blocks}", shard.take(full)


def _unknown(name: str, local: torch.Tensor, full: torch.Tensor | None = None) -> Share:
    total, size = float(local.double().sum()), local.numel()
    full_size, full_total = (0, 0.0) if full is None else (full.numel(), float(full.double().sum()))
    return Share(name, "unknown", size, full_size, size, float("inf"), total, full_total, checksum(local), "")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()]) if tensor.dtype != torch.bool else tensor


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().cpu()


def _untied_head(model: PreTrainedModel) -> dict[str, str]:
    """A head that is a tensor of its own here, though the checkpoint has it once, as the embedding."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    head, embedding = (names.get(id(tensor)) for tensor in tied_weights(model) or (None, None))
    return {head: embedding} if head is not None and embedding is not None else {}
