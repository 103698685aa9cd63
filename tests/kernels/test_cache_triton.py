"""The Triton cache moves against their references: equal bits in every cell, inside the caches and around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_pool.kernels import cache_triton, reference

few = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}  # a move looks at sizes, not at dtypes
SHAPES = {
    "even": (5, 2, 32, 16),
    "odd": (7, 3, 13, 5),
    "one of each": (2, 1, 1, 1),
    "more than a block": (4, 1, 90, 48),
}
dtypes = pytest.mark.parametrize("dtype", WORDS, ids=lambda dtype: str(dtype)[6:])
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


class Caches:
    """Tensors of random bits inside a larger storage, whose other cells no kernel may touch.

    The caches of layers differ by their place in it: ``shift`` elements off, so that addresses are not
    always multiples of 16.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
        size = max(torch.Size(shape).numel() for shape in shapes) + 64
        limits = torch.iinfo(WORDS[dtype])
        self.storage = torch.randint(
            limits.min, limits.max, (len(shapes), size), generator=generator, dtype=WORDS[dtype]
        ).to(device)
        self.shapes, self.dtype = shapes, dtype

    def tensors(self, storage: torch.Tensor | None = None, shift: int = 0) -> list[torch.Tensor]:
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        return [
            row[16 + shift : 16 + shift + size].view(self.dtype).view(shape)
            for row, size, shape in zip(
                self.storage if storage is None else storage, sizes, self.shapes, strict=True
            )
        ]

    def check(self, call: Any, shift: int = 0) -> None:
        """``call(form, caches)`` leaves the same storage with both forms."""
        expected, got = self.storage.clone(), self.storage.clone()
        call(reference, self.tensors(expected, shift))
        call(cache_triton, self.tensors(got, shift))
        assert torch.equal(got, expected)
        self.storage = got


def layers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Caches:
    """Two layers of one shape, and one whose head dim is its own: values next to keys."""
    return Caches([shape, (*shape[:3], shape[3] + 1), shape], dtype, device)


@dtypes
@shapes
@pytest.mark.parametrize("cut", [False, True], ids=["whole prefix", "last tokens"])
def test_expand(shape: tuple[int, ...], dtype: torch.dtype, cut: bool, device: torch.device) -> None:
    slots, heads, length, _ = shape
    tokens, start = max(1, length - 3), min(2, length - 1)
    caches = layers(shape, dtype, device)
    prefixes = [
        torch.randn(1, heads, tokens + 4, tensor.shape[3]).to(dtype).to(device) for tensor in caches.tensors()
    ]
    # The last tokens of a longer prefix, as a sliding layer keeps them: heads are not side by side.
    prefixes = [prefix[:, :, 4:] if cut else prefix[:, :, :tokens].contiguous() for prefix in prefixes]
    chosen = torch.tensor([slots - 1, 0], device=device)
    caches.check(lambda form, tensors: form.expand_kv(tensors, prefixes, chosen, start))
    caches.check(lambda form, tensors: form.expand_kv(tensors, prefixes, chosen[:1], 0), shift=1)


@dtypes
@shapes
def test_expand_in_place(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    slots, _, length, _ = shape
    caches = layers(shape, dtype, device)
    for rows, copies in ((1, slots), (2, slots // 2), (slots, 1)):
        caches.check(lambda form, tensors, r=rows, c=copies: form.expand_in_place(tensors, r, c, length))
        caches.check(lambda form, tensors, r=rows, c=copies: form.expand_in_place(tensors, r, c, 1), shift=3)


def test_expand_in_place_repeats_rows_in_order(device: torch.device) -> None:
    cache = torch.arange(4.0, device=device).view(4, 1, 1, 1)
    cache_triton.expand_in_place([cache], 2, 2, 1)
    assert cache.flatten().tolist() == [0, 0, 1, 1]


@dtypes
@shapes
def test_compact_with_chains_cycles_and_repeated_sources(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    slots, _, length, _ = shape
    last = slots - 1
    caches = layers(shape, dtype, device)
    for pairs in (
        [(last, 0)],
        [(0, last), (last, 0)],
        [(row, (row + 1) % slots) for row in range(slots)],
        [(0, 1), (0, 0)],
    ):
        source, target = (torch.tensor(numbers, device=device) for numbers in zip(*pairs, strict=True))
        caches.check(lambda form, tensors, s=source, t=target: form.compact_kv(tensors, s, t, length))
        caches.check(lambda form, tensors, s=source, t=target: form.compact_kv(tensors, s, t, 1), shift=1)


@few
@given(data=st.data(), slots=st.integers(1, 40), length=st.integers(1, 5), most=st.sampled_from([3, 1024]))
def test_compact_of_any_moves(
    data: Any, slots: int, length: int, most: int, device: torch.device, monkeypatch: Any
) -> None:
    """Up to 40 rows: several sizes of the tile; and more moves than the largest."""
    monkeypatch.setattr(cache_triton, "MOST_MOVES", most)
    targets = data.draw(st.lists(st.integers(0, slots - 1), unique=True, max_size=slots))
    sources = data.draw(st.lists(st.integers(0, slots - 1), min_size=len(targets), max_size=len(targets)))
    columns = data.draw(st.integers(0, length))
    source = torch.tensor(sources, dtype=torch.int64, device=device)
    target = torch.tensor(targets, dtype=torch.int64, device=device)
    caches = Caches([(slots, 2, length, 3)], torch.bfloat16, device)
    caches.check(lambda form, tensors: form.compact_kv(tensors, source, target, columns))


@few
@given(data=st.data(), rows=st.integers(1, 9))
def test_states_of_any_shape_and_dtype_move_together(data: Any, rows: int, device: torch.device) -> None:
    targets = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, unique=True))
    sources = data.draw(st.lists(st.integers(0, rows - 1), min_size=len(targets), max_size=len(targets)))
    numbers = torch.arange(rows * 24, device=device)
    states = [
        numbers[:rows],
        numbers.view(rows, 24)[:, :7].float(),
        numbers.view(rows, 2, 3, 4).bfloat16(),
        numbers.view(rows, 24) % 3 == 0,
    ]
    expected, got = ([state.clone() for state in states] for _ in range(2))
    source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
    reference.move_rows(expected, source, target)
    cache_triton.move_rows(got, source, target)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@dtypes
@shapes
def test_trim(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, monkeypatch: Any) -> None:
    """Shifts shorter and longer than a block of the walk."""
    monkeypatch.setattr(cache_triton, "BLOCK_BYTES", 128)
    length = shape[2]
    caches = layers(shape, dtype, device)
    for columns in {1, length // 2, length - 1} & set(range(1, length)):
        caches.check(lambda form, tensors, c=columns: form.trim_kv(tensors, c, length), shift=columns % 2)
    caches.check(lambda form, tensors: form.trim_kv(tensors, 1, length - 1 or 1))


@dtypes
@shapes
def test_write(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """New keys as a model makes them (a transposed view), new values as a cut of something wider."""
    slots, heads, length, head_dim = shape
    rows = slots - 1
    caches = Caches([shape, (*shape[:3], head_dim + 2)], dtype, device)
    keys = torch.randn(rows, 1, heads, head_dim).to(dtype).to(device).transpose(1, 2)
    values = torch.randn(rows, heads, 1, 2 * head_dim + 4).to(dtype).to(device)[..., 1 : head_dim + 3]
    positions = torch.arange(rows, device=device) * 5 % length
    first = torch.arange(rows * heads, device=device).view(rows, heads) * length
    cells = (first + positions.unsqueeze(1)).flatten()
    for shift in (0, 1):
        caches.check(lambda form, tensors: form.write_kv(*tensors, keys, values, cells), shift)
    strided = values.transpose(2, 3).contiguous().transpose(2, 3)  # no stride is 1
    caches.check(lambda form, tensors: form.write_kv(*tensors, keys, strided, cells))


def test_nothing_to_do_is_no_launch(device: torch.device) -> None:
    caches = Caches([(3, 2, 4, 2)], torch.float32, device)
    nobody = torch.zeros(0, dtype=torch.int64, device=device)
    empty = [torch.zeros(1, 2, 0, 2, device=device)]
    caches.check(lambda form, tensors: form.expand_kv(tensors, empty, torch.tensor([1], device=device), 2))
    caches.check(lambda form, tensors: form.expand_kv(tensors, [tensors[0][:1]], nobody, 0))
    caches.check(lambda form, tensors: form.compact_kv(tensors, nobody, nobody, 4))
    caches.check(lambda form, tensors: form.trim_kv(tensors, 4, 4))
    caches.check(lambda form, tensors: form.trim_kv(tensors, 0, 4))
    cache_triton.compact_kv([], nobody, nobody, 4)


def test_a_view_that_cuts_cells_is_refused(device: torch.device) -> None:
    cut = torch.zeros(2, 2, 4, 8, device=device)[..., :4]
    with pytest.raises(ValueError, match="contiguous"):
        cache_triton.trim_kv([cut], 1, 4)
