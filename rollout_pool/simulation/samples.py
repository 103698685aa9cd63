"""Groups and samples on their way through an engine that pretends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rollout_pool.actors.versions import VersionLog
from rollout_pool.simulation.workload import Lengths, tokens_of
from rollout_pool.types import FinishReason, ResolvedRequest, RolloutGroup, Sample, TokenIds

_NONE: TokenIds = np.zeros(0, dtype=np.int64)


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
        rows = []
        for index in range(request.sample_offset, request.sample_offset + request.sampling.n):
            length = lengths.of_sample(request.seed, request.identity, index)
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
    """After which step it came into a slot."""

    @property
    def num_begun(self) -> int:
        """Tokens that it came with."""
        return int(self.versions.size)

    def sample(self, drawn: int, reason: FinishReason, log: VersionLog) -> Sample:
        """Its end, ``drawn`` steps after it came into a slot."""
        request = self.group.request
        length = min(self.length, self.num_begun + drawn)
        zeros = np.broadcast_to(np.float32(0.0), (length,))
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
        drawn = length - self.num_begun
        since = log.of_steps(self.first_step + 1, min(1, drawn))
        if not self.num_begun and (not drawn or since[0] == log.current):  # without a list of a thousand
            return np.broadcast_to(np.int64(log.current), (length,))
        return np.concatenate([self.versions, log.of_steps(self.first_step + 1, drawn)])
