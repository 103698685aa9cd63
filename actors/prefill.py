"""Put prompts into slots: compute a prompt once, copy its KV to every sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout_pool.actors.kv_cache import SlotCache
from rollout_pool.actors.model_runner import ModelRunner, Prefix
from rollout_pool.actors.running import Running


@dataclass
class Prefiller:
    """Fills slots of ``cache``. With ``shares`` off a prompt is computed once per sample, to compare."""

    runner: ModelRunner
    cache: SlotCache
    shares: bool
    num_prefills: int = 0
    tokens_computed: int = 0
    tokens_saved: int = 0

    def fill(
        self, running: Running, prompt: torch.Tensor, slots: torch.Tensor, is_last: bool
    ) -> torch.Tensor:
        """Put a prompt's KV into ``slots``; returns the logits of the next token, ``[slots, vocab]``.

        Unless ``is_last``, the computed prompt stays with ``running`` for samples that have no slot yet.
        """
        if self.shares:
            prefix = running.prefix or self._compute(running, prompt)
            running.prefix = None if is_last else prefix
            filled = [(prefix, slots)]
        else:
            filled = [(self._compute(running, prompt), slot) for slot in slots.split(1)]
        for prefix, at in filled:
            self.cache.expand(prefix.cache, at, prefix.length)
        if is_last:
            self.tokens_saved += running.state.num_samples * prompt.shape[0] - running.prefill_tokens
        return torch.cat([prefix.logits.expand(at.shape[0], -1) for prefix, at in filled]).clone()

    def _compute(self, running: Running, prompt: torch.Tensor) -> Prefix:
        running.prefill_tokens += prompt.shape[0]
        self.num_prefills += 1
        self.tokens_computed += prompt.shape[0]
        return self.runner.prefill(prompt)
