"""Groups and samples on their way through an engine that pretends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from rollout_pool.actors.versions import VersionLog
from rollout_pool.simulation.workload import MOST_TOKENS, Lengths, tokens_of
from rollout_pool.types import FinishReason, Logprobs, ResolvedRequest, RolloutGroup, Sample, TokenIds

_NONE: TokenIds = np.zeros(0, dtype=np.int64)
_LOGPROBS: Logprobs = np.zeros(MOST_TOKENS, dtype=np.float32)


@dataclass(eq=False, slots=True)
class PendingGroup:
    """One request, its samples that are over, and who is told when all are."""

    request: ResolvedRequest
    on_finish: Callable[[RolloutGroup], None]
    samples: list[Sample] = field(default_factory=list)
    is_computed: bool = False
    """Whether its prompt was."""

    def rows(self, lengths: Lengths) -> list[PendingRow]:
        """One for each sample, with its length. Those that are resumed have begun."""
        request = self.request
        resumed = {sample.sample_index: sample for sample in request.resume}
        indexes = range(request.sample_offset, request.sample_offset + request.sampling.n)
        rows = []
        for index, length in zip(
            indexes, lengths.of_samples(request.seed, request.identity, indexes), strict=True
        ):
            versions = resumed[index].token_versions if index in resumed else _NONE
            rows.append(PendingRow(self, index, min(length, request.sampling.max_new_tokens), versions))
        return rows

    def result(self) -> RolloutGroup:
        """When all samples are over."""
        request = self.request
        samples = sorted(self.samples, key=lambda sample: sample.sample_index)
        return RolloutGroup(request.request_id, request.index, _NONE, samples, sampling=request.sampling)


@dataclass(eq=False, slots=True)
class PendingRow:
    """One sample that is not over."""

    group: PendingGroup
    index: int
    length: int
    versions: TokenIds
    """Of the tokens that it came with."""
    first_step: int = -1
    """After which step it came into a slot; ``first_version`` were the weights then."""
    first_version: int = -1

    @property
    def num_begun(self) -> int:
        """Tokens that it came with."""
        return int(self.versions.size)

    def sample(self, drawn: int, reason: FinishReason, log: VersionLog) -> Sample:
        """Its end, ``drawn`` steps after it came into a slot."""
        request = self.group.request
        length = min(self.length, self.num_begun + drawn)
        zeros = _LOGPROBS[:length]
        return Sample(
            token_ids=tokens_of(request.seed, request.identity, self.index, length),
            text="",
            logprobs=zeros,
            sampling_logprobs=zeros,
            finish_reason=reason,
            stop_match=None,
            weight_version=log.current,
            token_versions=self._versions(length, log),
            seed=request.seed,
            sample_index=self.index,
            identity=request.identity,
        )

    def _versions(self, length: int, log: VersionLog) -> TokenIds:
        if not self.num_begun and self.first_version == log.current:  # as nearly all are
            return _of_version(log.current)[:length]
        return np.concatenate([self.versions, log.of_steps(self.first_step + 1, length - self.num_begun)])


@lru_cache(maxsize=4)
def _of_version(version: int) -> TokenIds:
    return np.full(MOST_TOKENS, version, dtype=np.int64)
