"""Triton form of :func:`rollout_pool.kernels.prefix_reference.prefix_attention`: all groups in one launch.

The rows of a group are cut into tiles of as many rows as fill one block of a matrix product, with all query
heads of one KV head; a program multiplies one tile by one split of the group's prompt, which it reads once
for all of them. Splits have a fixed *size*, at fixed cells, and each is a part of its own in the result: what
adds the row's own cells adds the parts in order. A product's rows do not know of each other, so the bits of a
row's result depend on its own query and prompt alone: ``apart`` changes nothing here.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
import triton
import triton.language as tl

from rollout_pool.kernels.launching import (
    INTERPRETED,
    number_table,
    on_device,
    power_of_two,
    refuse_cut_spans,
)
from rollout_pool.kernels.prefix_reference import PrefixRows, Prior

SPLIT = 1024
"""Cells per split: part of what a result's bits depend on."""
LARGEST_HEAD_DIM = 512
DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_ENTRY = tl.constexpr(5)
"""Numbers per group: addresses of keys and values, elements from head to head in each, cells."""
_TILE = tl.constexpr(3)
"""Numbers per tile: its group, its first member, its rows."""


@triton.jit
def prefix_kernel(
    query, table, members, tiles, seen, out, lse, scaling, softcap, part_size,
    query_row_stride, query_head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HAS_SEEN: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, ROW_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0) * _TILE
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    entry = table + tl.load(tile) * _ENTRY
    length = tl.load(entry + 4).to(tl.int32)
    begin = split * SPLIT
    stop = tl.minimum(length, begin + SPLIT)
    if begin >= stop:
        return

    line = tl.arange(0, ROW_BLOCK)
    count = tl.load(tile + 2).to(tl.int32)
    member = line // GROUP
    row = tl.load(members + tl.load(tile + 1) + tl.minimum(member, count - 1))
    head = kv_head * GROUP + line % GROUP
    at = tl.arange(0, KEY_BLOCK)
    value_at = tl.arange(0, VALUE_BLOCK)
    q = tl.load(
        query + row[:, None] * query_row_stride + head[:, None] * query_head_stride + at[None, :],
        mask=(at < KEY_DIM)[None, :], other=0.0,
    )  # fmt: skip
    if WIDEN:
        q = q.to(tl.float32)
    hidden = tl.zeros([ROW_BLOCK], tl.int32)
    if HAS_SEEN:
        hidden = tl.maximum(length - tl.load(seen + row).to(tl.int32), 0)
    start = tl.maximum(begin, tl.min(hidden, axis=0) // BLOCK * BLOCK)  # at a cell that no sibling moves
    keys = tl.multiple_of(tl.load(entry).to(tl.pointer_type(DTYPE)), ALIGNMENT)
    values = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(DTYPE)), ALIGNMENT)
    keys += kv_head * tl.load(entry + 2)
    values += kv_head * tl.load(entry + 3)
    highest = tl.full([ROW_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([ROW_BLOCK], tl.float32)
    acc = tl.zeros([ROW_BLOCK, VALUE_BLOCK], tl.float32)
    for first in range(start, stop, BLOCK):
        cell = first + tl.arange(0, BLOCK)
        there = cell < stop
        k = tl.load(
            keys + cell[:, None] * KEY_DIM + at[None, :],
            mask=there[:, None] & (at < KEY_DIM)[None, :], other=0.0,
        )  # fmt: skip
        if WIDEN:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if HAS_SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))
        visible = there[None, :] & (cell[None, :] >= hidden[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, axis=1))
        base = tl.where(top == float("-inf"), 0.0, top)  # of a row that has seen nothing yet
        scale = tl.exp(highest - base)
        weights = tl.exp(scores - base[:, None])
        total = total * scale + tl.sum(weights, axis=1)
        v = tl.load(
            values + cell[:, None] * VALUE_DIM + value_at[None, :],
            mask=there[:, None] & (value_at < VALUE_DIM)[None, :], other=0.0,
        )  # fmt: skip
        weights = weights.to(v.dtype)
        if WIDEN:
            weights, v = weights.to(tl.float32), v.to(tl.float32)
        acc = acc * scale[:, None] + tl.dot(weights, v, input_precision="ieee")
        highest = top

    place = split * part_size + row * HEADS + head
    stored = (member < count) & (total > 0)
    cells = out + place[:, None] * VALUE_DIM + value_at[None, :]
    tl.store(cells, acc / total[:, None], mask=stored[:, None] & (value_at < VALUE_DIM)[None, :])
    tl.store(lse + place, highest + tl.log(total), mask=stored)


def prefix_attention(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    groups: PrefixRows,
    *,
    scaling: float,
    softcap: float | None = None,
    seen: torch.Tensor | None = None,
    apart: bool = False,
) -> Prior:
    """See :func:`rollout_pool.kernels.prefix_reference.prefix_attention`. One part per split of the longest.

    Values of a row that has no cells in a part are undefined, where the reference has zeros.
    """
    refuse_cut_spans([*keys, *values])
    rows, heads, _, key_dim = query.shape
    kv_heads, value_dim = values[0].shape[1], values[0].shape[3]
    if max(key_dim, value_dim) > LARGEST_HEAD_DIM:
        raise ValueError(f"head dims up to {LARGEST_HEAD_DIM} are supported, not {key_dim} and {value_dim}")
    query = query if query.stride(3) == 1 else query.contiguous()
    group = heads // kv_heads
    widest = power_of_two(max(key_dim, value_dim), 16) * keys[0].element_size()
    is_wide = keys[0].element_size() == 4
    rows_per_tile = max(1, min(64, 8192 // widest) // group)  # more would not fit the registers
    tiles = _tiles(groups.starts, rows_per_tile)
    longest = max(key.shape[2] for key in keys)
    num_parts = triton.cdiv(longest, SPLIT)
    out = torch.empty(num_parts, rows, heads, value_dim, dtype=torch.float32, device=query.device)
    lse = torch.full((num_parts, rows, heads), float("-inf"), dtype=torch.float32, device=query.device)
    with on_device(query):
        prefix_kernel[(len(tiles) // _TILE.value, kv_heads, num_parts)](
            query, number_table(_entries(keys, values), query.device), groups.rows,
            number_table(tiles, query.device), seen if seen is None else seen.contiguous(), out, lse,
            scaling, softcap, rows * heads, query.stride(0), query.stride(1),
            HEADS=heads, GROUP=group, KEY_DIM=key_dim, VALUE_DIM=value_dim, HAS_SEEN=seen is not None,
            HAS_SOFTCAP=softcap is not None, SPLIT=SPLIT, ROW_BLOCK=power_of_two(rows_per_tile * group, 16),
            KEY_BLOCK=power_of_two(key_dim, 16), VALUE_BLOCK=power_of_two(value_dim, 16),
            BLOCK=min(64, max(16, (8192 if is_wide else 16384) // widest)), DTYPE=DTYPES[keys[0].dtype],
            ALIGNMENT=_alignment(keys, values), WIDEN=INTERPRETED and keys[0].dtype == torch.bfloat16,
            num_warps=8 if is_wide or widest >= 512 else 4, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip
    return out, lse


@lru_cache(maxsize=64)
def _tiles(starts: tuple[int, ...], rows_per_tile: int) -> tuple[int, ...]:
    """Group, first member and rows of every tile, one after the other."""
    tiles: list[int] = []
    for number, (start, stop) in enumerate(pairwise(starts)):
        for first in range(start, stop, rows_per_tile):
            tiles += (number, first, min(rows_per_tile, stop - first))
    return tuple(tiles)


def _entries(keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> tuple[int, ...]:
    entries: list[int] = []
    for key, value in zip(keys, values, strict=True):
        entries += (key.data_ptr(), value.data_ptr(), key.stride(1), value.stride(1), key.shape[2])
    return tuple(entries)


def _alignment(keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> int:
    """Bytes that every head of every prompt begins at a multiple of: 16, or the size of an element."""
    size = keys[0].element_size()
    tensors = [*keys, *values]
    is_aligned = all(t.data_ptr() % 16 == 0 and t.stride(1) * size % 16 == 0 for t in tensors)
    return 16 if is_aligned else size
