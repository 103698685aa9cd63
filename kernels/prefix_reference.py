"""Torch reference of attention to prompts that rows share: the specification, and the path that CPUs run.

A row's cells lie in two places: those of its prompt once for all rows of its group, the others in the row's
own slot. Attention to each place gives weighted values and the logarithm of the sum of all weights; two such
pairs add up to attention over both places, to rounding.

Source: Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared Prefixes" (2024), whose
decomposition this is; the sums are those of Milakov and Gimelshein, "Online normalizer calculation for
softmax" (2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

Prior = tuple[torch.Tensor, torch.Tensor]
"""What attention to cells elsewhere gave, in parts: values ``[parts, rows, heads, value_dim]``, each divided
by the sum of its weights, and float32 ``[parts, rows, heads]``, the logarithm of that sum, minus infinity
where a row has no such cells."""


@dataclass(frozen=True)
class PrefixRows:
    """Which rows see which prompt: those of the first group, then those of the second, ..."""

    rows: torch.Tensor  # int64 [members]
    starts: tuple[int, ...]
    """Where each group begins among the members, and where the last one ends."""
    numbers: tuple[int, ...]
    """``rows`` as the host knows them."""

    @cached_property
    def selections(self) -> list[slice | torch.Tensor]:
        """The rows of every group, as an index."""
        return [self._select(start, stop) for start, stop in zip(self.starts, self.starts[1:], strict=False)]

    def _select(self, start: int, stop: int) -> slice | torch.Tensor:
        numbers = self.numbers[start:stop]
        first = numbers[0]
        if numbers == tuple(range(first, first + len(numbers))):
            return slice(first, first + len(numbers))
        return self.rows[start:stop]


def prefix_attention(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    groups: PrefixRows,
    *,
    scaling: float,
    softcap: float | None = None,
    seen: torch.Tensor | None = None,
    apart: bool = False,
) -> Prior:
    """Attention of every group's rows to the prompt that they share, which is read once for all of them.

    query: ``[rows, heads, 1, head_dim]``. keys, values: one ``[1, kv_heads, tokens, head_dim]`` per group.
    seen: int64 ``[rows]``: each row sees only the last so many cells of its prompt, or all if it has fewer.
    apart: compute every row in a product of its own, whose shape does not depend on its siblings, so that
    neither do its bits. Returns the parts of :data:`Prior`, here one; rows of no group have none.
    """
    rows, heads, _, head_dim = query.shape
    kv_heads, value_dim = values[0].shape[1], values[0].shape[3]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    out = query.new_zeros(1, rows, kv_heads, heads // kv_heads, value_dim)
    lse = torch.full(out.shape[:-1], float("-inf"), dtype=torch.float32, device=query.device)
    attend_group = _apart if apart else _together
    for at, prompt_keys, prompt_values in zip(groups.selections, keys, values, strict=True):
        visible = None
        if seen is not None:
            hidden = prompt_keys.shape[2] - seen[at]
            visible = torch.arange(prompt_keys.shape[2], device=query.device) >= hidden.unsqueeze(1)
        attended, summed = attend_group(grouped[at], prompt_keys, prompt_values, visible, scaling, softcap)
        out[0, at], lse[0, at] = attended, summed
    return out.view(1, rows, heads, value_dim), lse.view(1, rows, heads)


def attention_with_prior(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    prior: Prior,
    *,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """:func:`rollout_pool.kernels.reference.decode_attention` where rows have cells elsewhere, too.

    A sink takes part once, beside all cells.
    """
    rows, heads, _, head_dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    out, lse = attend(grouped, keys, values, visible, scaling, softcap)
    elsewhere, prior_lse = prior
    own, own_lse = out.reshape(rows, heads, -1), lse.reshape(rows, heads)
    sums = torch.cat((own_lse.unsqueeze(0), prior_lse))  # [1 + parts, rows, heads]
    if sinks is not None:
        sums = torch.cat((sums, sinks.float().expand(1, rows, heads)))
    shares = sums.softmax(dim=0).unsqueeze(-1)
    parts = elsewhere.shape[0]
    # A row that has no part there has zeros in it, and a share of zero.
    merged = own * shares[0] + (elsewhere * shares[1 : 1 + parts]).sum(dim=0)
    return merged.to(query.dtype).unsqueeze(2)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the logarithm of the sum of all weights: float32 ``[batch, heads, queries]``.

    query, keys, values: ``[batch, heads, queries or cells, head_dim]``. visible: bool, broadcasts to
    ``[batch, heads, queries, cells]``. Where a query sees nothing its values are finite and of no use, and
    the logarithm is so low that no share comes of it.
    """
    lowest = torch.finfo(query.dtype).min
    if softcap is None and query.is_cpu and keys.shape[3] == values.shape[3]:
        mask = None
        if visible is not None:
            mask = torch.zeros(visible.shape, dtype=query.dtype).masked_fill_(~visible, lowest)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, attn_mask=mask, scale=scaling
        )
        return out, lse
    scores = torch.matmul(query, keys.transpose(2, 3)).float().mul_(scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is not None:
        scores = scores.masked_fill_(~visible, torch.finfo(torch.float32).min)
    lse = scores.logsumexp(dim=-1)
    weights = torch.exp(scores.sub_(lse.unsqueeze(-1)))
    return torch.matmul(weights.to(values.dtype), values), lse


def _together(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One product per KV head for all rows ``[rows, kv_heads, group, head_dim]`` and heads."""
    rows, kv_heads, group, head_dim = query.shape
    stacked = query.transpose(0, 1).reshape(1, kv_heads, rows * group, head_dim)
    if visible is not None:
        visible = visible.repeat_interleave(group, dim=0).view(1, 1, rows * group, -1)
    out, lse = attend(stacked, keys, values, visible, scaling, softcap)
    return (
        out.reshape(kv_heads, rows, group, -1).transpose(0, 1),
        lse.reshape(kv_heads, rows, group).transpose(0, 1),
    )


def _apart(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One product per KV head and row."""
    rows = query.shape[0]
    # One product alone may be computed by all threads, in another order of sums than one among many.
    padded = query if rows > 1 else query.expand(2, -1, -1, -1)
    items = padded.shape[0]
    if visible is not None:
        visible = visible.view(rows, 1, 1, -1).expand(items, -1, -1, -1)
    shared_keys, shared_values = (one.expand(items, -1, -1, -1) for one in (keys, values))
    out, lse = attend(padded, shared_keys, shared_values, visible, scaling, softcap)
    return out[:rows], lse[:rows]
