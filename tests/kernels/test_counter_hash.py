"""The counter hash against the same arithmetic in Python integers, and its draws against statistics."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_pool.kernels import counter_hash, ops

CPU = torch.device("cpu")
WORD = 0xFFFFFFFF
words = st.integers(-(2**31), 2**31 - 1)


# The specification, in integers that do not wrap around by themselves.


def fmix32(h: int) -> int:
    h = (h ^ h >> 16) * 0x85EBCA6B & WORD
    h = (h ^ h >> 13) * 0xC2B2AE35 & WORD
    return h ^ h >> 16


def position_key(key: tuple[int, int], position: int) -> tuple[int, int]:
    step = fmix32((position + 1) * 0x9E3779B9 & WORD)
    first = fmix32((key[0] & WORD) ^ step)
    return first, fmix32((key[1] & WORD) + first & WORD)


def noise(key: tuple[int, int], token: int) -> float:
    h = fmix32((token + 1) * 0x9E3779B9 & WORD) ^ key[0]
    h = h * 0x85EBCA6B & WORD
    h ^= h >> 15
    h = (h ^ key[1] & WORD) * 0xC2B2AE35 & WORD
    h ^= h >> 16
    return -math.log1p(-((h & 0x7FFFFFFF) + 0.5) / 2**31)


def signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


@settings(max_examples=200, deadline=None)
@given(
    key=st.tuples(words, words),
    position=st.integers(0, 2**31 - 2),
    tokens=st.lists(st.integers(0, 300_000), min_size=1, max_size=4),
)
def test_torch_and_integers_agree(key: tuple[int, int], position: int, tokens: list[int]) -> None:
    expected = position_key(key, position)
    keys = ops.position_keys(torch.tensor([key], dtype=torch.int32), torch.tensor([position]))
    assert keys.dtype == torch.int32
    assert keys.tolist() == [[signed(word) for word in expected]]
    hashed = torch.tensor(
        [signed(fmix32((token + 1) * 0x9E3779B9 & WORD)) for token in tokens], dtype=torch.int32
    )
    drawn = counter_hash.exponential_noise(hashed, keys)
    torch.testing.assert_close(
        drawn, torch.tensor([[noise(expected, token) for token in tokens]]), atol=0, rtol=3e-7
    )


def test_the_vocabulary_hash_is_a_permutation_of_words() -> None:
    hashed = ops.vocabulary_hash(100_000, CPU)
    assert hashed.dtype == torch.int32
    assert hashed.unique().numel() == 100_000
    for token in (0, 1, 99_999):
        assert int(hashed[token]) == signed(fmix32((token + 1) * 0x9E3779B9 & WORD))


@given(seed=st.integers(0, 2**63 - 1), name=st.text(max_size=12), index=st.integers(0, 2**40))
def test_a_sample_key_is_a_digest_of_seed_index_and_identity(seed: int, name: str, index: int) -> None:
    digest = hashlib.blake2b(
        f"{seed}|{index}|{name}".encode("utf-8", "surrogatepass"), digest_size=8
    ).digest()
    low, high = ops.sample_key(seed, name, index)
    assert low.to_bytes(4, "little", signed=True) + high.to_bytes(4, "little", signed=True) == digest


def test_draws_are_the_same_in_every_release() -> None:
    """A stored rollout can be drawn again years later: these numbers may never change."""
    key = ops.sample_key(0, "index:0", 0)
    keys = ops.position_keys(torch.tensor([key], dtype=torch.int32), torch.tensor([3]))
    drawn = counter_hash.exponential_noise(ops.vocabulary_hash(4, CPU), keys)
    assert key == GOLDEN_KEY
    torch.testing.assert_close(drawn, torch.tensor([GOLDEN_NOISE]), atol=0, rtol=3e-7)


GOLDEN_KEY = (933429998, 1473425832)
GOLDEN_NOISE = [0.278574109, 0.531672537, 1.23072934, 2.60857773]


def test_neighbours_do_not_share_keys() -> None:
    """Neither seeds, nor identities, nor samples, nor ways to write two numbers side by side."""
    keys = {
        ops.sample_key(seed, identity, index)
        for seed in range(20)
        for identity in ("index:0", "index:1", "index:10", "name:0", "name:1|0")
        for index in range(20)
    }
    assert len(keys) == 20 * 5 * 20
    assert ops.sample_key(1, "x", 11) != ops.sample_key(11, "x", 1)


def rows_of_noise(keys: list[tuple[int, int]], positions: list[int], vocab: int) -> torch.Tensor:
    hashed = ops.vocabulary_hash(vocab, CPU)
    mixed = ops.position_keys(torch.tensor(keys, dtype=torch.int32), torch.tensor(positions))
    return counter_hash.exponential_noise(hashed, mixed)


NEIGHBOURS: dict[str, tuple[list[tuple[int, int]], list[int]]] = {
    "samples": ([ops.sample_key(0, "index:0", i) for i in range(16)], [0] * 16),
    "positions": ([ops.sample_key(0, "index:0", 0)] * 16, list(range(16))),
    "seeds": ([ops.sample_key(i, "index:0", 0) for i in range(16)], [0] * 16),
    "identities": ([ops.sample_key(0, f"index:{i}", 0) for i in range(16)], [0] * 16),
    "low bits of a key": ([(i, 0) for i in range(16)], [0] * 16),
    "high bits of a key": ([(i << 20, 0) for i in range(16)], [0] * 16),
}


@pytest.mark.parametrize("kind", NEIGHBOURS)
def test_noise_is_exponential_and_independent_between_neighbours(kind: str) -> None:
    size = 65_536
    drawn = rows_of_noise(*NEIGHBOURS[kind], size).double()
    assert bool((drawn > 0).all())
    assert bool(torch.isfinite(drawn).all())
    # Mean, second and third moments of a standard exponential: 1, 2, 6, with variances 1, 20, 684.
    for power, moment, variance in ((1, 1, 1), (2, 2, 20), (3, 6, 684)):
        error = (drawn**power).mean(dim=1) - moment
        assert float(error.abs().max()) < 5 * math.sqrt(variance / size)
        assert abs(float(error.mean())) < 5 * math.sqrt(variance / drawn.numel())
    # Kolmogorov-Smirnov over all draws.
    ordered = (1 - (-drawn.flatten()).exp()).sort().values
    steps = torch.arange(1, ordered.numel() + 1, dtype=torch.float64) / ordered.numel()
    assert float((ordered - steps).abs().max()) < 2.5 / math.sqrt(ordered.numel())
    # Neighbouring rows, and neighbouring vocabulary ids within a row.
    for one, other in ((drawn[:-1], drawn[1:]), (drawn[:, :-1], drawn[:, 1:]), (drawn[:8], drawn[8:])):
        correlation = ((one - 1) * (other - 1)).mean()
        assert abs(float(correlation)) < 5 / math.sqrt(one.numel())


def test_winners_of_successive_positions_are_independent() -> None:
    """Who has the smallest of 8 draws: every pair of (this position, the next) equally often."""
    rows = 32_768
    keys = [ops.sample_key(0, "index:0", sample) for sample in range(rows)]
    now = rows_of_noise(keys, [0] * rows, 8).argmin(dim=1)
    then = rows_of_noise(keys, [1] * rows, 8).argmin(dim=1)
    pairs = torch.bincount(now * 8 + then, minlength=64).double()
    expected = rows / 64
    statistic = float(((pairs - expected) ** 2 / expected).sum())
    assert abs(statistic - 63) < 4.5 * math.sqrt(2 * 63)


def test_winners_of_neighbouring_samples_are_independent() -> None:
    rows = 32_768
    keys = [ops.sample_key(7, "name:x", sample) for sample in range(rows)]
    winners = rows_of_noise(keys, [5] * rows, 8).argmin(dim=1)
    pairs = torch.bincount(winners[:-1] * 8 + winners[1:], minlength=64).double()
    expected = (rows - 1) / 64
    statistic = float(((pairs - expected) ** 2 / expected).sum())
    assert abs(statistic - 63) < 4.5 * math.sqrt(2 * 63)


def test_small_draws_are_resolved_finely_enough_for_a_large_vocabulary() -> None:
    """The winner of a flat vocabulary of a million ids is near 1e-6: there must be many values there."""
    drawn = rows_of_noise([ops.sample_key(0, "index:0", 0)], [0], 1 << 20).flatten()
    smallest = drawn.sort().values[:1000]
    assert smallest.unique().numel() == 1000
    assert float(smallest[0]) > 1e-10
    assert float(smallest[-1]) == pytest.approx(1000 / (1 << 20), rel=0.15)


def test_nothing_draws_from_a_global_generator() -> None:
    import random

    import numpy as np

    states: list[Any] = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]
    rows_of_noise([ops.sample_key(0, "index:0", 0)], [0], 100)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == [random.getstate(), np.random.get_state()[1].tolist()]
