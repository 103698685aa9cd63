"""Part c: what the kernels reach of the bandwidth of a device-to-device copy measured in the same run.

Bytes are those that the work needs: each input read once, each output written once. The caches are bf16 with
8 KV heads of 128, as in models of 7B parameters with grouped heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import torch

from gpu.draws import Draw
from gpu.parts import Row, Setting, Step
from gpu.sampling import rows_of
from gpu.timing import copy_bandwidth, median_seconds
from rollout_pool.kernels import attention_triton, cache_triton, counter_hash, sampling_triton

HEADS, KV_HEADS, DIM = 32, 8, 128


class Bench:
    """The caches of a few layers, and the copy to compare with."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.slots, self.columns, self.layers = (8, 16, 1) if setting.is_dry else (64, 2048, 16)
        if not setting.is_dry:  # at most a third of the free memory
            layer = 2 * self.slots * KV_HEADS * self.columns * DIM * 2
            free, _ = torch.cuda.mem_get_info(setting.device)
            self.layers = max(1, min(self.layers, int(free // 3 // layer)))

    @cached_property
    def copy(self) -> float:
        return copy_bandwidth(self.setting)

    @cached_property
    def caches(self) -> list[torch.Tensor]:
        shape = (self.slots, KV_HEADS, self.columns, DIM)
        return [
            torch.randn(shape, dtype=torch.bfloat16, device=self.setting.device)
            for _ in range(2 * self.layers)
        ]

    def cell_bytes(self) -> int:
        """Of one column of one row, in all caches together."""
        return len(self.caches) * KV_HEADS * DIM * 2

    def rows(self, *numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, device=self.setting.device)

    def row(self, name: str, num_bytes: float, call: Callable[[], object]) -> list[Row]:
        seconds = median_seconds(self.setting, call)
        reached = num_bytes / seconds
        seen = f"{reached / self.copy:.0%} of the copy ({reached / 1e9:,.0f} GB/s, {seconds * 1e6:,.0f} µs)"
        figures = {"bytes": num_bytes, "seconds": seconds, "fraction": reached / self.copy}
        return [Row(name, seen, None, figures)]


def measure_copy(bench: Bench) -> list[Row]:
    seen = f"{bench.copy / 1e9:,.0f} GB/s, bytes read and written"
    return [Row("device-to-device copy, 1 GiB", seen, None, {"bytes_per_second": bench.copy})]


def expand_kv(bench: Bench) -> list[Row]:
    tokens, copies = bench.columns // 2, bench.slots // 4
    prefixes = [cache[:1, :, :tokens].contiguous() for cache in bench.caches]
    slots = bench.rows(*range(2, 2 + copies))
    num_bytes = bench.cell_bytes() * tokens * (1 + copies)
    name = f"expand_kv, {tokens} tokens into {copies} slots"
    return bench.row(name, num_bytes, lambda: cache_triton.expand_kv(bench.caches, prefixes, slots))


def expand_in_place(bench: Bench) -> list[Row]:
    rows, length = bench.slots // 4, bench.columns // 2
    num_bytes = bench.cell_bytes() * length * (rows + 4 * rows)
    name = f"expand_in_place, {rows} rows to {4 * rows}, {length} columns"
    return bench.row(name, num_bytes, lambda: cache_triton.expand_in_place(bench.caches, rows, 4, length))


def compact_kv(bench: Bench) -> list[Row]:
    count, length = bench.slots // 4, bench.columns // 2
    source, target = bench.rows(*range(bench.slots - count, bench.slots)), bench.rows(*range(count))
    num_bytes = bench.cell_bytes() * length * 2 * count
    name = f"compact_kv, {count} rows, {length} columns"
    return bench.row(name, num_bytes, lambda: cache_triton.compact_kv(bench.caches, source, target, length))


def compact_all(bench: Bench) -> list[Row]:
    ring, length = torch.arange(bench.slots, device=bench.setting.device), bench.columns // 2
    target, num_bytes = ring.roll(-1), bench.cell_bytes() * length * 2 * bench.slots
    name = f"compact_kv, a cycle of {bench.slots} rows, {length} columns"
    return bench.row(name, num_bytes, lambda: cache_triton.compact_kv(bench.caches, ring, target, length))


def trim_kv(bench: Bench) -> list[Row]:
    shift = max(1, bench.columns // 16)
    num_bytes = bench.cell_bytes() * (bench.columns - shift) * 2 * bench.slots
    name = f"trim_kv, {bench.slots} rows, {shift} of {bench.columns} columns"
    return bench.row(name, num_bytes, lambda: cache_triton.trim_kv(bench.caches, shift, bench.columns))


def decode_attention(bench: Bench, rows: int, length: int) -> list[Row]:
    """One launch per layer, as a decode step makes them; every layer has its own cells."""
    shape = (-1, KV_HEADS, length, DIM)  # cells are random: how they are cut into rows does not matter
    views = [cache.view(shape)[:rows] for cache in bench.caches]
    query = Draw(bench.setting, "query").normal(rows, HEADS, 1, DIM, dtype=torch.bfloat16)
    lengths = torch.full((rows,), length, device=bench.setting.device)

    def call() -> None:
        for keys, values in zip(views[::2], views[1::2], strict=True):
            attention_triton.decode_attention(query, keys, values, lengths, scaling=DIM**-0.5)

    num_bytes = bench.cell_bytes() * rows * length + len(views) // 2 * 2 * query.nbytes
    return bench.row(f"decode_attention, {rows} rows of {length} cells", num_bytes, call)


def sample_tokens(bench: Bench, is_filtered: bool) -> list[Row]:
    rows, vocab_size = (2, 300) if bench.setting.is_dry else (256, 128_256)
    draw = Draw(bench.setting, "logits")
    settings = {"top_k": 50, "top_p": 0.95} if is_filtered else {}
    logits = 3 * draw.normal(rows, vocab_size)
    settings_rows = rows_of(draw, rows, settings, adjusted=False, filtered=is_filtered)
    vocab = counter_hash.vocabulary_hash(vocab_size, bench.setting.device)
    name = f"sample_tokens, {rows} rows of {vocab_size} ids{', top-k and top-p' if is_filtered else ''}"
    return bench.row(name, logits.nbytes, lambda: sampling_triton.sample_tokens(logits, settings_rows, vocab))


def steps(setting: Setting) -> list[Step]:
    bench = Bench(setting)
    attention = [(2, 16), (4, 8)] if setting.is_dry else [(1, 2048), (16, 2048), (64, 2048), (256, 512)]
    moves = (measure_copy, expand_kv, expand_in_place, compact_kv, compact_all, trim_kv)
    return [
        *(Step(move.__name__, partial(move, bench)) for move in moves),
        *(
            Step(f"decode_attention, {rows} x {length}", partial(decode_attention, bench, rows, length))
            for rows, length in attention
        ),
        Step("sample_tokens", partial(sample_tokens, bench, False)),
        Step("sample_tokens, top-k and top-p", partial(sample_tokens, bench, True)),
    ]
