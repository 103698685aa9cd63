"""How long samples are expected to become: as those of their prompt before, or the usual share of the budget.

Training meets a prompt in every epoch, and one that was answered at length will be again. Expectations decide
in which order groups go out, so that those which take longest do not start last; they change no token.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np

from rollout_pool.types import ResolvedRequest, RolloutGroup

NEWEST = 0.5
"""Weight of the newest group of a prompt; a policy in training changes its mind."""
NEWEST_SHARE = 0.02
"""The same for the share of their budget that all groups use."""
KEPT_PROMPTS = 100_000
OVER = ("stop", "length")


class LengthEstimates:
    """Of the prompts that a pool has rolled out; equal ones of different ``request_id`` are different."""

    def __init__(self, kept: int = KEPT_PROMPTS) -> None:
        self._kept = kept
        self._lengths: OrderedDict[bytes, float] = OrderedDict()  # the one met last is last
        self._share = 1.0

    def expected(self, request: ResolvedRequest) -> int:
        """New tokens that one of its samples takes, from 1 to ``max_new_tokens``."""
        budget = request.sampling.max_new_tokens
        length = self._lengths.get(key_of(request), self._share * budget)
        return max(1, min(budget, round(length)))

    def learn(self, request: ResolvedRequest, group: RolloutGroup) -> None:
        """Take note of how long the samples of a group became; those that did not end say nothing."""
        lengths = [sample.token_ids.size for sample in group.samples if sample.finish_reason in OVER]
        if not lengths:
            return
        length = sum(lengths) / len(lengths)
        self._share += NEWEST_SHARE * (length / request.sampling.max_new_tokens - self._share)
        key = key_of(request)
        before = self._lengths.pop(key, length)
        self._lengths[key] = before + NEWEST * (length - before)
        if len(self._lengths) > self._kept:
            self._lengths.popitem(last=False)


def key_of(request: ResolvedRequest) -> bytes:
    """The same for the same prompt under the same name, or under none; 16 bytes."""
    prompt = request.prompt
    if isinstance(prompt, str):
        content = prompt.encode("utf-8", "surrogatepass")
    elif isinstance(prompt, np.ndarray):
        content = prompt.tobytes()
    else:
        content = repr(prompt).encode("utf-8", "surrogatepass")  # token ids or messages
    name = request.identity if request.identity.startswith("name:") else ""
    return hashlib.blake2b(content, digest_size=16, key=hashlib.sha256(name.encode()).digest()).digest()
