"""A group on its way through the engine, and what becomes of it: samples, then a finished group."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_pool.actors.rows import Generated
from rollout_pool.actors.scheduler import GroupState
from rollout_pool.actors.stopping import StopWatch
from rollout_pool.types import FinishReason, ResolvedRequest, RolloutGroup, Sample, Timing, TokenIds

if TYPE_CHECKING:
    from rollout_pool.actors.model_runner import Prefix

OnFinish = Callable[[RolloutGroup], None]


@dataclass(eq=False, slots=True)
class Running:
    """A group in the engine: its request, its place in the scheduler, and what has come of it."""

    request: ResolvedRequest
    prompt: TokenIds
    stop_ids: dict[int, str | int]
    """Tokens that end a sample, and what its ``stop_match`` then says: the id, or a special token's text."""
    state: GroupState
    on_finish: OnFinish | None
    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None
    prefill_tokens: int = 0
    prefix: Prefix | None = None
    """The prompt's KV, held while samples wait for a slot."""
    samples: dict[int, Sample] = field(default_factory=dict)

    def finish(self, cancelled: bool = False) -> RolloutGroup:
        """The finished group, its samples in order."""
        now = time.monotonic()
        started = now if self.started is None else self.started
        samples = [self.samples[number] for number in sorted(self.samples)]
        return RolloutGroup(
            request_id=self.request.request_id,
            index=self.request.index,
            prompt_token_ids=self.prompt,
            samples=samples,
            error="cancelled" if cancelled else _fault(samples),
            metadata=self.request.metadata,
            sampling=self.request.sampling,
            timing=Timing(started - self.submitted, now - started, self.prefill_tokens),
        )


@dataclass(frozen=True, slots=True)
class Seat:
    """Who sits in a slot: one sample of a group."""

    running: Running
    number: int
    """Of the sample within its request, from 0."""
    offset: int
    """Prompt length minus the engine's step when it sat down: step + offset is the row's position."""
    watch: StopWatch | None

    def sample(
        self, generated: Generated, tokenizer: Any | None, weight_version: int, *, aborted: bool = False
    ) -> Sample:
        """What the slot generated, as a sample with its reason to end."""
        request = self.running.request
        reason, match = self._ending(generated, aborted)
        return Sample(
            token_ids=generated.token_ids,
            text=self._text(generated, tokenizer),
            logprobs=generated.logprobs,
            sampling_logprobs=generated.sampling_logprobs,
            finish_reason=reason,
            stop_match=match,
            weight_version=weight_version,
            token_versions=np.full(generated.token_ids.size, weight_version, dtype=np.int64),
            seed=request.seed,
            sample_index=request.sample_offset + self.number,
        )

    def _ending(self, generated: Generated, aborted: bool) -> tuple[FinishReason, str | int | None]:
        last = int(generated.token_ids[-1])
        if np.isnan(generated.logprobs[-1]):
            return "error", None
        if self.watch is not None and self.watch.match is not None:
            return "stop", self.watch.match
        if last in self.running.stop_ids:
            return "stop", self.running.stop_ids[last]
        return ("aborted", None) if aborted else ("length", None)

    def _text(self, generated: Generated, tokenizer: Any | None) -> str:
        if tokenizer is None:
            return ""
        if self.watch is not None and self.watch.match is not None:
            return self.watch.text
        return str(tokenizer.decode(generated.token_ids.tolist(), skip_special_tokens=True))


def _fault(samples: list[Sample]) -> str | None:
    broken = next((sample for sample in samples if sample.finish_reason == "error"), None)
    if broken is None:
        return None
    return (
        f"sample {broken.sample_index}: the logits are not finite at new token {broken.token_ids.size}; "
        "check the weights for nan or inf"
    )
