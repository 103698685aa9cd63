"""The checksum of a tensor: of its bits in order, on any layout, and of every one of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_pool.actors.checksums import MASK, STEP, WORDS, checksum


def by_definition(data: bytes) -> str:
    data = data.ljust(-(-len(data) // 8) * 8, b"\0")
    words = [int.from_bytes(data[at : at + 8], "little", signed=True) for at in range(0, len(data), 8)]
    total = 0
    for start in range(0, len(words), WORDS):
        block = words[start : start + WORDS]
        total = (total * STEP + sum((2 * at + 1) * word for at, word in enumerate(block))) & MASK
    return f"{total:016x}"


@given(st.binary(max_size=70))
def test_small_tensors_follow_the_definition(data: bytes) -> None:
    assert checksum(torch.tensor(list(data), dtype=torch.uint8)) == by_definition(data)


@pytest.mark.parametrize("extra", [-3, 0, 5])
def test_large_tensors_follow_the_definition(extra: int) -> None:
    data = torch.randint(0, 256, (WORDS * 8 * 2 + extra,), dtype=torch.uint8)
    assert checksum(data) == by_definition(data.numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
def test_layout_and_place_in_memory_do_not_matter(dtype: torch.dtype) -> None:
    tensor = (torch.randn(33, 47) * 50).clamp(min=0).to(dtype)
    expected = checksum(tensor)
    assert checksum(tensor.t().contiguous().t()) == expected
    shifted = torch.zeros(33 * 47 + 1, dtype=dtype)[1:].view(33, 47).copy_(tensor)
    assert checksum(shifted) == expected
    assert checksum(tensor.t()) != expected


@settings(max_examples=50)
@given(st.integers(0, 3000), st.integers(0, 7))
def test_any_one_bit_changes_it(byte: int, bit: int) -> None:
    data = torch.arange(3001).to(torch.uint8)
    before = checksum(data)
    data[byte] ^= 1 << bit
    assert checksum(data) != before


def test_two_tensors_of_one_size_do_not_change_places_unnoticed() -> None:
    rows = torch.randn(2, WORDS * 2)
    assert checksum(rows) != checksum(rows.flip(0))


def test_nothing_has_a_checksum() -> None:
    assert checksum(torch.zeros(0)) == checksum(torch.tensor([])) == "0" * 16
    assert checksum(torch.tensor(1.5)) != checksum(torch.tensor(2.5))
