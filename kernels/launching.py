"""What every Triton launch needs: the right device, tables of pointers, sizes of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import groupby

import torch
import triton
import triton.language as tl

WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""By bytes per element: a move looks at no value, so one kernel serves every dtype of a size."""

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Kernels run in Triton's interpreter, on CPU tensors (``TRITON_INTERPRET=1``)."""


@contextmanager
def on_device(tensor: torch.Tensor) -> Iterator[None]:
    """Triton launches on the current device, which need not be the tensor's."""
    if tensor.is_cuda:
        with torch.cuda.device(tensor.device):
            yield
    else:  # the interpreter
        yield


def pointers(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The address of every tensor: int64 ``[tensors]`` on their device."""
    return number_table(tuple(tensor.data_ptr() for tensor in tensors), tensors[0].device)


def number_table(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Numbers that a launch reads, int64 on ``device``; the same numbers are sent there once."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _table(numbers, device, stream)


@lru_cache(maxsize=512)
def _table(numbers: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    """Kept per stream: only there is the copy sure to come before a kernel that reads the table."""
    table = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


def alignment(*groups: Sequence[torch.Tensor]) -> int:
    """Bytes that every address in ``groups`` is a multiple of: 16, or the size of an element."""
    tensors = [tensor for group in groups for tensor in group]
    if all(tensor.data_ptr() % 16 == 0 for tensor in tensors):
        return 16
    return tensors[0].element_size()


def refuse_cut_spans(caches: Sequence[torch.Tensor]) -> None:
    """The kernels take a head's columns to follow each other in memory.

    Raises:
        ValueError: a cache is a view that leaves out part of every cell.
    """
    for cache in caches:
        if cache.stride(3) != 1 or cache.stride(2) != cache.shape[3]:
            raise ValueError(f"a cache's cells must be contiguous; its strides are {cache.stride()}")


def same_geometry(
    tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """``tensors`` and ``others``, pair by pair, in groups of pairs of equal shape, strides and dtype."""

    def geometry(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[object, ...]:
        return tuple((*t.shape, *t.stride(), t.element_size()) for t in pair)

    pairs = sorted(zip(tensors, others, strict=True), key=geometry)
    for _, group in groupby(pairs, key=geometry):
        members = list(group)
        yield [pair[0] for pair in members], [pair[1] for pair in members]


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``size`` and ``least``."""
    return max(least, int(triton.next_power_of_2(size)))
