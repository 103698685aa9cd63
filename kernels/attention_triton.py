"""Triton form of :func:`rollout_pool.kernels.reference.decode_attention`: split-KV, as in flash decoding.

A row's cells are cut into splits of a fixed *size*, at fixed columns. Every program reads the cells of
one split for all query heads of one KV head, so grouped heads share one read. A row whose cells lie in
one split is finished there; otherwise a second kernel adds up the splits in order. So the bits of a
row's result depend on its own cells alone: not on the other rows, nor on the length of the view.

Source: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference" (2023); the running
maximum and sum are those of Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_pool.kernels.launching import INTERPRETED, on_device, power_of_two, refuse_cut_spans
from rollout_pool.kernels.prefix_reference import Prior

SPLIT = 512
"""Cells per split: part of what a result's bits depend on."""
LARGEST_HEAD_DIM = 512
_REGISTERS = {} if torch.version.hip else {"maxnreg": 168}
"""Three programs of 128 threads per multiprocessor, as many as their shared memory allows: without saying
so, ptxas spills a little to make room for more."""


@triton.jit
def _first_cell(row, length, window, WINDOW: tl.constexpr):
    """The first cell that a row sees. WINDOW: 0 none, 1 one number for all rows, 2 a number per row."""
    if WINDOW == 0:
        first = length * 0
    elif WINDOW == 1:
        first = tl.maximum(length - window, 0)
    else:
        first = tl.maximum(length - tl.load(window + row).to(tl.int32), 0)
    return first


@triton.jit
def _finish(
    acc, total, highest, sinks, head, elsewhere, elsewhere_lse, num_parts, part_size, row_head, value_at,
    VALUE_DIM: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_PRIOR: tl.constexpr,
):  # fmt: skip
    """Weighted values over the sum of all weights. A sink adds to the sum and has no value.

    What attention to cells elsewhere gave is added part by part, in order.
    """
    if HAS_PRIOR:
        for part in range(num_parts):
            place = part * part_size + row_head
            lse = tl.load(elsewhere_lse + place)
            there = (lse > float("-inf"))[:, None] & (value_at < VALUE_DIM)[None, :]
            values = tl.load(
                elsewhere + place[:, None] * VALUE_DIM + value_at[None, :], mask=there, other=0.0
            )
            top = tl.maximum(highest, lse)
            before, now = tl.exp(highest - top), tl.exp(lse - top)
            total = total * before + now
            acc = acc * before[:, None] + values.to(tl.float32) * now[:, None]
            highest = top
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        top = tl.maximum(highest, sink)
        scale = tl.exp(highest - top)
        total = total * scale + tl.exp(sink - top)
        acc = acc * scale[:, None]
    return acc / total[:, None]


@triton.jit(do_not_specialize=["window", "num_splits", "num_parts"])
def split_kernel(
    query, keys, values, lengths, window, sinks, elsewhere, elsewhere_lse, out, partial, stats,
    num_splits, num_parts, scaling, softcap,
    query_row_stride, query_head_stride, key_row_stride, key_head_stride, value_row_stride, value_head_stride,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_PRIOR: tl.constexpr,
    SPLIT: tl.constexpr, GROUP_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    first = _first_cell(row, length, window, WINDOW)
    begin = tl.maximum(first, split * SPLIT)
    stop = tl.minimum(length, (split + 1) * SPLIT)
    if begin >= stop:
        return

    member = tl.arange(0, GROUP_BLOCK)
    head = kv_head * GROUP + tl.minimum(member, GROUP - 1)  # the heads that fill up the block are not stored
    at = tl.arange(0, KEY_BLOCK)
    value_at = tl.arange(0, VALUE_BLOCK)
    q = tl.load(
        query + row * query_row_stride + head[:, None] * query_head_stride + at[None, :],
        mask=(at < KEY_DIM)[None, :], other=0.0,
    )  # fmt: skip
    if WIDEN:
        q = q.to(tl.float32)
    key_base = keys + row * key_row_stride + kv_head.to(tl.int64) * key_head_stride
    value_base = values + row * value_row_stride + kv_head.to(tl.int64) * value_head_stride
    highest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, VALUE_BLOCK], tl.float32)
    for start in range(begin // BLOCK * BLOCK, stop, BLOCK):
        cell = start + tl.arange(0, BLOCK)
        seen = (cell >= begin) & (cell < stop)
        k = tl.load(
            key_base + cell[:, None] * KEY_DIM + at[None, :],
            mask=seen[:, None] & (at < KEY_DIM)[None, :], other=0.0,
        )  # fmt: skip
        if WIDEN:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), which an infinite exponential leaves right.
            scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))
        scores = tl.where(seen[None, :], scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, axis=1))
        scale = tl.exp(highest - top)
        weights = tl.exp(scores - top[:, None])
        total = total * scale + tl.sum(weights, axis=1)
        v = tl.load(
            value_base + cell[:, None] * VALUE_DIM + value_at[None, :],
            mask=seen[:, None] & (value_at < VALUE_DIM)[None, :], other=0.0,
        )  # fmt: skip
        weights = weights.to(v.dtype)
        if WIDEN:
            weights, v = weights.to(tl.float32), v.to(tl.float32)
        acc = acc * scale[:, None] + tl.dot(weights, v, input_precision="ieee")
        highest = top

    row_head = row * tl.num_programs(1) * GROUP + head
    stored = (member < GROUP)[:, None] & (value_at < VALUE_DIM)[None, :]
    if first // SPLIT == (length - 1) // SPLIT:
        part_size = tl.num_programs(2) * tl.num_programs(1) * GROUP
        result = _finish(
            acc, total, highest, sinks, head, elsewhere, elsewhere_lse, num_parts, part_size, row_head,
            value_at, VALUE_DIM, HAS_SINKS, HAS_PRIOR,
        )  # fmt: skip
        cells = out + row_head[:, None] * VALUE_DIM + value_at[None, :]
        tl.store(cells, result.to(out.dtype.element_ty), mask=stored)
    else:
        place = row_head * num_splits + split
        tl.store(partial + place[:, None] * VALUE_DIM + value_at[None, :], acc, mask=stored)
        tl.store(stats + place * 2, highest, mask=member < GROUP)
        tl.store(stats + place * 2 + 1, total, mask=member < GROUP)


@triton.jit(do_not_specialize=["window", "num_splits", "num_parts"])
def reduce_kernel(
    lengths, window, sinks, elsewhere, elsewhere_lse, out, partial, stats, num_splits, num_parts,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_PRIOR: tl.constexpr, SPLIT: tl.constexpr, GROUP_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    first_split = _first_cell(row, length, window, WINDOW) // SPLIT
    last_split = (length - 1) // SPLIT
    if first_split >= last_split:
        return
    member = tl.arange(0, GROUP_BLOCK)
    head = kv_head * GROUP + tl.minimum(member, GROUP - 1)
    row_head = row * tl.num_programs(0) * GROUP + head
    at = tl.arange(0, VALUE_BLOCK)
    stored = (member < GROUP)[:, None] & (at < VALUE_DIM)[None, :]
    highest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, VALUE_BLOCK], tl.float32)
    for split in range(first_split, last_split + 1):
        place = row_head * num_splits + split
        split_highest = tl.load(stats + place * 2)
        top = tl.maximum(highest, split_highest)
        before, now = tl.exp(highest - top), tl.exp(split_highest - top)
        total = total * before + tl.load(stats + place * 2 + 1) * now
        values = tl.load(partial + place[:, None] * VALUE_DIM + at[None, :], mask=stored, other=0.0)
        acc = acc * before[:, None] + values * now[:, None]
        highest = top
    part_size = tl.num_programs(1) * tl.num_programs(0) * GROUP
    result = _finish(
        acc, total, highest, sinks, head, elsewhere, elsewhere_lse, num_parts, part_size, row_head,
        at, VALUE_DIM, HAS_SINKS, HAS_PRIOR,
    )  # fmt: skip
    tl.store(out + row_head[:, None] * VALUE_DIM + at[None, :], result.to(out.dtype.element_ty), mask=stored)


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    scaling: float,
    window: int | torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    prior: Prior | None = None,
) -> torch.Tensor:
    """See :func:`rollout_pool.kernels.reference.decode_attention`. Takes lengths, and no mask.

    Cells that a row does not see are not read. A row of length 0 has an undefined result.
    """
    if visible is not None or lengths is None:
        raise ValueError("the Triton form of decode_attention takes lengths and a window, not a mask")
    refuse_cut_spans((keys, values))
    rows, heads, _, key_dim = query.shape
    kv_heads, value_dim, num_splits = keys.shape[1], values.shape[3], triton.cdiv(keys.shape[2], SPLIT)
    if max(key_dim, value_dim) > LARGEST_HEAD_DIM:
        raise ValueError(f"head dims up to {LARGEST_HEAD_DIM} are supported, not {key_dim} and {value_dim}")
    query = query if query.stride(3) == 1 else query.contiguous()
    lengths, window = (
        lengths.contiguous(),
        window.contiguous() if isinstance(window, torch.Tensor) else window,
    )
    out = torch.empty(rows, heads, 1, value_dim, dtype=query.dtype, device=query.device)
    partial, stats = _workspace(out, num_splits)
    cells = (keys.stride(0), keys.stride(1), values.stride(0), values.stride(1))
    elsewhere, elsewhere_lse = (None, None) if prior is None else (part.contiguous() for part in prior)
    num_parts = 0 if elsewhere is None else elsewhere.shape[0]
    group = heads // kv_heads
    block, stages = _blocks(keys, values)
    threads = {"num_warps": 8} if keys.element_size() == 4 else {"num_warps": 4, **_REGISTERS}
    shapes = {
        "GROUP": group, "VALUE_DIM": value_dim, "VALUE_BLOCK": power_of_two(value_dim, 16), "SPLIT": SPLIT,
        "WINDOW": _window_kind(window), "HAS_SINKS": sinks is not None,
        "HAS_PRIOR": prior is not None,
    }  # fmt: skip
    with on_device(query):
        split_kernel[(num_splits, kv_heads, rows)](
            query, keys, values, lengths, window, sinks, elsewhere, elsewhere_lse, out, partial, stats,
            num_splits, num_parts, scaling, softcap, query.stride(0), query.stride(1), *cells,
            KEY_DIM=key_dim, HAS_SOFTCAP=softcap is not None,
            GROUP_BLOCK=power_of_two(group, 16), KEY_BLOCK=power_of_two(key_dim, 16),
            BLOCK=block, WIDEN=INTERPRETED and keys.dtype == torch.bfloat16,
            **shapes, **threads, num_stages=stages, enable_fp_fusion=True,
        )  # fmt: skip
        if num_splits > 1:
            reduce_kernel[(kv_heads, rows)](
                lengths, window, sinks, elsewhere, elsewhere_lse, out, partial, stats, num_splits, num_parts,
                GROUP_BLOCK=power_of_two(group), **shapes, num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip
    return out


def _workspace(out: torch.Tensor, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for what every split of every head leaves: weighted values, and (maximum, sum of weights)."""
    rows, heads, _, value_dim = out.shape
    per_split = rows * heads * num_splits if num_splits > 1 else 0
    floats = torch.empty(per_split * (value_dim + 2), dtype=torch.float32, device=out.device)
    return floats[: per_split * value_dim], floats[per_split * value_dim :]


def _window_kind(window: int | torch.Tensor | None) -> int:
    if window is None:
        return 0
    return 2 if isinstance(window, torch.Tensor) else 1


def _blocks(keys: torch.Tensor, values: torch.Tensor) -> tuple[int, int]:
    """Cells read at once, a divisor of :data:`SPLIT`, and how many such blocks are on their way."""
    widest = power_of_two(max(keys.shape[3], values.shape[3]), 16) * keys.element_size()
    block = min(64, max(16, 16384 // widest))
    return block, 3 if block * widest <= 16384 else 2
