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
from itertools import pairwise

import torch

Prior = tuple[torch.Tensor, torch.Tensor]
"""What attention to cells elsewhere gave, in parts: values ``[parts, rows, heads, value_dim]``, each divided
by the sum of its weights, and float32 ``[parts, rows, heads]``, the logarithm of that sum, minus infinity
where a row has no such cells."""


BLOCK = 512
"""Cells that are summed together. A math library splits a long sum by its length, so the bits of a row would
depend on how many cells follow that it does not see; whole blocks of such cells add zero and change nothing.
PyTorch's attention on CPUs has blocks of this size."""


@dataclass(frozen=True)
class PrefixRows:
    """Which rows see which prompt: those of the first group, then those of the second, ..."""

    rows: torch.Tensor  # int64 [members]
    starts: tuple[int, ...]
    """Where each group begins among the members, and where the last one ends."""
    numbers: tuple[int, ...]
    """``rows`` as the host knows them."""

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the first member is row 0, the second row 1, ..."""
        return self.numbers == tuple(range(len(self.numbers)))

    @cached_property
    def selections(self) -> list[slice | torch.Tensor]:
        """The rows of every group, as an index."""
        return [self._select(start, stop) for start, stop in pairwise(self.starts)]

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
    attend_groups = _apart if apart else _together
    attended, summed = attend_groups(grouped, keys, values, groups, seen, scaling, softcap)
    if len(groups.numbers) == rows and groups.is_in_order:
        out, lse = attended, summed
    else:
        out = query.new_zeros(rows, *attended.shape[1:]).index_copy_(0, groups.rows, attended)
        lse = torch.full(out.shape[:-1], float("-inf"), dtype=torch.float32, device=query.device)
        lse.index_copy_(0, groups.rows, summed.float())
    return out.reshape(1, rows, heads, value_dim), lse.reshape(1, rows, heads)


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
    if sinks is None and prior_lse.shape[0] == 1:
        share = torch.sigmoid(prior_lse[0] - own_lse).unsqueeze(-1)
        return torch.lerp(own.float(), elsewhere[0].float(), share).to(query.dtype).unsqueeze(2)
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
    weights = scores.sub_(top := scores.amax(dim=-1, keepdim=True)).exp_()
    norm = sum_of_blocks(weights)
    lse = norm.log().add_(top.squeeze(-1))
    return weighted_by_blocks(weights.div_(norm.unsqueeze(-1)), values), lse


def sum_of_blocks(weights: torch.Tensor) -> torch.Tensor:
    """``weights.sum(dim=-1)``, block by block: see :data:`BLOCK`."""
    total = weights[..., :BLOCK].sum(dim=-1)
    for start in range(BLOCK, weights.shape[-1], BLOCK):
        total = total + weights[..., start : start + BLOCK].sum(dim=-1)
    return total


def weighted_by_blocks(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``weights @ values`` in the dtype of values, block by block: see :data:`BLOCK`.

    weights: float32 ``[batch, heads, queries, cells]``. values: ``[batch, heads, cells, head_dim]``.
    """
    cells = values.shape[2]
    parts = [
        torch.matmul(
            weights[..., start : start + BLOCK].to(values.dtype), values[:, :, start : start + BLOCK]
        )
        for start in range(0, cells, BLOCK)
    ]
    out = parts[0]
    for part in parts[1:]:
        out = out.float() + part
    return out.to(values.dtype)


def _together(
    grouped: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    groups: PrefixRows,
    seen: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the members, ``[members, kv_heads, group, ...]``: a product per group and KV head, for all its rows.

    Queries are put in order once for all groups, since that takes as long as one of these products.
    """
    members = grouped if groups.is_in_order else grouped[groups.rows]
    members = members[: len(groups.numbers)]
    count, kv_heads, group, head_dim = members.shape
    stacked = members.transpose(0, 1).reshape(1, kv_heads, count * group, head_dim)
    parts = []
    for (start, stop), prompt_keys, prompt_values in zip(pairwise(groups.starts), keys, values, strict=True):
        queries = stacked[:, :, start * group : stop * group]
        visible = None
        if seen is not None:
            visible = _visible(prompt_keys, seen[groups.rows[start:stop]])
            visible = visible.repeat_interleave(group, dim=0).view(1, 1, (stop - start) * group, -1)
        parts.append(attend(queries, prompt_keys, prompt_values, visible, scaling, softcap))
    out, lse = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
    return (
        out.view(kv_heads, count, group, -1).transpose(0, 1),
        lse.view(kv_heads, count, group).transpose(0, 1),
    )


def _apart(
    grouped: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    groups: PrefixRows,
    seen: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with a product of its own for every row and KV head."""
    parts = []
    for at, prompt_keys, prompt_values in zip(groups.selections, keys, values, strict=True):
        queries = grouped[at]
        rows = queries.shape[0]
        # One product alone may be computed by all threads, in another order of sums than one among many.
        padded = queries if rows > 1 else queries.expand(2, -1, -1, -1)
        items = padded.shape[0]
        visible = None
        if seen is not None:
            visible = _visible(prompt_keys, seen[at]).view(rows, 1, 1, -1).expand(items, -1, -1, -1)
        shared_keys, shared_values = (one.expand(items, -1, -1, -1) for one in (prompt_keys, prompt_values))
        out, lse = attend(padded, shared_keys, shared_values, visible, scaling, softcap)
        parts.append((out[:rows], lse[:rows]))
    out, lse = (torch.cat(each) for each in zip(*parts, strict=True))
    return out, lse


def _visible(keys: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Which cells of its prompt each row sees, the last ``seen``: bool ``[rows, tokens]``."""
    tokens = keys.shape[2]
    return torch.arange(tokens, device=keys.device) >= (tokens - seen).unsqueeze(1)
