"""Part a, randomness and sampling: the reference's bits, tokens and log-probabilities, and the exact
distribution."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from gpu.draws import Draw, poisoned_allocations
from gpu.parts import Row, Setting, Step
from rollout_pool.kernels import counter_hash, counter_hash_triton, sampling_reference, sampling_triton
from rollout_pool.kernels.sampling_reference import SamplingRows

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
CPU = torch.device("cpu")
MIXED: dict[str, list[Any]] = {
    "temperature": [1.0, 0.7, 0.0, 1.5, 1.0, 1.0, 0.6, 1.0, 1.0, 2.0],
    "top_k": [0, 5, 3, 0, 1, 900, 40, 0, 2, 0],
    "top_p": [1.0, 1.0, 0.5, 0.9, 1.0, 0.99, 0.8, 0.3, 0.6, 1.0],
    "min_p": [0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.02, 0.1, 0.0, 0.3],
    "penalty": [1.0, 1.3, 1.2, 0.7, 1.0, 2.0, 1.0, 1.1, 1.0, 1.5],
}
NUM_ROWS = len(MIXED["temperature"])
FLAGS = ("adjusted", "filtered", "sampled")
MIXTURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "min-p": {"temperature": 1.5, "min_p": 0.2},
    "top-k and top-p": {"temperature": 1.2, "top_k": 6, "top_p": 0.9},
}
TOLERANCE = 1e-4
"""On log-probabilities: sums over a large vocabulary are added in another order, and a token at the edge of
top-p may be in one sum and not in the other."""
TIE = 3e-5
"""Two candidates of a draw whose logarithms are closer than this may change places."""
MOST_SIGMAS = 6.0


def rows_of(draw: Draw, count: int, settings: dict[str, Any], **more: Any) -> SamplingRows:
    """Sampling rows, each with a random key; a setting is one number, or a list with one per row."""

    def column(name: str, neutral: float, dtype: torch.dtype) -> torch.Tensor:
        value = settings.get(name, neutral)
        return torch.tensor(value if isinstance(value, list) else [value] * count, dtype=dtype)

    rows = SamplingRows(
        temperature=column("temperature", 1.0, torch.float32), top_k=column("top_k", 0, torch.int64),
        top_p=column("top_p", 1.0, torch.float32), min_p=column("min_p", 0.0, torch.float32),
        penalty=column("penalty", 1.0, torch.float32), keys=draw.bits((count, 2), torch.int32),
        blocked=torch.full((count, 1), -1), **more,
    )  # fmt: skip
    return on(draw.device, rows)


def on(device: torch.device, rows: SamplingRows) -> SamplingRows:
    values = {field.name: getattr(rows, field.name) for field in fields(rows)}
    return replace(rows, **{k: v.to(device) for k, v in values.items() if isinstance(v, torch.Tensor)})


def check_hash(setting: Setting) -> list[Row]:
    """Keys and noise against plain torch on the CPU: a draw is the same bits wherever it is made."""
    draw = Draw(setting, "hash")
    rows, vocab_size = (3, 2_600) if setting.is_dry else (8, 131_072)
    keys, positions = draw.bits((rows, 2), torch.int32), draw.any_rows(1 << 20, rows)
    vocab = counter_hash.vocabulary_hash(vocab_size, setting.device)
    with poisoned_allocations():
        got_keys = counter_hash_triton.position_keys(keys, positions)
        got = counter_hash_triton.exponential_noise(vocab, got_keys)
    expected_keys = counter_hash.position_keys(keys.to(CPU), positions.to(CPU))
    expected = counter_hash.exponential_noise(counter_hash.vocabulary_hash(vocab_size, CPU), expected_keys)
    is_same = torch.equal(got_keys.to(CPU), expected_keys)
    differ = int((got.to(CPU) != expected).sum())
    draws = rows * vocab_size
    holds = differ <= draws >> 19  # a logarithm that is off by an ulp: one draw in 2**28
    figures = {"draws": draws, "different": differ}
    return [
        Row("position_keys: bits of the CPU's torch", f"{rows} rows", is_same),
        Row("noise: bits of the CPU's torch", f"{draws - differ} of {draws} draws", holds, figures),
    ]


def disagreement(got: Result, expected: Result, rows: SamplingRows, vocab: torch.Tensor) -> str:
    """What differs beyond rounding, or ""."""
    noise = counter_hash.exponential_noise(vocab, rows.keys)
    for row in (got[0] != expected[0]).nonzero().flatten().tolist():
        # Two forms may draw different tokens only when these finish a race within rounding of each other.
        is_greedy = not float(rows.temperature[row])
        finish = []
        for tokens, logprobs, sampling in (got, expected):
            token = int(tokens[row])
            if not 0 <= token < vocab.shape[0]:
                return f"row {row}: token {token} of {vocab.shape[0]}"
            value = logprobs[row] if is_greedy else sampling[row] - noise[row, token].log()
            finish.append(float(value))
        if not abs(finish[0] - finish[1]) <= TIE:
            return f"row {row}: token {int(got[0][row])}, the reference drew {int(expected[0][row])}"
    same = got[0] == expected[0]
    for name, one, other in zip(("logprobs", "sampling_logprobs"), got[1:], expected[1:], strict=True):
        error = (one - other).abs()[same]
        if error.numel() and not float(error.max()) <= TOLERANCE:
            return f"{name} off by {float(error.max()):.1e}"
    return ""


def check_sampling(setting: Setting, vocab_size: int) -> list[Row]:
    """Every set of flags, rows with all kinds of settings side by side."""
    name = f"sample_tokens, {vocab_size} ids"
    draw, faults = Draw(setting, name), []
    vocab = counter_hash.vocabulary_hash(vocab_size, setting.device)
    cases = list(product((False, True), repeat=3))
    for values in cases:
        flags = dict(zip(FLAGS, values, strict=True))
        wanted = MIXED if flags["sampled"] else {**MIXED, "temperature": 0.0}
        seen = (draw.normal(NUM_ROWS, vocab_size) > 0.7) if flags["adjusted"] else None
        rows = rows_of(draw, NUM_ROWS, wanted, seen=seen, **flags)
        rows.blocked = draw.any_rows(vocab_size, 2 * NUM_ROWS).view(-1, 2)
        logits = 3 * draw.normal(NUM_ROWS, vocab_size)
        expected = sampling_reference.sample_tokens(logits.clone(), rows, vocab)
        with poisoned_allocations():
            got = sampling_triton.sample_tokens(logits, rows, vocab)
        if fault := disagreement(got, expected, rows, vocab):
            faults.append(f"{flags}: {fault}")
    count = len(cases) * NUM_ROWS
    seen_text = f"{count} draws as the reference's" if not faults else faults[0]
    return [Row(name, seen_text, not faults, {"draws": count, "wrong": faults})]


def check_own_bits(setting: Setting) -> list[Row]:
    """A row alone is drawn as among others, and its log-probabilities have the same bits."""
    name = "sample_tokens: a row's bits are its own"
    draw, vocab_size = Draw(setting, name), 300 if setting.is_dry else 50_257
    vocab = counter_hash.vocabulary_hash(vocab_size, setting.device)
    seen, logits = draw.normal(NUM_ROWS, vocab_size) > 0.7, 3 * draw.normal(NUM_ROWS, vocab_size)
    rows = rows_of(draw, NUM_ROWS, MIXED, seen=seen)
    together = sampling_triton.sample_tokens(logits.clone(), rows, vocab)
    equal = 0
    checked = (0, 3, 6) if setting.is_dry else range(NUM_ROWS)
    for row in checked:
        one = logits[row : row + 1].clone()
        alone = sampling_triton.sample_tokens(one, rows.part(row, row + 1), vocab)
        equal += all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))
    return [Row(name, f"{equal} of {len(checked)} rows", equal == len(checked), {"equal": equal})]


def exact_distribution(logits: list[float], settings: dict[str, Any]) -> torch.Tensor:
    """The probabilities that temperature, top-k, top-p and min-p leave, by the definition: float64."""
    weights = [math.exp(logit / settings.get("temperature", 1.0)) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    kept = order[: settings.get("top_k") or None]
    enough, mass, nucleus = settings.get("top_p", 1.0) * sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if mass < enough and weights[token] >= settings.get("min_p", 0.0) * weights[order[0]]:
            nucleus.append(token)
        mass += weights[token]
    exact = torch.zeros(len(logits), dtype=torch.float64)
    exact[nucleus] = torch.tensor([weights[token] for token in nucleus], dtype=torch.float64)
    return exact / exact.sum()


def check_distribution(setting: Setting, mixture: str) -> list[Row]:
    """A chi-squared test of many draws from nine ids."""
    name, settings = f"sample_tokens, {mixture}: the exact distribution", MIXTURES[mixture]
    draw, count = Draw(setting, name), 40 if setting.is_dry else 100_000
    logits = 1.2 * draw.normal(1, 9)
    rows = rows_of(draw, count, settings, adjusted=False, filtered=bool(settings))
    vocab = counter_hash.vocabulary_hash(9, setting.device)
    tokens, _, _ = sampling_triton.sample_tokens(logits.repeat(count, 1), rows, vocab)
    exact = exact_distribution(logits[0].tolist(), settings)
    seen = torch.bincount(tokens.to(CPU), minlength=9)
    possible = exact > 0
    expected = exact[possible] * count
    freedom = max(1, int(possible.sum()) - 1)
    chi_squared = float(((seen[possible] - expected) ** 2 / expected).sum())
    sigmas = (chi_squared - freedom) / math.sqrt(2 * freedom)
    holds = sigmas < MOST_SIGMAS and not int(seen[~possible].sum())
    text = f"chi-squared {chi_squared:.1f} at {freedom} degrees of freedom, {count} draws"
    return [Row(name, text, holds, {"chi_squared": chi_squared, "freedom": freedom, "draws": count})]


def steps(setting: Setting) -> list[Step]:
    if setting.is_dry:  # several blocks of a small vocabulary, and few passes of the search
        sampling_triton.SCAN_BLOCK, sampling_triton.ROW_BLOCK, sampling_triton.DIGIT_BITS = 128, 256, 10
    sizes = (300,) if setting.is_dry else (50_257, 128_256)
    return [
        Step("position_keys and noise", partial(check_hash, setting)),
        *(Step(f"sample_tokens, {size} ids", partial(check_sampling, setting, size)) for size in sizes),
        Step("sample_tokens: own bits", partial(check_own_bits, setting)),
        *(
            Step(f"sample_tokens: exact, {mixture}", partial(check_distribution, setting, mixture))
            for mixture in MIXTURES
        ),
    ]
