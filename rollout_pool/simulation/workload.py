"""What engines are asked for, and how long the answers are: pure functions of the request.

The length of a sample is log-normal, in two parts: one that the samples of a prompt share (hard prompts have
long answers), one of each sample's own. ``length = median * exp(sigma_prompt * x + sigma_sample * y)`` with x
and y standard normal, rounded up and cut off at the budget. Reasoning models have tails of this kind; the
numbers are assumptions, to be replaced by those of a run at hand.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from rollout_pool.types import ResolvedRequest, TokenIds

MOST_TOKENS = 2**16
"""In one sample."""
_NORMAL = NormalDist()
_TOKENS: TokenIds = np.random.default_rng(0).integers(0, 50_000, size=2 * MOST_TOKENS, dtype=np.int64)
_TOKENS.setflags(write=False)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of samples, in tokens."""

    median: float = 400.0
    sigma_prompt: float = 0.6
    sigma_sample: float = 0.6

    def of_prompt(self, seed: int, identity: str) -> float:
        """The median length of a prompt's samples: what somebody may know who has seen it before."""
        return self.median * math.exp(self.sigma_prompt * _normal(f"prompt:{seed}:{identity}"))

    def of_samples(self, seed: int, identity: str, sample_indexes: Sequence[int]) -> list[int]:
        """Before they are cut off at the budget; each at least 1."""
        median = self.of_prompt(seed, identity)
        own = (_normal(f"sample:{seed}:{identity}:{index}") for index in sample_indexes)
        return [max(1, math.ceil(median * math.exp(self.sigma_sample * one))) for one in own]


def tokens_of(seed: int, identity: str, sample_index: int, length: int) -> TokenIds:
    """The first ``length`` tokens of a sample, at most MOST_TOKENS: int64, read-only.

    Two samples have the same ones once in 65536 cases."""
    start = _hash(f"tokens:{seed}:{identity}:{sample_index}") % MOST_TOKENS
    return _TOKENS[start : start + length]


def prompt_tokens(request: ResolvedRequest) -> int:
    """The length of a prompt; four characters count as a token."""
    if isinstance(request.prompt, str):
        return max(1, len(request.prompt) // 4)
    return len(request.prompt)


def _normal(name: str) -> float:
    return _NORMAL.inv_cdf((_hash(name) + 0.5) / 2**64)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
