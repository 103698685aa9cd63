"""A checksum of a tensor's bits that costs about as much as reading it.

The same number on every device and for every memory layout: integers that wrap around give the same sum
in any order.
"""

from __future__ import annotations

from functools import cache

import torch

WORDS = 1 << 15
"""Words of 8 bytes that are summed at once; with their multipliers they stay in a core's cache."""
STEP = 0x9E3779B97F4A7C15
"""Odd, so that a multiplication by it loses nothing; its bits are those of the golden ratio."""
MASK = (1 << 64) - 1


def checksum(tensor: torch.Tensor) -> str:
    """16 hex digits of the bits of ``tensor``, read row by row.

    With words w of 8 bytes (the last padded by zeros) in blocks of ``WORDS``: each block's value is the
    sum of (2 i + 1) w_i modulo 2**64, and the values are the coefficients of a polynomial at ``STEP``. A
    change of any one word changes the result, since 2 i + 1 and STEP are odd. Against mistakes, not malice.
    """
    total = 0
    for value in _block_sums(_words(tensor)):
        total = (total * STEP + value) & MASK
    return f"{total:016x}"


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """int64 ``[words]``; without a copy where the tensor's memory allows it."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 8 or flat.storage_offset() % 8:
        padded = flat.new_zeros(-(-flat.numel() // 8) * 8)
        padded[: flat.numel()] = flat
        flat = padded
    return flat.view(torch.int64)


def _block_sums(words: torch.Tensor) -> list[int]:
    odd = _multipliers(words.device)
    if words.device.type == "cpu":
        return [int(torch.dot(block, odd[: block.numel()])) for block in words.split(WORDS)]
    whole = words.numel() // WORDS * WORDS
    sums = [(words[:whole].view(-1, WORDS) * odd).sum(1)] if whole else []
    if whole < words.numel():
        rest = words[whole:]
        sums.append((rest * odd[: rest.numel()]).sum().view(1))
    values: list[int] = torch.cat(sums).tolist() if sums else []
    return values


@cache
def _multipliers(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(WORDS, dtype=torch.int64, device=device) * 2 + 1
