"""Part a, the cache moves: equal bits in every cell, inside the caches and around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from gpu.draws import DTYPES, Draw, GuardedCaches
from gpu.parts import Row, Setting, Step
from rollout_pool.kernels import cache_triton, reference

Shape = tuple[int, int, int, int]
Call = Callable[[Any, list[torch.Tensor]], object]
Case = tuple[str, Call]
TINY: list[Shape] = [(7, 3, 13, 5), (2, 1, 1, 1), (5, 2, 32, 16)]
REAL: list[Shape] = [*TINY, (33, 8, 700, 128), (9, 5, 257, 80), (700, 2, 9, 24), (1100, 1, 3, 16)]
SHIFTS = (0, 1, 3, 8)


def _dims(shape: Shape) -> tuple[int, ...]:
    """Head dims of the tensors that move together: two layers alike, and one of its own."""
    return (shape[3], shape[3] + 1, shape[3])


def expand_kv(shape: Shape, dtype: torch.dtype, draw: Draw) -> Iterator[Case]:
    """Whole prefixes, and the last tokens of longer ones, whose heads are not side by side."""
    slots, heads, length, _ = shape
    for is_cut in (False, True):
        tokens = draw.number(1, length)
        start, chosen = draw.number(0, length - tokens), draw.rows(slots, draw.number(1, slots))
        long = [draw.bits((1, heads, tokens + 4, dim), dtype) for dim in _dims(shape)]
        prefixes = [one[:, :, 4:] if is_cut else one[:, :, :tokens].contiguous() for one in long]
        yield (
            f"{tokens} tokens into {len(chosen)} slots from column {start}{', a cut' if is_cut else ''}",
            lambda form, caches, p=prefixes, c=chosen, s=start: form.expand_kv(caches, p, c, s),
        )


def expand_in_place(shape: Shape, dtype: torch.dtype, draw: Draw) -> Iterator[Case]:
    slots = shape[0]
    for rows in {1, 2, draw.number(1, slots), slots}:
        copies, length = slots // rows, draw.number(1, shape[2])
        yield (
            f"{rows} rows, {copies} copies, {length} columns",
            lambda form, caches, r=rows, c=copies, n=length: form.expand_in_place(caches, r, c, n),
        )


def _move_lists(slots: int, draw: Draw) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Move lists by name: (source, target)."""
    ring = torch.arange(slots, device=draw.device)
    yield "one far move", ring[-1:], ring[:1]
    yield "a swap", ring[[0, slots - 1]], ring[[slots - 1, 0]]
    yield "a cycle of all rows", ring, ring.roll(-1)
    yield "a shuffle of all rows", ring, draw.rows(slots, slots)
    count = draw.number(1, slots)
    yield "any sources, repeated too", draw.any_rows(slots, count), draw.rows(slots, count)


def compact_kv(shape: Shape, dtype: torch.dtype, draw: Draw) -> Iterator[Case]:
    for name, source, target in _move_lists(shape[0], draw):
        length = draw.number(1, shape[2])
        yield (
            f"{name}, {length} columns",
            lambda form, caches, s=source, t=target, n=length: form.compact_kv(caches, s, t, n),
        )


def move_rows(shape: Shape, dtype: torch.dtype, draw: Draw) -> Iterator[Case]:
    for name, source, target in _move_lists(shape[0], draw):
        yield name, lambda form, states, s=source, t=target: form.move_rows(states, s, t)


def trim_kv(shape: Shape, dtype: torch.dtype, draw: Draw) -> Iterator[Case]:
    """Shifts of one column, of nearly all, and between: shorter and longer than a block of the walk."""
    length = shape[2]
    for columns in {min(1, length - 1), length - 1, draw.number(0, length - 1)}:
        used = draw.number(columns, length)
        yield (
            f"{columns} of {used} columns",
            lambda form, caches, c=columns, n=used: form.trim_kv(caches, c, n),
        )


def write_kv(shape: Shape, dtype: torch.dtype, draw: Draw) -> Iterator[Case]:
    """New keys as a model makes them (a transposed view), new values as a cut of something wider."""
    slots, heads, length, dim = shape
    rows = draw.number(1, slots)
    keys = draw.bits((rows, 1, heads, dim), dtype).transpose(1, 2)
    values = draw.bits((rows, heads, 1, 2 * dim + 3), dtype)[..., 1 : dim + 2]
    first = torch.arange(rows * heads, device=draw.device).view(rows, heads) * length
    cells = (first + draw.any_rows(length, rows).unsqueeze(1)).flatten()
    strided = values.transpose(2, 3).contiguous().transpose(2, 3)  # no stride is 1
    for name, new in (("a cut", values), ("strided", strided)):
        yield (
            f"{rows} rows, values {name}",
            lambda form, caches, v=new: form.write_kv(caches[0], caches[1], keys, v, cells),
        )


KERNELS = (expand_kv, expand_in_place, compact_kv, move_rows, trim_kv, write_kv)


def check(setting: Setting, kernel: Callable[..., Iterator[Case]], dtype_name: str) -> list[Row]:
    """All cases of a kernel in one dtype, each on fresh bits."""
    name, dtype = f"{kernel.__name__}, {dtype_name}", DTYPES[dtype_name]
    draw, count, faults = Draw(setting, name), 0, []
    for shape in TINY if setting.is_dry else REAL:
        for case, call in kernel(shape, dtype, draw):
            shapes = [(*shape[:3], dim) for dim in _dims(shape)]
            caches = GuardedCaches(shapes, dtype, draw, SHIFTS[count % len(SHIFTS)])
            fault = caches.difference(call, reference, cache_triton)
            count += 1
            if fault:
                faults.append(f"{list(shape)}, {case}: {fault}")
    seen = f"{count} cases, every cell as it should be"
    if faults:
        seen = f"{len(faults)} of {count} cases wrong; first: {faults[0]}"
    return [Row(name, seen, not faults, {"cases": count, "wrong": faults})]


def steps(setting: Setting) -> list[Step]:
    if setting.is_dry:
        cache_triton.BLOCK_BYTES = 256  # several blocks of small shapes
    return [
        Step(f"{kernel.__name__}, {dtype}", partial(check, setting, kernel, dtype))
        for kernel in KERNELS
        for dtype in DTYPES
    ]
