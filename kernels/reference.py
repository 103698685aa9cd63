"""Torch references of the cache moves and of decode attention: the specification, and the path that CPUs run.

Cache tensors are ``[slots, kv_heads, length, head_dim]``, one for the keys and one for the values of
each layer; a function that takes ``caches`` treats all of them alike. A row's tokens start in column
0, so a column is a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from rollout_pool.kernels.prefix_reference import Prior, attention_with_prior, weighted_by_blocks


def expand_kv(
    caches: Sequence[torch.Tensor], prefixes: Sequence[torch.Tensor], slots: torch.Tensor, start: int = 0
) -> None:
    """Copy one prompt's keys and values into several slots, from column ``start`` on.

    prefixes: one ``[1, kv_heads, tokens, head_dim]`` per cache. slots: int64 ``[n]``, all different.
    """
    numbers = slots.tolist()
    for cache, prefix in zip(caches, prefixes, strict=True):
        stop = start + prefix.shape[2]
        for slot in numbers:
            cache[slot, :, start:stop].copy_(prefix[0])


def expand_in_place(caches: Sequence[torch.Tensor], rows: int, copies: int, length: int) -> None:
    """Repeat each of the first ``rows`` rows: [A, B] becomes [A, A, B, B], with no temporary.

    A destination is never before its source, so going from the last destination to the first reads
    every row before it is overwritten. Only the first ``length`` columns are copied.
    """
    for cache in caches:
        for target in range(rows * copies - 1, 0, -1):
            if target // copies != target:
                cache[target, :, :length].copy_(cache[target // copies, :, :length])


def compact_kv(
    caches: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor, length: int
) -> None:
    """Move the first ``length`` columns of rows ``source`` to rows ``target``; any overlap is safe.

    source, target: int64 ``[n]``; each target stands once. Recurrent states, which have no columns,
    are moved by :func:`move_rows`.
    """
    sources, targets = source.tolist(), target.tolist()
    if not set(sources).isdisjoint(targets):
        move_rows([cache[:, :, :length] for cache in caches], source, target)
        return
    for cache in caches:
        for before, after in zip(sources, targets, strict=True):
            cache[after, :, :length].copy_(cache[before, :, :length])


def move_rows(states: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor) -> None:
    """``state[target] = state[source]`` along the first dimension of every state; any overlap is safe."""
    for state in states:
        state.index_copy_(0, target, state[source])  # the indexing is a copy: a target may be a source too


def trim_kv(caches: Sequence[torch.Tensor], columns: int, length: int) -> None:
    """Drop the first ``columns`` of ``length`` columns in use: all rows shift left, in place.

    What was in columns ``columns`` to ``length`` is afterwards in columns 0 to ``length - columns``;
    the columns after them keep what they held. Any overlap is safe.
    """
    for cache in caches:
        for row in cache:
            row[:, : length - columns].copy_(row[:, columns:length].clone())


def write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    cells: torch.Tensor,
) -> None:
    """Write one token's key and value per row, each at the row's own position.

    new_keys, new_values: ``[rows, kv_heads, 1, head_dim]``. cells: int64 ``[rows * kv_heads]``, the index
    of each ``head_dim`` vector in the flattened cache.
    """
    for cache, new in ((keys, new_keys), (values, new_values)):
        head_dim = cache.shape[-1]
        cache.view(-1, head_dim).index_copy_(0, cells, new.reshape(-1, head_dim))


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    scaling: float,
    window: int | torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    prior: Prior | None = None,
) -> torch.Tensor:
    """One query per row against its own KV, without repeating grouped heads.

    query: ``[rows, heads, 1, head_dim]``. keys, values: ``[rows, kv_heads, length, head_dim]``; the two
    head dims may differ. A row sees its first ``lengths`` cells (int64 ``[rows]``, at least 1), and of
    those only the last ``window``, which is one number or one per row (int64 ``[rows]``).

    visible: bool ``[rows, 1, 1, length]``, instead of lengths and window: which cells each row sees, at
    least one. Only here, where a mask made once per step is cheaper than one made per layer. Cells that
    are not seen must be finite here, since ``0 * nan`` is nan.

    softcap: scores become ``tanh(score / softcap) * softcap``. sinks: ``[heads]``, logits that take part
    in the softmax and carry no value. prior: attention of the same queries to cells elsewhere, which are seen
    as well. Returns ``[rows, heads, 1, head_dim of values]``.
    """
    rows, heads, _, head_dim = query.shape
    kv_heads = keys.shape[1]
    if visible is None:
        visible = visible_cells(lengths, window, keys.shape[2])
    if prior is not None:
        return attention_with_prior(
            query, keys, values, visible, prior, scaling=scaling, softcap=softcap, sinks=sinks
        )
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    if softcap is None and sinks is None and head_dim == values.shape[3]:
        out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible, scale=scaling)
        return out.reshape(rows, heads, 1, -1)
    scores = (
        torch.matmul(grouped, keys.transpose(2, 3)).float().mul_(scaling)
    )  # [rows, kv_heads, group, length]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill_(~visible, float("-inf"))
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        sink = sinks.float().view(1, kv_heads, -1, 1).expand(rows, -1, -1, 1)
        # It comes first, since the place of a term in a sum may decide about the last bit.
        weights = torch.cat((sink, scores), dim=-1).softmax(dim=-1)[..., 1:]
    return weighted_by_blocks(weights, values).reshape(rows, heads, 1, -1)


def visible_cells(
    lengths: torch.Tensor | None, window: int | torch.Tensor | None, length: int
) -> torch.Tensor:
    """The cells that :func:`decode_attention` reads, as a mask: bool ``[rows, 1, 1, length]``."""
    if lengths is None:
        raise ValueError("decode_attention needs lengths or visible")
    stop = lengths.view(-1, 1)
    column = torch.arange(length, device=lengths.device).unsqueeze(0)
    visible = column < stop
    if window is not None:
        width = window.view(-1, 1) if isinstance(window, torch.Tensor) else window
        visible = visible & (column >= stop - width)
    return visible.view(-1, 1, 1, length)


def upload(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Numbers (a sequence, nested or not, or an array) as a tensor on ``device``, without stopping it.

    A copy from memory that is not pinned would make the host wait for the device.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
