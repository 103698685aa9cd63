"""Sampling in Triton: the reference's tokens from the same noise, and the exact distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_pool.kernels import counter_hash, sampling_reference, sampling_triton
from rollout_pool.kernels.sampling_reference import SamplingRows

pytestmark = [
    pytest.mark.usefixtures("guarded_outputs"),
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),  # numpy's, of the interpreter
]
few = settings(
    max_examples=15,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
ROWS = 10
MIXED: dict[str, Any] = {
    "temperature": [1.0, 0.7, 0.0, 1.5, 1.0, 1.0, 0.6, 1.0, 1.0, 2.0],
    "top_k": [0, 5, 3, 0, 1, 900, 40, 0, 2, 0],
    "top_p": [1.0, 1.0, 0.5, 0.9, 1.0, 0.99, 0.8, 0.3, 0.6, 1.0],
    "min_p": [0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.02, 0.1, 0.0, 0.3],
    "penalty": [1.0, 1.3, 1.2, 0.7, 1.0, 2.0, 1.0, 1.1, 1.0, 1.5],
}
FLAGS = {
    " ".join(name for name, on in flags.items() if on) or "none": flags
    for flags in (
        dict(zip(("adjusted", "filtered", "sampled"), values, strict=True))
        for values in product((False, True), repeat=3)
    )
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of a small vocabulary, and fewer passes of the search than a GPU makes."""
    monkeypatch.setattr(sampling_triton, "SCAN_BLOCK", 128)
    monkeypatch.setattr(sampling_triton, "ROW_BLOCK", 256)
    monkeypatch.setattr(sampling_triton, "DIGIT_BITS", 6)


def on(device: torch.device, rows: SamplingRows) -> SamplingRows:
    values = {field.name: getattr(rows, field.name) for field in fields(rows)}
    return replace(rows, **{k: v.to(device) for k, v in values.items() if isinstance(v, torch.Tensor)})


def both(logits: torch.Tensor, rows: SamplingRows) -> tuple[Result, Result]:
    vocab = counter_hash.vocabulary_hash(logits.shape[1], logits.device)
    expected = sampling_reference.sample_tokens(logits.clone(), rows, vocab)
    return sampling_triton.sample_tokens(logits.clone(), rows, vocab), expected


def assert_same(got: Result, expected: Result) -> None:
    assert got[0].dtype == torch.int64
    assert got[0].tolist() == expected[0].tolist()
    for one, other in zip(got[1:], expected[1:], strict=True):
        torch.testing.assert_close(one, other, atol=3e-6, rtol=1e-6, equal_nan=True)


def random_logits(rows: int, vocab: int, device: torch.device, scale: float = 3.0) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * scale).to(device)


@pytest.mark.parametrize("vocab", [5, 300])
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
def test_tokens_and_logprobs_are_the_references(
    flags: dict[str, bool], vocab: int, sampling_rows: Callable[..., SamplingRows], device: torch.device
) -> None:
    seen = torch.arange(vocab).unsqueeze(0) % 3 == 0
    wanted = MIXED if flags["sampled"] else {**MIXED, "temperature": [0.0] * ROWS}
    rows = sampling_rows(ROWS, blocked=(1, vocab - 1, -1), seen=seen, **wanted, **flags)
    assert_same(*both(random_logits(ROWS, vocab, device), on(device, rows)))


@pytest.mark.parametrize("bits", [2, 3, 10])
def test_digits_of_any_size_find_the_same_threshold(
    bits: int,
    sampling_rows: Callable[..., SamplingRows],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling_triton, "DIGIT_BITS", bits)
    rows = sampling_rows(3, top_k=[2, 0, 5], top_p=[1.0, 0.7, 0.9], adjusted=False)
    assert_same(*both(random_logits(3, 40, device), on(device, rows)))


@few
@given(
    logits=st.lists(
        st.sampled_from([-1e30, -3.0, -0.5, -0.0, 0.0, 1e-40, 0.5, 2.0, 1e4, -math.inf]),
        min_size=2,
        max_size=9,
    ),
    k=st.integers(0, 10),
    p=st.sampled_from([1.0, 0.97, 0.59, 0.031]),
    min_p=st.sampled_from([0.0, 0.17]),
)
def test_ties_and_extremes(
    logits: list[float],
    k: int,
    p: float,
    min_p: float,
    sampling_rows: Callable[..., SamplingRows],
    device: torch.device,
) -> None:
    """Equal scores stand or fall together; minus infinity is never drawn."""
    row = torch.tensor([[1.0, *logits]], device=device)
    rows = on(device, sampling_rows(2, top_k=k, top_p=p, min_p=min_p, adjusted=False))
    got, expected = both(row.expand(2, -1), rows)
    assert_same(got, expected)
    assert bool(torch.isfinite(row[0, got[0]]).all())


@pytest.mark.parametrize(
    "wanted",
    [{}, {"temperature": 0.0}, {"top_k": 4, "top_p": 0.9}, {"min_p": 0.1}, {"penalty": 1.2, "top_k": 4}],
    ids=["sampled", "greedy", "top-k and top-p", "min-p", "penalty and top-k"],
)
def test_rows_that_are_not_finite_say_so_and_harm_no_other(
    wanted: dict[str, Any], sampling_rows: Callable[..., SamplingRows], device: torch.device
) -> None:
    logits = random_logits(6, 300, device)
    logits[1, 200], logits[2, 3], logits[3] = float("nan"), float("inf"), float("-inf")
    logits[5, 1:200] = float("-inf")  # ids that are masked are no fault
    flags = {"adjusted": "penalty" in wanted, "filtered": "top_k" in wanted or "min_p" in wanted}
    seen = torch.arange(300).unsqueeze(0) % 3 == 0
    rows = on(device, sampling_rows(6, **wanted, seen=seen, **flags))
    for tokens, logprobs, _ in (pair := both(logits, rows)):
        assert logprobs.isnan().tolist() == [False, True, True, True, False, False]
        assert bool(((tokens >= 0) & (tokens < 300)).all())
        assert bool(logits[5, tokens[5]].isfinite())
    sound = [0, 4, 5]
    assert_same(*((t[sound], a[sound], b[sound]) for t, a, b in pair))


def test_a_row_with_nothing_left_to_draw_says_so(
    sampling_rows: Callable[..., SamplingRows], device: torch.device
) -> None:
    """Blocked ids rule out all, or a penalty overflows: the plain distribution is sound all the same."""
    logits = random_logits(2, 300, device)
    logits[0, 1:], logits[1, 5] = float("-inf"), 3e38
    seen = torch.arange(300).unsqueeze(0) == 5
    for temperature, top_k in ((1.0, 0), (0.0, 0), (1.0, 3)):
        rows = on(
            device,
            sampling_rows(2, temperature=temperature, top_k=top_k, penalty=0.1, blocked=(0,), seen=seen),
        )
        for _, logprobs, sampling_logprobs in both(logits, rows):
            assert not bool((logprobs + sampling_logprobs).isfinite().any())


def test_logits_may_be_a_view(sampling_rows: Callable[..., SamplingRows], device: torch.device) -> None:
    """The last position of a longer tensor; the cells around it stay."""
    wide = random_logits(3, 900, device).view(3, 3, 300)
    before, vocab = wide.clone(), counter_hash.vocabulary_hash(300, device)
    rows = on(device, sampling_rows(3, top_k=7, temperature=0.8, adjusted=False))
    expected = sampling_reference.sample_tokens(wide[:, 2].clone(), rows, vocab)
    assert_same(sampling_triton.sample_tokens(wide[:, 2], rows, vocab), expected)
    assert torch.equal(wide[:, :2], before[:, :2])


def test_a_rows_bits_are_its_own(sampling_rows: Callable[..., SamplingRows], device: torch.device) -> None:
    logits = random_logits(ROWS, 300, device)
    seen = torch.arange(300).unsqueeze(0) % 5 == 0
    rows = on(device, sampling_rows(ROWS, seen=seen, blocked=(2,), **MIXED))
    vocab = counter_hash.vocabulary_hash(300, device)
    together = sampling_triton.sample_tokens(logits.clone(), rows, vocab)
    for row in (0, 3, 6):
        alone = sampling_triton.sample_tokens(logits[row : row + 1].clone(), rows.part(row, row + 1), vocab)
        assert all(torch.equal(one[0], many[row]) for one, many in zip(alone, together, strict=True))


def exact_distribution(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[float]:
    weights = [math.exp(logit / temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    kept = order[:top_k] if top_k else order
    total = sum(weights[token] for token in kept)
    mass, nucleus = 0.0, []
    for token in kept:
        if mass < top_p * total:
            nucleus.append(token)
        mass += weights[token]
    nucleus = [token for token in nucleus if weights[token] >= min_p * weights[order[0]]]
    total = sum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(logits))]


MIXTURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "min-p": {"temperature": 1.5, "min_p": 0.2},
    "top-k and top-p": {"temperature": 1.2, "top_k": 6, "top_p": 0.9},
}


@pytest.mark.parametrize("name", MIXTURES)
def test_draws_follow_the_exact_distribution(
    name: str,
    sampling_rows: Callable[..., SamplingRows],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling_triton, "DIGIT_BITS", 10)
    monkeypatch.setattr(sampling_triton, "ROW_BLOCK", 16)
    monkeypatch.setattr(sampling_triton, "SCAN_BLOCK", 16)
    wanted = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **MIXTURES[name]}
    draws = 20_000 if device.type == "cuda" else 160
    logits = random_logits(1, 9, device, scale=1.2)
    rows = sampling_rows(draws, **wanted, adjusted=False, filtered=name != "plain")
    vocab = counter_hash.vocabulary_hash(9, device)
    tokens, _, logprobs = sampling_triton.sample_tokens(logits.repeat(draws, 1), on(device, rows), vocab)
    exact = torch.tensor(exact_distribution(logits[0].tolist(), **wanted), dtype=torch.float64)
    counts = torch.bincount(tokens.cpu(), minlength=9)
    assert int(counts[exact == 0].sum()) == 0
    possible = exact > 0
    expected = exact[possible] * draws
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    assert (statistic - freedom) / math.sqrt(2 * freedom) < 4
    torch.testing.assert_close(logprobs.cpu().double(), exact[tokens.cpu()].log(), atol=2e-6, rtol=2e-6)
