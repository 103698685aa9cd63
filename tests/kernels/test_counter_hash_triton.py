"""The counter hash in Triton: the same bits as in torch, up to the float that a draw is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_pool.kernels import counter_hash, counter_hash_triton

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
words = st.integers(-(2**31), 2**31 - 1)


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time per program, not per element."""
    monkeypatch.setattr(counter_hash_triton, "NOISE_BLOCK", 1 << 16)


def random_keys(rows: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    keys = torch.randint(-(2**31), 2**31, (rows, 2), generator=generator, dtype=torch.int64)
    return keys.to(torch.int32).to(device)


def test_a_million_draws_are_bit_equal(device: torch.device) -> None:
    keys = random_keys(21, device)
    vocab = counter_hash.vocabulary_hash(50_000, device)
    expected = counter_hash.exponential_noise(vocab, keys)
    got = counter_hash_triton.exponential_noise(vocab, keys)
    assert got.numel() >= 1_000_000
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


@few
@given(
    key=st.tuples(words, words),
    position=st.integers(0, 2**31 - 2),
    entries=st.lists(words, min_size=1, max_size=9),
)
def test_any_words_are_hashed_alike(
    key: Any, position: int, entries: list[int], device: torch.device
) -> None:
    keys = torch.tensor([key, (0, -1)], dtype=torch.int32, device=device)
    positions = torch.tensor([position, 0], device=device)
    expected = counter_hash.position_keys(keys, positions)
    assert torch.equal(counter_hash_triton.position_keys(keys, positions), expected)
    vocab = torch.tensor(entries, dtype=torch.int32, device=device)
    noise = counter_hash_triton.exponential_noise(vocab, keys)
    assert torch.equal(noise, counter_hash.exponential_noise(vocab, keys))


def test_more_rows_than_a_block_and_keys_that_are_a_view(device: torch.device) -> None:
    keys = random_keys(600, device)[::2]
    positions = torch.arange(600, device=device)[::2]
    assert torch.equal(
        counter_hash_triton.position_keys(keys, positions), counter_hash.position_keys(keys, positions)
    )
