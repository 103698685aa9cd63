"""Sampling against the distribution that Hugging Face's own processors give, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rollout_pool.kernels import ops

CPU = torch.device("cpu")
VOCAB = 16
PROMPT = [3, 5, 5, 9]
quick = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def hf_scores(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    penalty: float = 1.0,
    blocked: tuple[int, ...] = (),
    prompt: list[int] = PROMPT,
) -> torch.Tensor:
    """Scores after Hugging Face's processors, in the order of `generate`: float64 ``[vocab]``."""
    steps = LogitsProcessorList()
    if penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(penalty))
    if blocked:
        steps.append(SuppressTokensLogitsProcessor(list(blocked)))
    if temperature not in (0.0, 1.0):
        steps.append(TemperatureLogitsWarper(temperature))
    if top_k:
        steps.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        steps.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        steps.append(MinPLogitsWarper(min_p))
    return steps(torch.tensor([prompt]), logits.double().unsqueeze(0))[0]


def seen_mask(vocab: int, prompt: list[int] = PROMPT) -> torch.Tensor:
    seen = torch.zeros(1, vocab, dtype=torch.bool)
    seen[0, prompt] = True
    return seen


def draw(
    logits: torch.Tensor, rows: Any, vocab_hash: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token per row from copies of ``logits``."""
    vocab = ops.vocabulary_hash(logits.shape[-1], CPU) if vocab_hash is None else vocab_hash
    size = rows.temperature.shape[0]
    return ops.sample_tokens(logits.expand(size, -1).clone(), rows, vocab)


def standard_score(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """How many standard deviations the chi-squared statistic lies above its mean."""
    probable = probabilities > 0
    assert int(counts[~probable].sum()) == 0, "a token of probability zero was drawn"
    expected = probabilities[probable] * counts.sum()
    statistic = float(((counts[probable] - expected) ** 2 / expected).sum())
    freedom = int(probable.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom) if freedom else 0.0


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.5},
    "top-k": {"top_k": 5},
    "top-k-of-everything": {"top_k": 400},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "top-k-then-top-p": {"top_k": 6, "top_p": 0.7},
    "all-three": {"temperature": 1.3, "top_k": 9, "top_p": 0.95, "min_p": 0.05},
    "penalty": {"penalty": 1.8},
    "reward": {"penalty": 0.6},
    "blocked": {"blocked": (1, 7)},
    "everything": {
        "temperature": 0.8,
        "top_k": 10,
        "top_p": 0.9,
        "min_p": 0.02,
        "penalty": 1.3,
        "blocked": (2,),
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_follow_the_exact_distribution(name: str, sampling_rows: Any) -> None:
    wanted = SETTINGS[name]
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(7)) * 1.5
    exact = hf_scores(logits, **wanted).softmax(dim=-1)
    seen = seen_mask(VOCAB) if "penalty" in wanted else None
    tokens, logprobs, sampling_logprobs = draw(logits, sampling_rows(20_000, seen=seen, **wanted))

    counts = torch.bincount(tokens, minlength=VOCAB).double()
    assert standard_score(counts, exact) < 4.5
    assert set(tokens.tolist()) == set(exact.nonzero().flatten().tolist()), "the kept set"
    torch.testing.assert_close(sampling_logprobs.double(), exact.log()[tokens], atol=1e-5, rtol=0)
    plain = torch.log_softmax(logits.double() / wanted.get("temperature", 1.0), dim=-1)
    torch.testing.assert_close(logprobs.double(), plain[tokens], atol=1e-5, rtol=0)


def test_rows_with_different_settings_do_not_touch_each_other(sampling_rows: Any) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(8))
    mixed = [SETTINGS[name] for name in ("plain", "top-k", "top-p", "min-p", "cold", "everything")]
    fields: dict[str, Any] = {
        key: [one.get(key, default) for one in mixed] * 50
        for key, default in (
            ("temperature", 1.0),
            ("top_k", 0),
            ("top_p", 1.0),
            ("min_p", 0.0),
            ("penalty", 1.0),
        )
    }
    rows = sampling_rows(300, seen=seen_mask(VOCAB), **fields)
    rows.blocked[5::6] = 2
    tokens, logprobs, sampling_logprobs = draw(logits, rows)
    for number, one in enumerate(mixed):
        exact = hf_scores(logits, **one).log_softmax(dim=-1)
        mine = tokens[number::6]
        torch.testing.assert_close(sampling_logprobs[number::6].double(), exact[mine], atol=1e-5, rtol=0)
        plain = torch.log_softmax(logits.double() / one.get("temperature", 1.0), dim=-1)
        torch.testing.assert_close(logprobs[number::6].double(), plain[mine], atol=1e-5, rtol=0)


@quick
@given(
    vocab=st.sampled_from([2, 7, 600, 3000]),
    spread=st.floats(0.01, 12),
    temperature=st.floats(0.05, 5),
    top_k=st.sampled_from([0, 1, 2, 50, 511, 512, 513, 5000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    penalty=st.sampled_from([1.0, 1.3, 0.7]),
    seed=st.integers(0, 2**31),
)
def test_what_is_kept_and_its_mass_are_those_of_hugging_face(
    vocab: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float, seed: int,
    sampling_rows: Any,
) -> None:  # fmt: skip
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread
    prompt = [0, vocab - 1]
    wanted = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "penalty": penalty}
    scores = hf_scores(logits, prompt=prompt, **wanted)
    _assume_clear_of_the_edges(logits, prompt, wanted)
    rows = sampling_rows(8, seen=seen_mask(vocab, prompt), seed=seed, **wanted)
    tokens, logprobs, sampling_logprobs = draw(logits, rows)
    exact = scores.log_softmax(dim=-1)
    assert torch.isfinite(scores[tokens]).all(), "a token outside the kept set was drawn"
    torch.testing.assert_close(sampling_logprobs.double(), exact[tokens], atol=2e-4, rtol=1e-5)
    plain = torch.log_softmax(logits.double() / temperature, dim=-1)
    torch.testing.assert_close(logprobs.double(), plain[tokens], atol=2e-4, rtol=1e-5)


def _assume_clear_of_the_edges(logits: torch.Tensor, prompt: list[int], wanted: dict[str, Any]) -> None:
    """Skip draws in which rounding to float32 could move a token over the edge of the kept set."""
    before_p = hf_scores(logits, prompt=prompt, **{**wanted, "top_p": 1.0, "min_p": 0.0})
    mass = before_p.softmax(dim=-1).sort(descending=True).values.cumsum(dim=-1)
    assume(wanted["top_p"] == 1.0 or float((mass - wanted["top_p"]).abs().min()) > 1e-5)
    before_min_p = hf_scores(logits, prompt=prompt, **{**wanted, "min_p": 0.0})
    relative = (before_min_p - before_min_p.max()).exp()
    assume(wanted["min_p"] in (0.0, 1.0) or float((relative - wanted["min_p"]).abs().min()) > 1e-5)
    scores = hf_scores(logits, prompt=prompt, **{**wanted, "top_k": 0, "top_p": 1.0, "min_p": 0.0})
    gaps = scores.sort().values.diff()
    assume(float(gaps.min()) > 1e-6 * float(scores.abs().max()))


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.3}, {"top_k": 3, "top_p": 0.5, "min_p": 0.2}])
def test_temperature_zero_is_greedy_whatever_the_filters_say(
    filters: dict[str, Any], sampling_rows: Any
) -> None:
    logits = torch.randn(64, 200, generator=torch.Generator().manual_seed(1))
    expected = torch.log_softmax(logits.double(), dim=-1).max(dim=-1)
    tokens, logprobs, sampling_logprobs = ops.sample_tokens(
        logits.clone(), sampling_rows(64, temperature=0.0, **filters), ops.vocabulary_hash(200, CPU)
    )
    assert tokens.tolist() == logits.argmax(dim=-1).tolist()
    torch.testing.assert_close(logprobs.double(), expected.values, atol=1e-5, rtol=0)
    assert sampling_logprobs.tolist() == [0.0] * 64


def test_a_penalty_counts_in_greedy_rows(sampling_rows: Any) -> None:
    logits = torch.zeros(VOCAB)
    logits[3], logits[4] = 5.0, 4.0  # 3 is in the prompt
    tokens, logprobs, _ = draw(
        logits, sampling_rows(2, temperature=0.0, penalty=[1.0, 2.0], seen=seen_mask(VOCAB))
    )
    assert tokens.tolist() == [3, 4]
    plain = torch.log_softmax(logits, dim=-1)
    torch.testing.assert_close(logprobs, plain[[3, 4]])


def test_flags_only_save_work(sampling_rows: Any) -> None:
    """A neighbour that needs filters or penalties changes no bit of a row that needs none."""
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(3)) * 4
    vocab = ops.vocabulary_hash(3000, CPU)
    plain = sampling_rows(6, adjusted=False, filtered=False)
    among = sampling_rows(6, adjusted=True, filtered=True, seen=torch.ones(1, 3000, dtype=torch.bool))
    for alone, in_company in zip(
        ops.sample_tokens(logits.clone(), plain, vocab),
        ops.sample_tokens(logits.clone(), among, vocab),
        strict=True,
    ):
        assert torch.equal(alone, in_company)


def test_log_softmax_does_not_underflow(sampling_rows: Any) -> None:
    logits = torch.tensor([0.0, -120.0, -700.0])
    for blocked, token, logprob in (((0,), 1, -120.0), ((0, 1), 2, -700.0)):
        tokens, logprobs, sampling_logprobs = draw(logits, sampling_rows(1, blocked=blocked))
        assert tokens.tolist() == [token]
        assert logprobs.item() == pytest.approx(logprob, abs=1e-4)
        assert sampling_logprobs.item() == pytest.approx(0.0, abs=1e-6)


def test_a_token_of_probability_zero_is_never_drawn(sampling_rows: Any) -> None:
    vocab = 49_152
    generator = torch.Generator().manual_seed(5)
    logits = torch.full((vocab,), float("-inf"))
    possible = torch.randperm(vocab, generator=generator)[:40]
    logits[possible] = torch.randn(40, generator=generator) * 30  # most of these 40 are next to impossible
    hashed = ops.vocabulary_hash(vocab, CPU)
    for wanted in ({}, {"temperature": 3.0}, {"top_p": 0.9}, {"top_k": 30, "min_p": 1e-6}):
        tokens, logprobs, sampling_logprobs = draw(logits, sampling_rows(64, **wanted), hashed)
        assert torch.isin(tokens, possible).all()
        assert torch.isfinite(logprobs).all()
        assert torch.isfinite(sampling_logprobs).all()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 50.0, 3e4])
def test_extreme_logits_give_finite_results(scale: float, sampling_rows: Any) -> None:
    logits = torch.randn(49_152, generator=torch.Generator().manual_seed(6)) * scale
    tokens, logprobs, sampling_logprobs = draw(
        logits, sampling_rows(4, top_p=[1.0, 0.9, 0.5, 1.0], top_k=[0, 0, 9, 9])
    )
    assert torch.isfinite(logprobs).all()
    assert torch.isfinite(sampling_logprobs).all()
    assert (logprobs <= 1e-6).all()
    assert (sampling_logprobs <= 1e-6).all()
    assert ((tokens >= 0) & (tokens < 49_152)).all()


def test_equal_logits_are_all_possible(sampling_rows: Any) -> None:
    """A flat distribution over a large vocabulary: every region of it is drawn as often as any other."""
    tokens, logprobs, _ = draw(torch.zeros(32_768), sampling_rows(1024))
    counts = torch.bincount(tokens // 2048, minlength=16).double()
    assert standard_score(counts, torch.full((16,), 1 / 16, dtype=torch.float64)) < 4.5
    assert len(set(tokens.tolist())) > 985  # of 1024 draws; 1008 expected
    torch.testing.assert_close(logprobs, torch.full((1024,), -math.log(32_768)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fault", ["nan", "inf", "all-minus-inf"])
def test_logits_that_are_not_finite_are_reported_in_their_own_row(
    fault: str, temperature: float, sampling_rows: Any
) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    clean = ops.sample_tokens(
        logits.clone(), sampling_rows(3, temperature=temperature), ops.vocabulary_hash(50, CPU)
    )
    if fault == "all-minus-inf":
        logits[1] = float("-inf")
    else:
        logits[1, 17] = float(fault)
    tokens, logprobs, sampling_logprobs = ops.sample_tokens(
        logits, sampling_rows(3, temperature=temperature, top_p=[1.0, 0.9, 1.0]), ops.vocabulary_hash(50, CPU)
    )
    assert logprobs.isnan().tolist() == [False, True, False]
    assert sampling_logprobs.isnan().tolist() == [False, True, False]
    assert [tokens[0], tokens[2]] == [clean[0][0], clean[0][2]]
    assert ((tokens >= 0) & (tokens < 50)).all(), "the token is still one that an embedding has"


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("vocab", [7, 1000, 49_152, 200_003])
def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are(
    vocab: int, threads: int, sampling_rows: Any
) -> None:
    size = 6 if vocab > 10_000 else 33
    logits = torch.randn(size, vocab, generator=torch.Generator().manual_seed(4)) * 3
    hashed = ops.vocabulary_hash(vocab, CPU)
    wanted = {"temperature": 0.9, "top_p": [1.0, 0.9, 0.99] * (size // 3), "top_k": [0, 0, 40] * (size // 3)}
    rows = sampling_rows(size, **wanted)
    together = ops.sample_tokens(logits.clone(), rows, hashed)
    for part in (slice(0, 1), slice(4, 5), slice(1, 3), slice(2, 6), slice(size - 1, size)):
        alone = ops.sample_tokens(logits[part].clone(), rows.part(part.start, part.stop), hashed)
        for all_rows, some in zip(together, alone, strict=True):
            assert torch.equal(all_rows[part], some)


def test_samples_positions_and_seeds_draw_differently_and_again_the_same(sampling_rows: Any) -> None:
    logits = torch.zeros(5000)
    draws = {
        (seed, first, position): tuple(
            draw(logits, sampling_rows(4, seed=seed, first=first, position=position))[0]
        )
        for seed in (0, 1)
        for first in (0, 4)
        for position in (0, 1)
    }
    tokens = [int(token) for row in draws.values() for token in row]
    assert len(set(tokens)) > 28  # 32 draws from 5000
    again = tuple(draw(logits, sampling_rows(4, seed=1, first=4, position=1))[0])
    assert again == draws[(1, 4, 1)]
