"""The launches that stand for every kernel variant in use, to compile them without a GPU.

A variant is a kernel with one choice of its compile-time arguments. The cache moves look at sizes of
elements only; attention has one per dtype, pair of head dims and set of options; sampling has one per
set of flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from rollout_pool.kernels import (
    attention_triton,
    cache_triton,
    counter_hash_triton,
    prefix_attention_triton,
    sampling_triton,
)
from rollout_pool.kernels.prefix_reference import PrefixRows
from rollout_pool.kernels.sampling_reference import SamplingRows

VOCAB = 50_304
ATTENTION: dict[str, dict[str, Any]] = {
    "bf16 128": {"dtype": torch.bfloat16, "dims": (128, 128)},
    "bf16 128, all cells": {"dtype": torch.bfloat16, "dims": (128, 128), "window": None},
    "fp16 64": {"dtype": torch.float16, "dims": (64, 64), "group": 1},
    "fp16 80": {"dtype": torch.float16, "dims": (80, 80), "group": 1},
    "bf16 96": {"dtype": torch.bfloat16, "dims": (96, 96)},
    "bf16 192 and 128": {"dtype": torch.bfloat16, "dims": (192, 128), "group": 1},
    "bf16 64, sinks": {"dtype": torch.bfloat16, "dims": (64, 64), "group": 8, "sinks": True},
    "bf16 256, soft-cap": {"dtype": torch.bfloat16, "dims": (256, 256), "group": 2, "softcap": 50.0},
    "fp32 64": {"dtype": torch.float32, "dims": (64, 64)},
    "fp32 128, soft-cap, sinks": {
        "dtype": torch.float32, "dims": (128, 128), "softcap": 50.0, "sinks": True, "window": 4096,
    },
    "fp32 256": {"dtype": torch.float32, "dims": (256, 256), "group": 1},
}  # fmt: skip
SHARED: dict[str, dict[str, Any]] = {
    "bf16 128": {"dtype": torch.bfloat16, "dims": (128, 128)},
    "fp16 64, one head each": {"dtype": torch.float16, "dims": (64, 64), "group": 1},
    "bf16 192 and 128": {"dtype": torch.bfloat16, "dims": (192, 128), "group": 1},
    "bf16 64, sinks": {"dtype": torch.bfloat16, "dims": (64, 64), "group": 8, "sinks": True},
    "bf16 256, soft-cap": {"dtype": torch.bfloat16, "dims": (256, 256), "group": 2, "softcap": 50.0},
    "fp32 64": {"dtype": torch.float32, "dims": (64, 64)},
    "fp32 128, soft-cap, sinks": {
        "dtype": torch.float32, "dims": (128, 128), "softcap": 50.0, "sinks": True,
    },
}  # fmt: skip


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Names, and calls that launch the variants of that name on CPU tensors."""
    for words, dtype in (("2-byte", torch.bfloat16), ("4-byte", torch.float32)):
        yield f"cache moves, {words}", partial(_cache_moves, dtype, 64)
    yield "cache moves, 2-byte, odd head dim", partial(_cache_moves, torch.bfloat16, 5)
    yield "cache moves, many rows", _many_moves
    for name, options in ATTENTION.items():
        yield f"attention, {name}", partial(_attention, **options)
    for name, options in SHARED.items():
        yield f"shared prompts, {name}", partial(_attention, shares=True, **options)
    for flags in product((False, True), repeat=3):
        names = [name for name, on in zip(("adjusted", "filtered", "sampled"), flags, strict=True) if on]
        yield f"sampling, {' '.join(names) or 'greedy'}", partial(_sample, *flags)
    yield "sampling, odd vocabulary", partial(_sample, False, True, True, vocab=VOCAB + 1)
    yield "counter hash", _hash


def _cache_moves(dtype: torch.dtype, head_dim: int) -> None:
    caches = [torch.zeros(6, 2, 31, head_dim, dtype=dtype) for _ in range(2)]
    rows = torch.arange(2)
    cache_triton.expand_kv(caches, [cache[:1, :, :15].contiguous() for cache in caches], rows, 15)
    cache_triton.expand_in_place(caches, 2, 3, 15)
    cache_triton.compact_kv(caches, rows, rows, 15)
    cache_triton.trim_kv(caches, 15, 31)
    new = torch.zeros(2, 2, 1, head_dim, dtype=dtype)
    cache_triton.write_kv(caches[0], caches[1], new, new, torch.arange(4))


def _many_moves() -> None:
    """The larger tiles; and states of other sizes."""
    for moves, dtype in ((100, torch.bfloat16), (1000, torch.bfloat16), (1000, torch.float32)):
        rows = torch.arange(moves)
        cache_triton.compact_kv([torch.zeros(moves, 1, 4, 16, dtype=dtype)], rows, rows, 4)
    states = [torch.zeros(4, 16, dtype=torch.int64), torch.zeros(4, 16, dtype=torch.bool)]
    cache_triton.move_rows(states, torch.arange(2), torch.arange(2))


def _attention(
    dtype: torch.dtype,
    dims: tuple[int, int],
    group: int = 4,
    window: int | str | None = "per row",
    softcap: float | None = None,
    sinks: bool = False,
    shares: bool = False,
) -> None:
    """``window`` per row is what the engine passes. shares: with a prompt that is not in the slots."""
    rows, kv_heads, view = 2, 2, 2 * attention_triton.SPLIT
    keys, values = (torch.zeros(rows, kv_heads, view, dim, dtype=dtype) for dim in dims)
    lengths = torch.ones(rows, dtype=torch.int64)
    query = torch.zeros(rows, kv_heads * group, 1, dims[0], dtype=dtype)
    prior = None
    if shares:
        groups = PrefixRows(torch.arange(rows), (0, rows), tuple(range(rows)))
        prior = prefix_attention_triton.prefix_attention(
            query, [keys[:1]], [values[:1]], groups, scaling=0.1, softcap=softcap, seen=lengths
        )
    attention_triton.decode_attention(
        query,
        keys,
        values,
        lengths,
        scaling=0.1,
        window=lengths if isinstance(window, str) else window,
        softcap=softcap,
        sinks=torch.zeros(kv_heads * group, dtype=dtype) if sinks else None,
        prior=prior,
    )


def _sample(adjusted: bool, filtered: bool, sampled: bool, vocab: int = VOCAB) -> None:
    rows = 2
    floats, ints = torch.ones(rows), torch.ones(rows, dtype=torch.int64)
    settings = SamplingRows(
        temperature=floats, top_k=ints, top_p=floats, min_p=floats, penalty=floats,
        keys=torch.zeros(rows, 2, dtype=torch.int32), blocked=torch.zeros(rows, 1, dtype=torch.int64),
        seen=torch.zeros(rows, vocab, dtype=torch.bool) if adjusted else None,
        adjusted=adjusted, filtered=filtered, sampled=sampled,
    )  # fmt: skip
    sampling_triton.sample_tokens(torch.zeros(rows, vocab), settings, torch.zeros(vocab, dtype=torch.int32))


def _hash() -> None:
    counter_hash_triton.position_keys(torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int64))
