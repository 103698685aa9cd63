"""The slot cache against a plain dictionary of rows, under random prefills, steps and moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from rollout_pool import UnsupportedModelError
from rollout_pool.actors.kv_cache import VIEW_STEP, SlotCache, cache_bytes

POISON = 1e4
SLOTS, LENGTH, WINDOW = 6, 20, 5
HEADS = (2, 1, 3)  # of the three attention layers: models may differ by layer
HEAD_DIMS = ((4, 4), (3, 5), (2, 2))  # of keys and of values
quick = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def prefill_cache(tokens: int, tag: int = 0) -> Cache:
    """A cache as a prefill of ``tokens`` tokens leaves it: two full layers, a sliding one, a recurrent one."""
    generator = torch.Generator().manual_seed(1000 + tag)
    layers: list[Any] = [
        DynamicLayer(),
        DynamicSlidingWindowLayer(WINDOW),
        DynamicLayer(),
        LinearAttentionLayer(),
    ]
    for layer, heads, (key_dim, value_dim) in zip(layers[:3], HEADS, HEAD_DIMS, strict=True):
        layer.update(
            torch.randn(1, heads, tokens, key_dim, generator=generator),
            torch.randn(1, heads, tokens, value_dim, generator=generator),
        )
    layers[3].update_conv_state(torch.randn(1, 6, 4, generator=generator))
    layers[3].update_recurrent_state(torch.randn(1, 2, 3, 3, generator=generator))
    return Cache(layers=layers)


def poisoned(num_slots: int = SLOTS) -> SlotCache:
    cache = SlotCache(prefill_cache(3), num_slots, LENGTH)
    for tensor in cache.tensors():
        tensor.fill_(POISON)
    return cache


class Mirror:
    """What every slot should hold, as plain tensors, cell by cell."""

    def __init__(self, cache: SlotCache) -> None:
        self.rows = [[tensor[slot].clone() for tensor in cache.tensors()] for slot in range(SLOTS)]

    def fill(self, slot: int, prefill: Cache, length: int) -> None:
        place = 0
        for layer in prefill.layers:
            if isinstance(layer, DynamicLayer):
                for tensor in (layer.keys, layer.values):
                    start = length - tensor.shape[2]
                    assert start == 0 or (start > 0 and tensor.shape[2] == WINDOW - 1), (
                        "the sliding layer's rest"
                    )
                    self.rows[slot][place][:, :start] = 0  # out of the window for good, and finite
                    self.rows[slot][place][:, start:length] = tensor[0]
                    place += 1
            else:
                for state in (layer.conv_states[0], layer.recurrent_states[0]):
                    self.rows[slot][place] = state[0].clone()
                    place += 1

    def write(self, slot: int, layer: int, position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.rows[slot][2 * layer][:, position] = key[:, 0]
        self.rows[slot][2 * layer + 1][:, position] = value[:, 0]

    def move(self, source: int, target: int, length: int) -> None:
        for place, tensor in enumerate(self.rows[source]):
            if place < 6:
                self.rows[target][place][:, :length] = tensor[:, :length]
            else:
                self.rows[target][place] = tensor.clone()

    def check(self, cache: SlotCache) -> None:
        for place, tensor in enumerate(cache.tensors()):
            for slot in range(SLOTS):
                assert torch.equal(tensor[slot], self.rows[slot][place]), f"tensor {place}, slot {slot}"


@quick
@given(data=st.data())
def test_all_and_only_the_right_cells_change(data: Any) -> None:
    """Random prompts go into random slots, rows decode at their own positions, and rows move."""
    cache = poisoned()
    mirror = Mirror(cache)
    lengths: dict[int, int] = {}
    for number in range(data.draw(st.integers(1, 8), label="operations")):
        kind = data.draw(st.sampled_from(["fill", "step", "move", "clear"]))
        if kind == "fill":
            slots = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=4, unique=True))
            length = data.draw(st.integers(1, LENGTH - 4))
            prefill = prefill_cache(length, number)
            cache.expand(prefill, torch.tensor(slots), length)
            for slot in slots:
                mirror.fill(slot, prefill, length)
                lengths[slot] = length
        elif kind == "step" and lengths and max(lengths.values()) < LENGTH:
            _step(cache, mirror, lengths, number)
        elif kind == "move" and lengths:
            _move(cache, mirror, lengths, data)
        elif kind == "clear":
            slot = data.draw(st.integers(0, SLOTS - 1))
            cache.clear(torch.tensor([slot]))
            for tensor in mirror.rows[slot]:
                tensor.zero_()
        mirror.check(cache)


def _step(cache: SlotCache, mirror: Mirror, lengths: dict[int, int], number: int) -> None:
    """Every row up to the highest in use writes one token: the live ones at their length, the free ones at 0."""
    generator = torch.Generator().manual_seed(number)
    rows = max(lengths) + 1
    positions = torch.tensor([lengths.get(row, 0) for row in range(rows)])
    cache.begin(positions, int(positions.max()))
    for layer, (heads, (key_dim, value_dim)) in enumerate(zip(HEADS, HEAD_DIMS, strict=True)):
        new_key = torch.randn(rows, heads, 1, key_dim, generator=generator)
        new_value = torch.randn(rows, heads, 1, value_dim, generator=generator)
        keys, values = cache.layers[layer].update(new_key, new_value)
        for row in range(rows):
            mirror.write(row, layer, int(positions[row]), new_key[row], new_value[row])
            seen = int(positions[row]) + 1
            assert torch.equal(keys[row, :, :seen], mirror.rows[row][2 * layer][:, :seen])
            assert torch.equal(values[row, :, :seen], mirror.rows[row][2 * layer + 1][:, :seen])
    state = cache.layers[3]
    for row in range(rows):
        mirror.rows[row][7] = mirror.rows[row][7] * 0.5 + 1
    state.update_recurrent_state(state.recurrent_states[0] * 0.5 + 1)
    new = torch.randn(rows, 6, 1, generator=generator)
    state.update_conv_state(new)
    for row in range(rows):
        mirror.rows[row][6] = torch.cat((mirror.rows[row][6], new[row]), dim=-1)[:, 1:]
    for slot in lengths:
        lengths[slot] += 1


def _move(cache: SlotCache, mirror: Mirror, lengths: dict[int, int], data: Any) -> None:
    """Live rows to free slots, as a compaction does it."""
    free = [slot for slot in range(SLOTS) if slot not in lengths]
    count = data.draw(st.integers(0, min(len(free), len(lengths))))
    if not count:
        return
    sources = data.draw(st.permutations(sorted(lengths)))[:count]
    targets = data.draw(st.permutations(free))[:count]
    length = max(lengths[source] for source in sources)
    cache.move(torch.tensor(sources), torch.tensor(targets), length)
    for source, target in zip(sources, targets, strict=True):
        mirror.move(source, target, length)
        lengths[target] = lengths.pop(source)


@quick
@given(order=st.permutations(range(SLOTS)), length=st.integers(1, LENGTH))
def test_moves_that_overlap_are_safe(order: list[int], length: int) -> None:
    """Any permutation at once: a target may be the source of another move."""
    cache = poisoned()
    for slot in range(SLOTS):
        cache.expand(prefill_cache(LENGTH, slot), torch.tensor([slot]), LENGTH)
    before = [tensor.clone() for tensor in cache.tensors()]
    cache.move(torch.arange(SLOTS), torch.tensor(order), length)
    for place, (tensor, old) in enumerate(zip(cache.tensors(), before, strict=True)):
        for source, target in enumerate(order):
            if place < 6:
                assert torch.equal(tensor[target][:, :length], old[source][:, :length])
                assert torch.equal(tensor[target][:, length:], old[target][:, length:])
            else:
                assert torch.equal(tensor[target], old[source])


def test_attention_reads_whole_steps_of_columns_and_never_past_the_end() -> None:
    cache = SlotCache(prefill_cache(3), 2, 3 * VIEW_STEP - 10)
    for longest, columns in ((0, VIEW_STEP), (VIEW_STEP - 1, VIEW_STEP), (VIEW_STEP, 2 * VIEW_STEP),
                             (3 * VIEW_STEP - 11, 3 * VIEW_STEP - 10)):  # fmt: skip
        cache.begin(torch.tensor([longest, 0]), longest)
        assert cache.layers[0].get_mask_sizes(1) == (columns, 0)
        keys, _ = cache.layers[0].update(torch.ones(2, 2, 1, 4), torch.ones(2, 2, 1, 4))
        assert keys.shape == (2, 2, columns, 4)


def test_shapes_and_bytes_come_from_the_prefill() -> None:
    prefill = prefill_cache(4)
    cache = SlotCache(prefill, SLOTS, LENGTH)
    shapes = [tuple(tensor.shape) for tensor in cache.tensors()]
    assert shapes == [
        (SLOTS, 2, LENGTH, 4), (SLOTS, 2, LENGTH, 4), (SLOTS, 1, LENGTH, 3), (SLOTS, 1, LENGTH, 5),
        (SLOTS, 3, LENGTH, 2), (SLOTS, 3, LENGTH, 2), (SLOTS, 6, 4), (SLOTS, 2, 3, 3),
    ]  # fmt: skip
    per_token, per_slot = cache_bytes(prefill)
    assert SLOTS * (LENGTH * per_token + per_slot) == sum(tensor.nbytes for tensor in cache.tensors())
    assert (per_token, per_slot) == (4 * (8 + 8 + 3 + 5 + 6 + 6), 4 * (24 + 18))


def test_a_layer_of_another_kind_is_refused_by_its_name() -> None:
    cache = DynamicCache()
    cache.layers = [LinearAttentionAndFullAttentionLayer()]
    with pytest.raises(UnsupportedModelError, match="LinearAttentionAndFullAttentionLayer"):
        SlotCache(cache, 2, 8)
