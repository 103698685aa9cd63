"""Cache moves against plain loops over cells: all the right cells change, and no other one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_pool.kernels import ops

CPU = torch.device("cpu")
quick = settings(max_examples=60, deadline=None)
shapes = st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 12), st.integers(1, 5))


def numbered(shape: tuple[int, ...], start: int = 0) -> torch.Tensor:
    """Every cell holds a number of its own, so a misplaced cell shows."""
    size = torch.Size(shape).numel()
    return torch.arange(start, start + size, dtype=torch.float32).view(shape)


@quick
@given(shape=shapes, data=st.data())
def test_expand_fills_the_given_slots_and_columns_and_nothing_else(shape: tuple[int, ...], data: Any) -> None:
    slots, heads, length, head_dim = shape
    chosen = data.draw(st.lists(st.integers(0, slots - 1), min_size=1, unique=True))
    start = data.draw(st.integers(0, length - 1))
    tokens = data.draw(st.integers(0, length - start))
    keys, values = numbered(shape), numbered((slots, heads, length, head_dim + 1), 50_000)
    prefixes = [numbered((1, heads, tokens, head_dim + extra), -90_000) for extra in (0, 1)]
    expected = [keys.clone(), values.clone()]
    for cache, prefix in zip(expected, prefixes, strict=True):
        for slot in chosen:
            for token in range(tokens):
                cache[slot, :, start + token] = prefix[0, :, token]
    ops.expand_kv([keys, values], prefixes, torch.tensor(chosen), start)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


@quick
@given(shape=shapes, data=st.data())
def test_compaction_moves_rows_even_when_sources_and_targets_overlap(
    shape: tuple[int, ...], data: Any
) -> None:
    slots, _, length, _ = shape
    targets = data.draw(st.lists(st.integers(0, slots - 1), min_size=1, unique=True))
    sources = data.draw(st.lists(st.integers(0, slots - 1), min_size=len(targets), max_size=len(targets)))
    columns = data.draw(st.integers(0, length))
    keys, values = numbered(shape), numbered(shape, 50_000)
    before = [keys.clone(), values.clone()]
    expected = [keys.clone(), values.clone()]
    for cache, old in zip(expected, before, strict=True):
        for source, target in zip(sources, targets, strict=True):
            cache[target, :, :columns] = old[source, :, :columns]
    ops.compact_kv([keys, values], torch.tensor(sources), torch.tensor(targets), columns)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


@quick
@given(rows=st.integers(1, 9), extra=st.sampled_from([(), (3,), (2, 3, 2)]), data=st.data())
def test_states_of_any_shape_move_with_their_rows(rows: int, extra: tuple[int, ...], data: Any) -> None:
    targets = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, unique=True))
    sources = data.draw(st.lists(st.integers(0, rows - 1), min_size=len(targets), max_size=len(targets)))
    states = [numbered((rows, *extra)), torch.arange(rows) % 2 == 0]
    expected = [state.clone() for state in states]
    for new, old in zip(expected, states, strict=True):
        for source, target in zip(sources, targets, strict=True):
            new[target] = old[source]
    ops.move_rows(states, torch.tensor(sources), torch.tensor(targets))
    assert all(torch.equal(state, new) for state, new in zip(states, expected, strict=True))


@quick
@given(shape=shapes, data=st.data())
def test_every_row_is_written_at_its_own_position(shape: tuple[int, ...], data: Any) -> None:
    slots, heads, length, head_dim = shape
    rows = data.draw(st.integers(1, slots))
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=rows, max_size=rows))
    keys, values = numbered(shape), numbered(shape, 50_000)
    new_keys, new_values = (
        numbered((rows, heads, 1, head_dim), -90_000),
        numbered((rows, heads, 1, head_dim), -70_000),
    )
    expected = [keys.clone(), values.clone()]
    for row, position in enumerate(positions):
        expected[0][row, :, position] = new_keys[row, :, 0]
        expected[1][row, :, position] = new_values[row, :, 0]
    first = torch.arange(rows * heads).view(rows, heads) * length
    cells = (first + torch.tensor(positions).unsqueeze(1)).flatten()
    ops.write_kv(keys, values, new_keys, new_values, cells)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


@quick
@given(shape=shapes, data=st.data())
def test_expansion_in_place_repeats_every_row(shape: tuple[int, ...], data: Any) -> None:
    slots, _, length, _ = shape
    rows = data.draw(st.integers(1, slots))
    copies = data.draw(st.integers(1, slots // rows))
    columns = data.draw(st.integers(0, length))
    cache = numbered(shape)
    expected = cache.clone()
    for row in range(rows * copies):
        expected[row, :, :columns] = cache[row // copies, :, :columns]
    old = cache.clone()
    ops.expand_in_place([cache], rows, copies, columns)
    assert torch.equal(cache[:, :, :columns], expected[:, :, :columns])
    assert torch.equal(cache[:, :, columns:], old[:, :, columns:])


@quick
@given(shape=shapes, data=st.data())
def test_a_trim_shifts_all_rows_to_the_left(shape: tuple[int, ...], data: Any) -> None:
    length = shape[2]
    used = data.draw(st.integers(0, length))
    columns = data.draw(st.integers(0, used))
    cache = numbered(shape)
    expected = cache.clone()
    expected[:, :, : used - columns] = cache[:, :, columns:used]
    ops.trim_kv([cache], columns, used)
    assert torch.equal(cache, expected)


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 3},
    "soft-cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "everything": {"window": 4, "softcap": 1.5, "sinks": True},
}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", ATTENTION)
def test_decode_attention_equals_attention_written_out(kind: str, kv_heads: int) -> None:
    """Row by row and head by head in float64, over the visible cells alone; the others are poisoned."""
    options = dict(ATTENTION[kind])
    generator = torch.Generator().manual_seed(0)
    rows, heads, length, head_dim, value_dim = 5, 4, 9, 8, 6
    lengths = torch.tensor([1, 2, 4, 8, 9])
    query = torch.randn(rows, heads, 1, head_dim, generator=generator)
    keys = torch.randn(rows, kv_heads, length, head_dim, generator=generator)
    values = torch.randn(rows, kv_heads, length, value_dim, generator=generator)
    sinks = torch.randn(heads, generator=generator) if options.pop("sinks", False) else None
    window, softcap = options.get("window"), options.get("softcap")

    expected = torch.zeros(rows, heads, 1, value_dim, dtype=torch.float64)
    for row in range(rows):
        stop = int(lengths[row])
        cells = slice(max(0, stop - window) if window else 0, stop)
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = keys[row, kv_head, cells].double() @ query[row, head, 0].double() * 0.3
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].double().view(1)))
            weights = scores.softmax(dim=0)[: cells.stop - cells.start]
            expected[row, head, 0] = weights @ values[row, kv_head, cells].double()
        keys[row, :, stop:] = 1e4
        values[row, :, stop:] = 1e4

    got = ops.decode_attention(
        query, keys, values, lengths, scaling=0.3, window=window, softcap=softcap, sinks=sinks
    )
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_mask_says_the_same_as_lengths_and_window() -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(3, 4, 1, 8, generator=generator)
    keys, values = (torch.randn(3, 2, 7, 8, generator=generator) for _ in range(2))
    lengths = torch.tensor([1, 5, 7])
    column = torch.arange(7)
    visible = (column < lengths.view(-1, 1)) & (column >= lengths.view(-1, 1) - 3)
    by_mask = ops.decode_attention(query, keys, values, scaling=0.5, visible=visible.view(3, 1, 1, 7))
    by_length = ops.decode_attention(query, keys, values, lengths, scaling=0.5, window=3)
    torch.testing.assert_close(by_mask, by_length)
