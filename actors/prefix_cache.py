"""Recent prompts with their KV: what begins like one of them is computed from there on.

A prompt that was there before (a repeated call, the other half of a group, a replay) costs nothing; one that
shares a beginning (a system prompt, examples, the turns of a conversation so far) costs its rest. New weights
empty the cache. A remainder is computed in another shape than the whole would be, so that logits agree to
rounding; strict engines only reuse whole prompts, which are the same bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rollout_pool.actors.model_runner import ModelRunner
from rollout_pool.actors.prefix import Prefix, first_columns
from rollout_pool.kernels import ops
from rollout_pool.types import TokenIds

LEAST_SHARED = 16
"""Tokens that a beginning must have to be worth the copy of its KV."""
MOST_TOGETHER = 512
"""Tokens of prompts that are computed in one forward; more of them gain nothing."""
LEAST_FILLED = 0.7
"""Share of the longest prompt that the shortest in the same forward must have."""


@dataclass(frozen=True)
class _Stored:
    tokens: TokenIds
    prefix: Prefix


class PrefixCache:
    """Computes prompts, and keeps those that were used last.

    Args:
        capacity: tokens to keep at most; 0 keeps nothing.
        whole_only: reuse whole prompts, never their beginnings.
    """

    def __init__(self, runner: ModelRunner, capacity: int, whole_only: bool = False) -> None:
        self._runner = runner
        self._capacity = capacity
        self._whole_only = whole_only
        self._stored: OrderedDict[bytes, _Stored] = OrderedDict()  # the one used last is last
        self.num_tokens = 0
        """That are kept now."""
        self._ahead: dict[bytes, tuple[Prefix, int]] = {}
        """Prompts that have been computed together, and how many tokens of each had been before."""

    def compute_ahead(self, prompts: Sequence[TokenIds]) -> None:
        """Compute prompts together that :meth:`prefill` is about to be asked for, where that is faster.

        That is where they are short: a product with few rows takes nearly as long as one with many. What
        several of them begin with is computed once, before. A prompt that has more in common with one that is
        kept, or that will be, is left to go on from there.
        """
        self._ahead.clear()
        longest = 0 if self._whole_only else self._runner.longest_together
        if not longest:
            return
        new = {tokens.tobytes(): tokens for tokens in prompts if tokens.size <= longest}
        alike: dict[bytes, list[TokenIds]] = {}
        for key, tokens in new.items():
            if key not in self._stored:
                alike.setdefault(tokens[:LEAST_SHARED].tobytes(), []).append(tokens)
        others: list[TokenIds] = []
        for group in alike.values():
            common = _common(group)
            if len(group) > 1 and common >= LEAST_SHARED:
                self._compute_together(group, common)
            else:
                others += group
        self._compute_together(others, 0)

    def _compute_together(self, prompts: Sequence[TokenIds], common: int) -> None:
        """Compute prompts in few forwards, after ``common`` tokens that all of them begin with.

        Those are left out that another one will spare more.
        """
        chosen: list[TokenIds] = []
        for tokens in sorted(prompts, key=len):
            found, length = self._nearest(tokens, tokens.size - 1)
            is_near = found is not None and length >= common + LEAST_SHARED
            will_be_near = self._capacity > 0 and any(
                _num_shared(tokens, one) >= common + LEAST_SHARED for one in chosen
            )
            if not is_near and not will_be_near:
                chosen.append(tokens)
        found_batches = batches([tokens.size - common for tokens in chosen])
        if not found_batches:
            return
        after, num_before = self._begin(chosen[0][:common]) if common else (None, 0)
        for batch in found_batches:
            members = [chosen[index] for index in batch]
            uploaded = [ops.upload(tokens, self._runner.device) for tokens in members]
            for tokens, prefix in zip(members, self._runner.prefill_together(uploaded, after), strict=True):
                self._ahead[tokens.tobytes()] = prefix, num_before
                num_before = common  # the first paid for all

    def _begin(self, tokens: TokenIds) -> tuple[Prefix, int]:
        """What several prompts begin with, computed, and how many tokens of it had been before."""
        before = self._beginning_of(tokens, tokens.size)
        num_before = 0 if before is None else before.length
        if before is None or num_before < tokens.size:
            before = self._runner.prefill(ops.upload(tokens, self._runner.device), before)
        return before, num_before

    def prefill(self, tokens: TokenIds, keep: bool = True) -> tuple[Prefix, int]:
        """Compute a prompt; returns it and how many of its tokens were computed before.

        tokens: int64 ``[tokens]``. keep: whether it may serve later ones.
        """
        key = tokens.tobytes()
        if (same := self._stored.get(key)) is not None:
            self._stored.move_to_end(key)
            return same.prefix, tokens.size
        if key in self._ahead:
            prefix, num_reused = self._ahead.pop(key)
        else:
            before = self._beginning_of(tokens, tokens.size - 1)
            prefix = self._runner.prefill(ops.upload(tokens, self._runner.device), before)
            num_reused = 0 if before is None else before.length
        if keep and tokens.size <= self._capacity:
            self._keep(key, _Stored(tokens, prefix))
        return prefix, num_reused

    def clear(self) -> None:
        """Forget all prompts."""
        self._stored.clear()
        self._ahead.clear()
        self.num_tokens = 0

    def _keep(self, key: bytes, stored: _Stored) -> None:
        self._stored[key] = stored
        self.num_tokens += stored.tokens.size
        while self.num_tokens > self._capacity:
            _, oldest = self._stored.popitem(last=False)
            self.num_tokens -= oldest.tokens.size

    def _beginning_of(self, tokens: TokenIds, most: int) -> Prefix | None:
        """The longest beginning that is kept, of at most so many tokens."""
        found, length = self._nearest(tokens, most)
        if found is None:
            return None
        self._stored.move_to_end(found)
        return beginning(self._stored[found].prefix, length)

    def _nearest(self, tokens: TokenIds, most: int) -> tuple[bytes | None, int]:
        """Who of those that are kept has the longest beginning in common with these, and its length."""
        found, length = None, LEAST_SHARED - 1
        for key, stored in () if self._whole_only else self._stored.items():
            shared = min(_num_shared(stored.tokens, tokens), most)
            if shared > length and is_cuttable(stored.prefix, shared):
                found, length = key, shared
        return found, length


def batches(lengths: Sequence[int]) -> list[range]:
    """Which of these prompts, from the shortest to the longest, to compute in one forward; of at least two.

    Filling up the shorter ones must cost little, and all of it be no more than is worth it.
    """
    found, first = [], 0
    for index in range(1, len(lengths) + 1):
        is_full = (
            index == len(lengths)
            or (index - first + 1) * lengths[index] > MOST_TOGETHER
            or lengths[first] < LEAST_FILLED * lengths[index]
        )
        if is_full:
            if index - first > 1:
                found.append(range(first, index))
            first = index
    return found


def is_cuttable(prefix: Prefix, length: int) -> bool:
    """Whether one can go on from a prompt's first ``length`` tokens, with the cache of all of it.

    Not where a recurrent state has gone past them, nor where a sliding window has dropped some.
    """
    return all(
        type(layer) is DynamicLayer
        or (
            type(layer) is DynamicSlidingWindowLayer
            and (length == prefix.length or layer.cumulative_length < layer.sliding_window)
        )
        for layer in prefix.cache.layers
    )


def beginning(prefix: Prefix, length: int) -> Prefix:
    """The first ``length`` tokens of a prompt, as something to go on from; its logits are of no use.

    It shares tensors with the prompt's own cache: a layer that goes on makes new ones.
    """
    return replace(prefix, cache=first_columns(prefix.cache, length), length=length)


def _common(prompts: Sequence[TokenIds]) -> int:
    """Tokens that all of these begin with, at least one token short of each."""
    shared = min(_num_shared(prompts[0], one) for one in prompts)
    return min(shared, min(one.size for one in prompts) - 1)


def _num_shared(one: TokenIds, other: TokenIds) -> int:
    size = min(one.size, other.size)
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size
