"""The winner found among few candidates is the one that the noise of every token would give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_pool.kernels import counter_hash
from rollout_pool.kernels.race import BLOCK, first_largest, winners

SIZES = st.one_of(
    st.integers(1, 40), st.integers(BLOCK - 1, BLOCK + 1), st.integers(2 * BLOCK - 3, 4 * BLOCK)
)


def noise(size: int, seed: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(2**31), 2**31 - 1, (rows, 2), dtype=torch.int32, generator=generator)
    return counter_hash.vocabulary_hash(size, torch.device("cpu")), keys


@given(SIZES, st.integers(1, 5), st.integers(0, 2**31), st.sampled_from([0.01, 1.0, 8.0, 60.0]))
def test_the_winner_is_that_of_all_tokens(size: int, rows: int, seed: int, spread: float) -> None:
    vocab, keys = noise(size, seed, rows)
    scores = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread
    weights = (scores - scores.amax(dim=1, keepdim=True)).exp()
    weights[:, ::3] = torch.where(weights[:, ::3] < 1, 0.0, 1.0)  # tokens ruled out, and ties at the top
    expected = (weights / counter_hash.exponential_noise(vocab, keys)).argmax(dim=1)
    assert winners(weights, vocab, keys).tolist() == expected.tolist()


@given(SIZES, st.integers(1, 5), st.integers(0, 2**31), st.integers(1, 6))
def test_the_first_of_the_largest(size: int, rows: int, seed: int, values: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, values, (rows, size), generator=generator).float()
    expected = [row.index(max(row)) for row in table.tolist()]
    assert first_largest(table).tolist() == expected


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_leave_the_others_alone(broken: float) -> None:
    vocab, keys = noise(3 * BLOCK, 5, 3)
    scores = torch.randn(3, 3 * BLOCK, generator=torch.Generator().manual_seed(1))
    weights = (scores - scores.amax(dim=1, keepdim=True)).exp()
    expected = winners(weights, vocab, keys).tolist()
    weights[1] = (torch.full((3 * BLOCK,), broken) - torch.tensor(broken)).exp()
    found = winners(weights, vocab, keys).tolist()
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
    winners((scores - scores.amax(dim=1, keepdim=True)).exp(), vocab, keys)
    assert 0 < sum(computed) < 0.05 * 8 * size
