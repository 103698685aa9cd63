"""Who wins a draw: the largest weight / noise of each row, with as little work per token as is exact.

An argmax over a vocabulary goes token by token, ten times slower than the maximum of the same row; and the
noise needs a float64 logarithm. So maxima of blocks come first, and only blocks that may hold the winner are
looked into.
"""

from __future__ import annotations

import torch

from rollout_pool.kernels.counter_hash import draw_bits, exponential, least_bits

BLOCK = 256
"""Tokens whose maximum is taken together."""
_MARGIN = 1 - 1e-5
"""For the rounding of a bound: far above that of float32, and it lets hardly another block in."""


def block_maxima(values: torch.Tensor) -> torch.Tensor:
    """The largest of every block of ``[rows, vocab]``: ``[rows, blocks]``; the last block may be shorter."""
    whole = values.shape[1] // BLOCK * BLOCK
    parts = []
    if whole:
        parts.append(values[:, :whole].unflatten(1, (-1, BLOCK)).amax(dim=2))
    if whole < values.shape[1]:
        parts.append(values[:, whole:].amax(dim=1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def first_largest(values: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """``values.argmax(dim=1)`` of ``[rows, vocab]``: the first of equals; of nan, if there is any.

    maxima: :func:`block_maxima` of the values.
    """
    ids = _ids(maxima.argmax(dim=1, keepdim=True), values.shape[1])
    return ids.gather(1, values.gather(1, ids).argmax(dim=1, keepdim=True)).squeeze(1)


def bounds(weights: torch.Tensor, vocab: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What weight / noise does not exceed in each block, to rounding: float32 ``[rows, blocks]``.

    Nan where a weight is 0 and its noise may be.

    weights: float32 ``[rows, vocab]``, none below zero; overwritten. vocab:
    :func:`counter_hash.vocabulary_hash`. keys: :func:`counter_hash.position_keys`.

    The noise -log(1 - u) is at least u, and u at least what its upper bits say; so weight / noise is at most
    weight / upper bits.
    """
    return block_maxima(weights.div_(least_bits(vocab, keys).to(torch.float32))).mul_(2.0**31)


def winners(
    scores: torch.Tensor, top: torch.Tensor, bounds: torch.Tensor, vocab: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """``(exp(scores - top) / exponential_noise(vocab, keys)).argmax(dim=1)``: int64 ``[rows]``.

    scores: float32 ``[rows, vocab]``. top: ``[rows]``, the largest of each row. bounds: :func:`bounds` of
    exp(scores - top). A row whose largest is not finite gets some token.

    A block whose bound is below what some token reaches cannot hold the winner; the noise is computed in the
    others.
    """
    size = scores.shape[1]

    def ratios(row: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        weights = (scores[row, ids] - top[row]).exp_()
        return weights / exponential(draw_bits(vocab[ids], keys[row.squeeze(1)]))

    every_row = torch.arange(scores.shape[0], device=scores.device).unsqueeze(1)
    promise = bounds.nan_to_num(nan=0.0, posinf=0.0)  # of these nothing is known
    likely = _ids(promise.argmax(dim=1, keepdim=True), size)
    reached = ratios(every_row, likely).amax(dim=1, keepdim=True)
    is_possible = ~(bounds < reached * _MARGIN) & top.isfinite().unsqueeze(1)
    row, block = is_possible.nonzero().unbind(dim=1)
    ids = _ids(block.unsqueeze(1), size)
    best, place = ratios(row.unsqueeze(1), ids).max(dim=1)
    # Of equals the first wins, as in an argmax of the whole row: blocks and places are in order.
    table = torch.full_like(bounds, float("-inf"))
    table[row, block] = best
    tokens = torch.zeros_like(bounds, dtype=torch.int64)
    tokens[row, block] = ids.gather(1, place.unsqueeze(1)).squeeze(1)
    return tokens.gather(1, table.argmax(dim=1, keepdim=True)).squeeze(1)


def _ids(block: torch.Tensor, size: int) -> torch.Tensor:
    """The tokens of a block per row, ``[rows, 1]`` to ``[rows, BLOCK]``; past the end the last one again."""
    return (block * BLOCK + torch.arange(BLOCK, device=block.device)).clamp_(max=size - 1)
