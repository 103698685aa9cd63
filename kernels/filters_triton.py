"""Top-k, top-p and min-p of one row in Triton, without a sort.

All three keep the highest scores, so each is a lowest score that stays. It is found digit by digit: the
bits of a float, read as an integer, are in the order of the floats; so one pass over the vocabulary that
adds up what lies above each of a few candidates finds the next few bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from rollout_pool.kernels.counter_hash_triton import draw_hash, exponential

DIGIT_BITS = 3
"""Bits found per pass: 2 or more, and a divisor of 30."""
_KEY_OF_MINUS_INFINITY = tl.constexpr(-2139095041)


@triton.jit
def _swap_order(bits):
    """Float bits to an int32 of the floats' order, and back."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _weights(scores, ids, vocab_size, top, floor):
    """Scores of ``ids``, and their weights exp(score - top), 0 below ``floor``."""
    score = tl.load(scores + ids, mask=ids < vocab_size, other=float("-inf"))
    return score, tl.where(score >= floor, tl.exp(score - top), 0.0)


@triton.jit
def _sum_kept(scores, vocab_size, top, floor, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab_size, BLOCK):
        _, weight = _weights(scores, first + tl.arange(0, BLOCK), vocab_size, top, floor)
        total += weight
    return tl.sum(total, axis=0)


@triton.jit
def _lowest_kept(
    scores, vocab_size, top, floor, target, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """The highest score s such that the scores from s upwards reach ``target``; -inf if all do not.

    They reach it by their number, or when WEIGHTED by the sum of their weights.
    """
    low = tl.full([], _KEY_OF_MINUS_INFINITY, tl.int64)
    step = tl.full([], 1 << 30, tl.int64)
    digit = tl.arange(0, 1 << BITS)
    for _ in range(30 // BITS + 1):
        marks = tl.minimum(low + step * (digit + 1), 0x7FFFFFFF).to(tl.int32)
        mass = tl.zeros([1 << BITS, BLOCK], tl.float32)
        for first in range(0, vocab_size, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            score, weight = _weights(scores, ids, vocab_size, top, floor)
            if not WEIGHTED:
                weight = tl.where(ids < vocab_size, 1.0, 0.0)
            key = _swap_order(score.to(tl.int32, bitcast=True))
            mass += tl.where(key[None, :] >= marks[:, None], weight[None, :], 0.0)
        reached = (tl.sum(mass, axis=1) >= target) & (digit < (1 << BITS) - 1)
        low += step * tl.sum(reached.to(tl.int64), axis=0)
        step = step >> BITS
    return _swap_order(low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _draw_from(scores, vocab, vocab_size, top, floor, first_key, second_key, BLOCK: tl.constexpr):
    """The draw among the scores from ``floor`` upwards, and the sum of their weights."""
    total = tl.zeros([BLOCK], tl.float32)
    best = tl.zeros([BLOCK], tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        _, weight = _weights(scores, ids, vocab_size, top, floor)
        total += weight
        if tl.max(weight, axis=0) > 0:  # few blocks have a token that stays
            hashed = tl.load(vocab + ids, mask=ids < vocab_size, other=0)
            value = weight / exponential(draw_hash(hashed, first_key, second_key))
            best_id = tl.where(value > best, ids, best_id)
            best = tl.maximum(best, value)
    winner = tl.min(tl.where(best == tl.max(best, axis=0), best_id, vocab_size - 1), axis=0)
    return winner, tl.sum(total, axis=0)


@triton.jit
def draw_filtered(
    scores, vocab, vocab_size, top, norm, k, p, log_min_p, first_key, second_key,
    BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Top-k, top-p among what is left, min-p: all three are a lowest score. Then the draw."""
    floor = tl.full([], float("-inf"), tl.float32)
    if k > 0:
        floor = _lowest_kept(scores, vocab_size, top, floor, k.to(tl.float32), False, BLOCK, BITS)
    if p < 1.0:
        if k > 0:
            norm = _sum_kept(scores, vocab_size, top, floor, BLOCK)
        floor = tl.maximum(floor, _lowest_kept(scores, vocab_size, top, floor, p * norm, True, BLOCK, BITS))
    floor = tl.maximum(floor, top + log_min_p)
    return _draw_from(scores, vocab, vocab_size, top, floor, first_key, second_key, BLOCK)
