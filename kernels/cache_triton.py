"""Triton forms of the cache moves of :mod:`rollout_pool.kernels.reference`.

A row of a cache holds, for each KV head, its columns one after the other: the first n columns of a head
are one contiguous *span* of n * head_dim elements. Every kernel here copies spans, block by block, as
integers of the elements' size. Layers of equal shape go in one launch, through a table of pointers.

The in-place kernels need no temporary since one program owns a block of columns in all the rows it
touches: what it overwrites, no other program reads.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from rollout_pool.kernels import reference
from rollout_pool.kernels.launching import (
    WORDS,
    alignment,
    on_device,
    pointers,
    power_of_two,
    refuse_cut_spans,
    same_geometry,
)

BLOCK_BYTES = 4096
TILE = 8192
"""Elements of a move's tile: all moved rows by a block of columns."""
MOST_MOVES = 1024


@triton.jit
def _address(table, index, WORD: tl.constexpr, ALIGNMENT: tl.constexpr):
    address = tl.load(table + index).to(tl.pointer_type(WORD))
    return tl.multiple_of(address, ALIGNMENT)


@triton.jit(do_not_specialize=["num_slots"])
def expand_kernel(
    caches, prefixes, slots, num_slots, span, start, slot_stride, head_stride, prefix_head_stride,
    WORD: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    inside = at < span
    source = _address(prefixes, tl.program_id(2), WORD, ALIGNMENT) + head * prefix_head_stride
    target = _address(caches, tl.program_id(2), WORD, ALIGNMENT) + head * head_stride + start
    words = tl.load(source + at, mask=inside)
    for i in range(num_slots):
        tl.store(target + tl.load(slots + i) * slot_stride + at, words, mask=inside)


@triton.jit(do_not_specialize=["rows", "copies"])
def expand_in_place_kernel(
    caches, rows, copies, span, slot_stride, head_stride,
    WORD: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < span
    base = _address(caches, tl.program_id(2), WORD, ALIGNMENT) + tl.program_id(1).to(tl.int64) * head_stride
    base += at
    for i in range(rows):
        row = (rows - 1 - i).to(tl.int64)
        words = tl.load(base + row * slot_stride, mask=inside)
        tl.debug_barrier()  # every thread has read the row before one overwrites it
        for j in range(copies):
            tl.store(base + (row * copies + copies - 1 - j) * slot_stride, words, mask=inside)


@triton.jit(do_not_specialize=["num_moves"])
def move_kernel(
    caches, sources, targets, num_moves, span, slot_stride, head_stride,
    WORD: tl.constexpr, ALIGNMENT: tl.constexpr, MOVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    move = tl.arange(0, MOVES)
    listed = move < num_moves
    source = tl.load(sources + move, mask=listed, other=0) * slot_stride
    target = tl.load(targets + move, mask=listed, other=0) * slot_stride
    inside = listed[:, None] & (at < span)[None, :]
    base = _address(caches, tl.program_id(2), WORD, ALIGNMENT) + tl.program_id(1).to(tl.int64) * head_stride
    words = tl.load(base + source[:, None] + at[None, :], mask=inside)
    tl.debug_barrier()  # all rows are read before one is overwritten, so that any overlap is safe
    tl.store(base + target[:, None] + at[None, :], words, mask=inside)


@triton.jit
def trim_kernel(
    caches, shift, kept, slot_stride, head_stride,
    WORD: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    base = _address(caches, tl.program_id(2), WORD, ALIGNMENT)
    base += tl.program_id(1).to(tl.int64) * slot_stride + tl.program_id(0).to(tl.int64) * head_stride
    for first in range(0, kept, BLOCK):
        at = first + tl.arange(0, BLOCK)
        words = tl.load(base + shift + at, mask=at < kept)
        tl.debug_barrier()  # the block is read before its beginning is overwritten
        tl.store(base + at, words, mask=at < kept)


@triton.jit
def write_kernel(
    keys, values, new_keys, new_values, cells, kv_heads,
    key_row_stride, key_head_stride, value_row_stride, value_head_stride,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    vector = tl.program_id(0)
    row = (vector // kv_heads).to(tl.int64)
    head = vector % kv_heads
    cell = tl.load(cells + vector)
    at = tl.arange(0, KEY_BLOCK)
    key = tl.load(new_keys + row * key_row_stride + head * key_head_stride + at, mask=at < KEY_DIM)
    tl.store(keys + cell * KEY_DIM + at, key, mask=at < KEY_DIM)
    at = tl.arange(0, VALUE_BLOCK)
    value = tl.load(new_values + row * value_row_stride + head * value_head_stride + at, mask=at < VALUE_DIM)
    tl.store(values + cell * VALUE_DIM + at, value, mask=at < VALUE_DIM)


def expand_kv(
    caches: Sequence[torch.Tensor], prefixes: Sequence[torch.Tensor], slots: torch.Tensor, start: int = 0
) -> None:
    """See :func:`rollout_pool.kernels.reference.expand_kv`; a prefix is read once for all slots."""
    refuse_cut_spans(caches)
    for group, sources in same_geometry(caches, [_with_spans(prefix) for prefix in prefixes]):
        cache, prefix = group[0], sources[0]
        span, size = prefix.shape[2] * prefix.shape[3], cache.element_size()
        if span * len(slots) == 0:
            continue
        block = BLOCK_BYTES // size
        grid = (triton.cdiv(span, block), cache.shape[1], len(group))
        with on_device(cache):
            expand_kernel[grid](
                pointers(group), pointers(sources), slots, len(slots), span, start * cache.shape[3],
                cache.stride(0), cache.stride(1), prefix.stride(1),
                WORD=WORDS[size], ALIGNMENT=alignment(group, sources), BLOCK=block,
                enable_fp_fusion=False,
            )  # fmt: skip


def expand_in_place(caches: Sequence[torch.Tensor], rows: int, copies: int, length: int) -> None:
    """See :func:`rollout_pool.kernels.reference.expand_in_place`."""
    refuse_cut_spans(caches)
    for group, _ in same_geometry(caches, caches):
        cache = group[0]
        span, size = length * cache.shape[3], cache.element_size()
        if span * rows == 0 or copies == 1:
            continue
        block = BLOCK_BYTES // size
        grid = (triton.cdiv(span, block), cache.shape[1], len(group))
        with on_device(cache):
            expand_in_place_kernel[grid](
                pointers(group), rows, copies, span, cache.stride(0), cache.stride(1),
                WORD=WORDS[size], ALIGNMENT=alignment(group), BLOCK=block,
                enable_fp_fusion=False,
            )  # fmt: skip


def compact_kv(
    caches: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor, length: int
) -> None:
    """See :func:`rollout_pool.kernels.reference.compact_kv`; in place, overlapping or not."""
    refuse_cut_spans(caches)
    if source.shape[0] > MOST_MOVES:
        reference.compact_kv(caches, source, target, length)
        return
    for group, _ in same_geometry(caches, caches):
        _move(group, source, target, group[0].shape[1], length * group[0].shape[3])


def move_rows(states: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor) -> None:
    """See :func:`rollout_pool.kernels.reference.move_rows`; in place, overlapping or not."""
    if source.shape[0] > MOST_MOVES:
        reference.move_rows(states, source, target)
        return
    flat = [state.view(state.shape[0], -1) for state in states]
    for group, _ in same_geometry(flat, flat):
        _move(group, source, target, 1, group[0].shape[1])


def _move(
    group: list[torch.Tensor], source: torch.Tensor, target: torch.Tensor, heads: int, span: int
) -> None:
    """Move ``heads`` spans per row of every tensor of ``group``."""
    first, num_moves = group[0], source.shape[0]
    if span * num_moves == 0:
        return
    moves = next(size for size in (16, 128, MOST_MOVES) if num_moves <= size)
    block = max(16, TILE // moves)
    with on_device(first):
        move_kernel[(triton.cdiv(span, block), heads, len(group))](
            pointers(group), source, target, num_moves, span, first.stride(0), first.stride(1),
            WORD=WORDS[first.element_size()], ALIGNMENT=alignment(group), MOVES=moves, BLOCK=block,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip


def trim_kv(caches: Sequence[torch.Tensor], columns: int, length: int) -> None:
    """See :func:`rollout_pool.kernels.reference.trim_kv`; a program walks one head of one row."""
    refuse_cut_spans(caches)
    for group, _ in same_geometry(caches, caches):
        cache = group[0]
        kept, size = (length - columns) * cache.shape[3], cache.element_size()
        if kept <= 0 or columns == 0:
            continue
        with on_device(cache):
            trim_kernel[(cache.shape[1], cache.shape[0], len(group))](
                pointers(group), columns * cache.shape[3], kept, cache.stride(0), cache.stride(1),
                WORD=WORDS[size], ALIGNMENT=alignment(group), BLOCK=4 * BLOCK_BYTES // size,
                enable_fp_fusion=False,
            )  # fmt: skip


def write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    cells: torch.Tensor,
) -> None:
    """See :func:`rollout_pool.kernels.reference.write_kv`; one launch for a layer's keys and values."""
    refuse_cut_spans((keys, values))
    new_keys, new_values = (new if new.stride(3) == 1 else new.contiguous() for new in (new_keys, new_values))
    key_dim, value_dim = keys.shape[3], values.shape[3]
    with on_device(keys):
        write_kernel[(cells.shape[0],)](
            keys, values, new_keys, new_values, cells, new_keys.shape[1],
            new_keys.stride(0), new_keys.stride(1), new_values.stride(0), new_values.stride(1),
            KEY_DIM=key_dim, VALUE_DIM=value_dim,
            KEY_BLOCK=power_of_two(key_dim), VALUE_BLOCK=power_of_two(value_dim),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


def _with_spans(prefix: torch.Tensor) -> torch.Tensor:
    """``prefix`` with every head's cells contiguous, as they are unless a caller cut its head dim."""
    is_span = prefix.stride(3) == 1 and prefix.stride(2) == prefix.shape[3]
    return prefix if is_span else prefix.contiguous()
