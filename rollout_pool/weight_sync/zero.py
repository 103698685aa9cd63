"""Full tensors out of DeepSpeed's ZeRO-3, a bucket at a time.

A partitioned parameter says 0 of its ``numel`` and has no data outside of a gather; what is taken within
one must be copied before it ends, for DeepSpeed frees the memory then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def is_partitioned(module: torch.nn.Module) -> bool:
    """Whether ZeRO-3 holds some parameter of ``module``."""
    return any(hasattr(parameter, "ds_numel") for parameter in module.parameters())


def gathered(
    tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int, *, keep: bool
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Copies on the CPU, gathered together as long as they have no more than ``max_bytes``.

    Every rank of the trainer must go through this at the same time; with ``keep`` false a rank gathers,
    and yields nothing. It takes up to two buckets on every rank (what is gathered, and DeepSpeed's buffer
    for that), and one more in host memory where they are kept; never the model.
    """
    import deepspeed

    for bucket in _buckets(tensors, max_bytes):
        copies = []
        with deepspeed.zero.GatheredParameters(
            [tensor for _, tensor in bucket if hasattr(tensor, "ds_numel")]
        ):
            if keep:
                copies = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in bucket]
        if keep:
            yield copies


def _buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        nbytes = _numel(tensor) * tensor.element_size()
        if bucket and size + nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += nbytes
    if bucket:
        yield bucket


def _numel(tensor: Any) -> int:
    return int(getattr(tensor, "ds_numel", tensor.numel()))
