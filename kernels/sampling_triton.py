"""Triton form of :func:`rollout_pool.kernels.sampling_reference.sample_tokens`, without a sort.

Two kernels. The first reads the vocabulary once, in blocks over the whole GPU: penalties, temperature,
softmax sums and the best draw of every block. That decides rows without filters. The second, one
program per row, puts the blocks together, and draws again for a row with top-k, top-p or min-p (see
:mod:`rollout_pool.kernels.filters_triton`). Sums are added in a fixed order, and blocks have a fixed size,
so a row's result does not depend on the other rows.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_pool.kernels.counter_hash_triton import draw_hash, exponential
from rollout_pool.kernels.filters_triton import DIGIT_BITS, draw_filtered
from rollout_pool.kernels.launching import on_device, power_of_two
from rollout_pool.kernels.sampling_reference import SamplingRows

SCAN_BLOCK = 2048
ROW_BLOCK = 1024


@triton.jit
def _adjusted(logit, ids, inside, row, penalty, seen, seen_stride, blocked, width, HAS_SEEN: tl.constexpr):
    """Repetition penalty and blocked ids."""
    if HAS_SEEN:
        was_seen = tl.load(seen + row * seen_stride + ids, mask=inside, other=0) != 0
        factor = tl.load(penalty + row)
        penalised = tl.where(logit < 0, logit * factor, tl.div_rn(logit, factor))
        logit = tl.where(was_seen, penalised, logit)
    for i in range(width):
        logit = tl.where(ids == tl.load(blocked + row * width + i), float("-inf"), logit)
    return logit


@triton.jit
def _softmax_sum(scores):
    """The largest score, what to subtract before exp (finite), and the weights exp(score - that)."""
    top = tl.max(scores, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.exp(scores - shift)


@triton.jit
def _temperature_of(temperature, row):
    """(whether the row is greedy, what its logits are divided by)"""
    value = tl.load(temperature + row)
    return value == 0, tl.where(value == 0, 1.0, value)


@triton.jit(do_not_specialize=["width"])
def scan_kernel(
    logits, scores, vocab, keys, temperature, penalty, seen, blocked, width, sums, ids_out,
    vocab_size, logits_stride, scores_stride, seen_stride,
    ADJUSTED: tl.constexpr, HAS_SEEN: tl.constexpr, FILTERED: tl.constexpr, SAMPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    greedy, divisor = _temperature_of(temperature, row)
    logit = tl.load(logits + row * logits_stride + ids, mask=inside, other=float("-inf"))
    place = sums + (row * tl.num_programs(0) + block) * 5
    if ADJUSTED:
        plain_top, plain_weight = _softmax_sum(tl.div_rn(logit, divisor))
        tl.store(place + 3, plain_top)
        tl.store(place + 4, tl.sum(plain_weight, axis=0))
        logit = _adjusted(logit, ids, inside, row, penalty, seen, seen_stride, blocked, width, HAS_SEEN)
    score = tl.div_rn(logit, divisor)
    if FILTERED:
        tl.store(scores + row * scores_stride + ids, score, mask=inside)
    top, weight = _softmax_sum(score)
    value = score
    if SAMPLED:
        hash_ = draw_hash(
            tl.load(vocab + ids, mask=inside, other=0), tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1)
        )
        value = tl.where(greedy, score, weight / exponential(hash_))
    best = tl.max(value, axis=0)
    tl.store(place, top)
    tl.store(place + 1, tl.sum(weight, axis=0))
    tl.store(place + 2, best)
    # The lowest id among equals; a row of nan has none.
    best_id = tl.min(tl.where(value == best, ids, vocab_size - 1), axis=0)
    tl.store(ids_out + row * tl.num_programs(0) + block, best_id)


@triton.jit(do_not_specialize=["width", "blocks"])
def draw_kernel(
    logits, scores, vocab, keys, temperature, penalty, seen, blocked, width, sums, ids_in,
    vocab_size, logits_stride, scores_stride, seen_stride,
    top_k, top_p, log_min_p, blocks, tokens, logprobs,
    ADJUSTED: tl.constexpr, HAS_SEEN: tl.constexpr, FILTERED: tl.constexpr, SAMPLED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    listed = block < blocks
    place = sums + (row * blocks + block) * 5
    greedy, divisor = _temperature_of(temperature, row)
    tops = tl.load(place, mask=listed, other=float("-inf"))
    top, scale = _softmax_sum(tops)
    norm = tl.sum(tl.load(place + 1, mask=listed, other=0.0) * scale, axis=0)
    value = tl.load(place + 2, mask=listed, other=float("-inf"))
    value = tl.where(listed & (greedy == 0), value * scale, value)
    best_ids = tl.load(ids_in + row * blocks + block, mask=listed, other=0)
    token = tl.min(tl.where(value == tl.max(value, axis=0), best_ids, vocab_size - 1), axis=0)
    if ADJUSTED:
        plain_top, plain_scale = _softmax_sum(tl.load(place + 3, mask=listed, other=float("-inf")))
        plain_norm = tl.sum(tl.load(place + 4, mask=listed, other=0.0) * plain_scale, axis=0)
    else:
        plain_top, plain_norm = top, norm
    if FILTERED and SAMPLED:
        k, p, min_p = tl.load(top_k + row), tl.load(top_p + row), tl.load(log_min_p + row)
        if (greedy == 0) & ((k > 0) | (p < 1.0) | (min_p > float("-inf"))):
            token, norm = draw_filtered(
                scores + row * scores_stride, vocab, vocab_size, top, norm, k, p, min_p,
                tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1), BLOCK, BITS,
            )  # fmt: skip
    if FILTERED and not ADJUSTED:  # the scores have overwritten the logits
        score = tl.load(scores + row * scores_stride + token)
        plain = score
    else:
        logit = tl.load(logits + row * logits_stride + token)
        plain = tl.div_rn(logit, divisor)
        score = plain
        if ADJUSTED:
            inside = token < vocab_size
            logit = _adjusted(
                logit, token, inside, row, penalty, seen, seen_stride, blocked, width, HAS_SEEN
            )  # fmt: skip
            score = tl.div_rn(logit, divisor)
    sampling = score - top - tl.log(norm)
    sampling = tl.where(greedy & (sampling == sampling), 0.0, sampling)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, plain - plain_top - tl.log(plain_norm))
    tl.store(logprobs + tl.num_programs(0) + row, sampling)


def sample_tokens(
    logits: torch.Tensor, rows: SamplingRows, vocab: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`rollout_pool.kernels.sampling_reference.sample_tokens`."""
    count, vocab_size = logits.shape
    device, blocks = logits.device, triton.cdiv(vocab_size, SCAN_BLOCK)
    scores = torch.empty_like(logits) if rows.adjusted and rows.filtered else logits
    sums = torch.empty(count, blocks, 5, dtype=torch.float32, device=device)
    best_ids = torch.empty(count, blocks, dtype=torch.int32, device=device)
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    logprobs = torch.empty(2, count, dtype=torch.float32, device=device)
    seen = None if rows.seen is None else rows.seen.view(torch.uint8)
    shared = (
        logits, scores, vocab, rows.keys.contiguous(),
        rows.temperature.contiguous(), rows.penalty.contiguous(), seen,
        rows.blocked.contiguous(), rows.blocked.shape[1], sums, best_ids,
        vocab_size, logits.stride(0), scores.stride(0), 0 if seen is None else seen.stride(0),
    )  # fmt: skip
    flags = {
        "ADJUSTED": rows.adjusted, "HAS_SEEN": rows.adjusted and seen is not None, "FILTERED": rows.filtered,
        "SAMPLED": rows.sampled, "num_warps": 8, "enable_fp_fusion": False,
    }  # fmt: skip
    filters = (rows.top_k.contiguous(), rows.top_p.contiguous(), rows.min_p.log())
    with on_device(logits):
        scan_kernel[(blocks, count)](*shared, BLOCK=SCAN_BLOCK, **flags)
        draw_kernel[(count,)](
            *shared, *filters, blocks, tokens, logprobs,
            BLOCK=ROW_BLOCK, BLOCKS=power_of_two(blocks), BITS=DIGIT_BITS, **flags,
        )  # fmt: skip
    return tokens, logprobs[0], logprobs[1]
