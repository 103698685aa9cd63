"""Decode attention as a Transformers attention function, and the mask that goes with it.

While a model decodes, its attention implementation is :data:`NAME`. The model's own modelling code
then asks :func:`row_mask` for its masks (one per layer type) and calls :func:`row_attention` in every
layer, with whatever it passes to any implementation: scaling, soft-cap, sinks. Prefill and training
keep the implementation the model was loaded with.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from rollout_pool.actors.shared_prefixes import MaskFunction, SharedStep
from rollout_pool.errors import UnsupportedModelError
from rollout_pool.kernels import ops

NAME = "rollout_pool_rows"


class _Running(threading.local):
    """The step that runs in this thread, for functions that a model calls."""

    shared: SharedStep | None = None


_running = _Running()


def row_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: torch.Tensor,
    mask_function: MaskFunction,
    kv_offset: torch.Tensor | int = 0,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor:
    """Bool ``[rows, 1, 1, kv_length]``: which cells the query of each row sees.

    ``q_offset`` is the position of each row's query, ``[rows]``, and ``kv_offset`` that of column 0,
    ``[rows, 1, 1, 1]`` when rows start in columns of their own, as the slot cache reports them.
    ``mask_function`` is the model's own rule for (batch, head, query position, key position): causal,
    sliding window, chunked. It is evaluated on positions, so every rule that Transformers can express
    holds per row, and cells past a row's position, used or not, are never seen.

    With Triton the result is :func:`spans` instead, so that the kernel reads only the cells it needs. What
    rows see of prompts that they share is not in the mask; the running step finds it out here.
    """
    rows = torch.arange(batch_size, device=device).view(-1, 1, 1, 1)
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    positions = torch.arange(kv_length, device=device).view(1, 1, 1, -1) + kv_offset
    visible = mask_function(rows, head, q_offset.view(-1, 1, 1, 1), positions)
    if isinstance(kv_offset, torch.Tensor):
        visible = visible & (positions >= 0)
    visible = visible.expand(batch_size, 1, 1, kv_length)
    mask = spans(visible) if ops.uses_triton(visible) else visible
    if _running.shared is not None:
        _running.shared.see(mask_function, rows, q_offset.view(-1, 1, 1, 1), mask)
    return mask


def spans(visible: torch.Tensor) -> torch.Tensor:
    """``visible`` as the end and the number of the cells that each row sees: int64 ``[rows, 1, 1, 2]``.

    The cells of a row must be contiguous, as those of causal, sliding and chunked attention are. Each
    of the two columns is contiguous in memory.
    """
    count = visible.sum(dim=-1).flatten()
    first = visible.int().argmax(dim=-1).flatten()
    return torch.stack((first + count, count)).t().view(-1, 1, 1, 2)


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one query per row; see :func:`rollout_pool.kernels.reference.decode_attention`.

    Returns ``[rows, 1, heads, head_dim]``, as Transformers expects, and no weights.
    """
    if position_bias is not None:
        raise UnsupportedModelError(f"{type(module).__name__} adds a position bias to its attention scores")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    shared = _running.shared
    prior = None if shared is None else shared.attend(query, key, attention_mask, scale, softcap)
    options: dict[str, Any] = {"scaling": scale, "softcap": softcap, "sinks": s_aux, "prior": prior}
    if attention_mask.dtype == torch.bool:
        out = ops.decode_attention(query, key, value, visible=attention_mask, **options)
    else:
        lengths, window = attention_mask[:, 0, 0].unbind(dim=1)
        out = ops.decode_attention(query, key, value, lengths, window=window, **options)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, row_attention)
AttentionMaskInterface.register(NAME, row_mask)


class AttentionSwitch:
    """Switches one model between its own attention and :func:`row_attention`, and back."""

    def __init__(self, model: PreTrainedModel) -> None:
        configs = (getattr(module, "config", None) for module in model.modules())
        self._configs = list({id(config): config for config in configs if config is not None}.values())

    @contextmanager
    def rows(self, shared: SharedStep | None = None) -> Iterator[None]:
        """Within this context the model attends row by row; what was set before comes back after it.

        shared: the prompts that rows share in this step.
        """
        before = [config._attn_implementation_internal for config in self._configs]
        _running.shared = shared
        for config in self._configs:
            config._attn_implementation_internal = NAME
        try:
            yield
        finally:
            _running.shared = None
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = name
