"""The winner found among few candidates is the one that the noise of every token would give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_pool.kernels import counter_hash
from rollout_pool.kernels.race import BLOCK, block_maxima, bounds, first_largest, winners

SIZES = st.one_of(
    st.integers(1, 40), st.integers(BLOCK - 1, BLOCK + 1), st.integers(2 * BLOCK - 3, 4 * BLOCK)
)


def noise(size: int, seed: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(2**31), 2**31 - 1, (rows, 2), dtype=torch.int32, generator=generator)
    return counter_hash.vocabulary_hash(size, torch.device("cpu")), keys


def won(scores: torch.Tensor, vocab: torch.Tensor, keys: torch.Tensor) -> list[int]:
    """The winners where weights are exp(score - largest score)."""
    top = scores.amax(dim=1)
    weights = (scores - top.unsqueeze(1)).exp_()
    return winners(scores, top, bounds(weights, vocab, keys), vocab, keys).tolist()


@given(SIZES, st.integers(1, 5), st.integers(0, 2**31), st.sampled_from([0.01, 1.0, 8.0, 60.0]))
def test_the_winner_is_that_of_all_tokens(size: int, rows: int, seed: int, spread: float) -> None:
    vocab, keys = noise(size, seed, rows)
    scores = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread
    top = scores.amax(dim=1, keepdim=True)
    ruled_out = torch.where(scores[:, ::3] < top, float("-inf"), top)
    scores[:, ::3] = ruled_out
    scores[:, 1::7] = top  # ties
    weights = (scores - top).exp()
    expected = (weights / counter_hash.exponential_noise(vocab, keys)).argmax(dim=1)
    assert won(scores, vocab, keys) == expected.tolist()


@given(SIZES, st.integers(1, 5), st.integers(0, 2**31))
def test_the_least_bits_are_no_more_than_the_bits(size: int, rows: int, seed: int) -> None:
    vocab, keys = noise(size, seed, rows)
    rest = counter_hash.draw_bits(vocab, keys) - counter_hash.least_bits(vocab, keys)
    assert ((rest >= 0) & (rest < 1 << 16)).all()


def test_noise_whose_upper_bits_are_all_zero_may_win() -> None:
    """Where nothing bounds the noise from below, the block is looked into; a weight of zero there wins not."""
    size, rows = 8 * BLOCK, 400
    vocab, keys = noise(size, 11, rows)
    is_free = counter_hash.least_bits(vocab, keys) == 0
    assert 20 < is_free.sum() < 60  # of 819,200 draws one in 32,768
    scores = torch.full((rows, size), -3.0)
    scores[:, 7] = 0.0
    for ruled_out in (False, True):
        if ruled_out:
            scores = scores.masked_fill(is_free, float("-inf"))
            scores[:, 7] = 0.0
        expected = (scores.exp() / counter_hash.exponential_noise(vocab, keys)).argmax(dim=1)
        assert won(scores, vocab, keys) == expected.tolist()
        num_free = int(is_free.gather(1, expected.unsqueeze(1)).sum())
        assert num_free == 0 if ruled_out else num_free > 20


@given(SIZES, st.integers(1, 5), st.integers(0, 2**31), st.integers(1, 6))
def test_the_first_of_the_largest(size: int, rows: int, seed: int, values: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, values, (rows, size), generator=generator).float()
    expected = [row.index(max(row)) for row in table.tolist()]
    assert first_largest(table, block_maxima(table)).tolist() == expected


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_leave_the_others_alone(broken: float) -> None:
    vocab, keys = noise(3 * BLOCK, 5, 3)
    scores = torch.randn(3, 3 * BLOCK, generator=torch.Generator().manual_seed(1))
    expected = won(scores, vocab, keys)
    scores[1] = broken
    found = won(scores, vocab, keys)
    scores[1, 5:] = 0.0  # some of it
    assert won(scores, vocab, keys)[::2] == expected[::2]
    assert [found[0], found[2]] == [expected[0], expected[2]]
    assert 0 <= found[1] < 3 * BLOCK


def test_few_tokens_need_their_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    exact = counter_hash.exponential
    monkeypatch.setattr(
        "rollout_pool.kernels.race.exponential", lambda bits: computed.append(bits.numel()) or exact(bits)
    )
    size = 50_000
    vocab, keys = noise(size, 2, 8)
    scores = torch.randn(8, size, generator=torch.Generator().manual_seed(3)) * 3
    won(scores, vocab, keys)
    assert 0 < sum(computed) < 0.05 * 8 * size
