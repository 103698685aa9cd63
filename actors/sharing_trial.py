"""Whether a model's rows can share their prompt's KV: a few tokens are decoded so, and compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout_pool.actors.kv_cache import SlotCache
from rollout_pool.actors.model_runner import ModelRunner
from rollout_pool.actors.prefix import Prefix
from rollout_pool.actors.shared_prefixes import SharedPrefixes

POISON = 1e4


def decode_shared(
    runner: ModelRunner, texts: Sequence[torch.Tensor], prefixes: Sequence[Prefix], steps: int
) -> list[tuple[torch.Tensor, int, int]]:
    """Decode ``steps`` tokens of every text after its prefix: two rows that share it, in poisoned slots.

    The last prefix is also copied into a slot of its own, so that rows of both kinds are in one step. Returns
    the logits float32 ``[vocab]`` with the text and the position that each belongs to.
    """
    num_rows = 2 * len(prefixes) + 1
    numbers = [*range(len(prefixes)), *range(len(prefixes)), len(prefixes) - 1]  # text of each row
    last = prefixes[-1]
    cache = SlotCache(last.cache, num_rows, last.length + steps)
    for tensor in cache.tensors():
        tensor.fill_(POISON)
    shared = SharedPrefixes(num_rows, runner.device, apart=False)
    for row, number in enumerate(numbers):
        prefix, at = prefixes[number], torch.tensor([row], device=runner.device)
        is_copy = row == num_rows - 1
        if not is_copy:
            shared.hold(number, prefix)
            shared.seat(number, [row], at)
        cache.expand(prefix.cache, at, prefix.length, skip=0 if is_copy else prefix.length)
    found = []
    for step in range(steps):
        at_positions = [prefixes[number].length + step for number in numbers]
        tokens = torch.stack([texts[n][i] for n, i in zip(numbers, at_positions, strict=True)])
        positions = torch.tensor(at_positions, device=runner.device)
        column = last.length + step
        logits = runner.decode(cache, tokens, positions, column, shared.step(num_rows, cache.addresses))
        found += [(logits[row], numbers[row], at_positions[row]) for row in range(num_rows)]
    return found
