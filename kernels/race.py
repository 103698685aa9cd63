"""Who wins a draw: the largest weight / noise of each row, with as little work per token as is exact.

An argmax over a vocabulary goes token by token, ten times slower than the maximum of the same row; and the
noise needs a float64 logarithm. So maxima of blocks come first, and only blocks that may hold the winner are
looked into.
"""

from __future__ import annotations

import torch

from rollout_pool.kernels.counter_hash import draw_bits, exponential

BLOCK = 256
"""Tokens whose maximum is taken together."""
_MARGIN = 1 - 1e-5
"""For the rounding of a bound: far above that of float32, and it lets hardly another block in."""


def first_largest(values: torch.Tensor) -> torch.Tensor:
    """``values.argmax(dim=1)`` of ``[rows, vocab]``: the first of equals; of nan, if there is any."""
    block = _block_maxima(values).argmax(dim=1, keepdim=True)
    ids = _ids(block, values.shape[1])
    return ids.gather(1, values.gather(1, ids).argmax(dim=1, keepdim=True)).squeeze(1)


def winners(weights: torch.Tensor, vocab: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``(weights / exponential_noise(vocab, keys)).argmax(dim=1)``: int64 ``[rows]``; overwrites nothing.

    weights: float32 ``[rows, vocab]``, none below zero. vocab: :func:`counter_hash.vocabulary_hash`. keys:
    :func:`counter_hash.position_keys`.

    The noise -log(1 - u) is at least u, so weight / u bounds weight / noise from above. A block whose largest
    bound is below what some token reaches cannot hold the winner; the noise is computed in the others.
    """
    size = weights.shape[1]
    bits = draw_bits(vocab, keys)
    bounds = _block_maxima(weights / bits.to(torch.float32).add_(0.5)).mul_(2.0**31)

    def ratios(row: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return weights[row, ids] / exponential(bits[row, ids])

    every_row = torch.arange(weights.shape[0], device=weights.device).unsqueeze(1)
    likely = _ids(bounds.argmax(dim=1, keepdim=True), size)
    reached = ratios(every_row, likely).amax(dim=1, keepdim=True)
    row, block = (~(bounds < reached * _MARGIN)).nonzero().unbind(dim=1)  # all of them where there is nan
    ids = _ids(block.unsqueeze(1), size)
    best, place = ratios(row.unsqueeze(1), ids).max(dim=1)
    # Of equals the first wins, as in an argmax of the whole row: blocks and places are in order.
    table = torch.full_like(bounds, float("-inf"))
    table[row, block] = best
    tokens = torch.zeros_like(bounds, dtype=torch.int64)
    tokens[row, block] = ids.gather(1, place.unsqueeze(1)).squeeze(1)
    return tokens.gather(1, table.argmax(dim=1, keepdim=True)).squeeze(1)


def _block_maxima(values: torch.Tensor) -> torch.Tensor:
    """``[rows, blocks]``; the last block may be shorter."""
    whole = values.shape[1] // BLOCK * BLOCK
    parts = []
    if whole:
        parts.append(values[:, :whole].unflatten(1, (-1, BLOCK)).amax(dim=2))
    if whole < values.shape[1]:
        parts.append(values[:, whole:].amax(dim=1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _ids(block: torch.Tensor, size: int) -> torch.Tensor:
    """The tokens of a block per row, ``[rows, 1]`` to ``[rows, BLOCK]``; past the end the last one again."""
    return (block * BLOCK + torch.arange(BLOCK, device=block.device)).clamp_(max=size - 1)
