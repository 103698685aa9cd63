"""A group on its way through the engine, and what becomes of it: samples, then a finished group."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollout_pool.actors.rows import Generated
from rollout_pool.actors.scheduler import GroupState
from rollout_pool.actors.stays import Stays
from rollout_pool.actors.stopping import StopWatch
from rollout_pool.types import FinishReason, ResolvedRequest, RolloutGroup, Sample, Timing, TokenIds

OnFinish = Callable[[RolloutGroup], None]


@dataclass(eq=False, slots=True)
class Running:
    """A group in the engine: its request, its place in the scheduler, and what has come of it."""

    request: ResolvedRequest
    prompt: TokenIds
    stop_ids: dict[int, str | int]
    """Tokens that end a sample, and what its ``stop_match`` then says: the id, or a special token's text."""
    state: GroupState
    """Of the samples that are to be drawn; those that came finished are in ``samples`` from the start."""
    on_finish: OnFinish | None
    past: dict[int, Sample] = field(default_factory=dict)
    """Samples to go on with, by number."""
    order: list[int] = field(default_factory=list)
    """Numbers of the samples that are to be drawn, in the order in which they start."""
    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None
    prefill_tokens: int = 0
    reused_tokens: int = 0
    is_held: bool = False
    """Whether the worker holds the prompt's KV, for samples that wait for a slot."""
    samples: dict[int, Sample] = field(default_factory=dict)
    stays: Stays = field(default_factory=Stays)

    @classmethod
    def of(
        cls,
        request: ResolvedRequest,
        prompt: TokenIds,
        stop_ids: dict[int, str | int],
        number: int,
        on_finish: OnFinish | None,
    ) -> Running:
        """Group ``number``: some of its samples may be over already, some go on, the others start."""
        params = request.sampling
        over: dict[int, Sample] = {}
        past: dict[int, Sample] = {}
        for sample in request.resume:
            size = sample.token_ids.size
            is_over = sample.finish_reason == "stop" or size >= params.max_new_tokens
            if is_over or (size and sample.finish_reason != "error"):
                (over if is_over else past)[sample.sample_index - request.sample_offset] = sample
        state = GroupState(
            number, params.n, params.max_new_tokens,
            prompt_tokens=prompt.size, max_new_tokens=params.max_new_tokens,
        )  # fmt: skip
        running = cls(request, prompt, stop_ids, state, on_finish, past, samples=over)
        running.line_up()
        return running

    @property
    def is_complete(self) -> bool:
        return len(self.samples) == self.request.sampling.n

    def line_up(self) -> None:
        """Have all samples that are not over wait for a slot, those with a past to go on from it."""
        self.order = [number for number in range(self.request.sampling.n) if number not in self.samples]
        pasts = (self.past.get(number) for number in self.order)
        lengths = tuple(self.prompt.size + (0 if past is None else past.token_ids.size) for past in pasts)
        before = self.state
        self.state = GroupState(
            before.group_id, len(lengths), before.budget, lengths, before.prompt_tokens, before.max_new_tokens
        )
        self.is_held = False
        self.stays.end_all()

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
            error="cancelled" if cancelled else _fault(self.request, samples),
            metadata=self.request.metadata,
            sampling=self.request.sampling,
            timing=Timing(
                started - self.submitted, now - started, self.prefill_tokens, stays=self.stays.all()
            ),
        )


@dataclass(eq=False, slots=True)
class Seat:
    """Who sits in a slot: one sample of a group."""

    running: Running
    number: int
    """Of the sample within its request, from 0."""
    slot: int
    first_step: int
    """The engine's step in which it drew its first token; when resumed, the step that would have been."""
    first_version: int
    """Of the weights that drew the first token after it sat down."""
    watch: StopWatch | None
    past: Sample | None = None
    """What it had drawn before, when resumed."""
    is_over: bool = False
    stopped_at: int | None = None
    """How many of its tokens count, when its text ended it: the row may have gone on since."""

    @property
    def last_step(self) -> int:
        """The step in which its budget is used up, if nothing ends it before."""
        return self.first_step + self.running.request.sampling.max_new_tokens - 1

    def column(self, step: int) -> int:
        """The column that it writes next after ``step``, at most; its prompt is before it, unless shared."""
        start = 0 if self.running.state.is_shared else self.running.prompt.size
        return start + min(step, self.last_step) - self.first_step

    def num_drawn(self, step: int) -> int:
        """How many tokens it has after ``step``, at most."""
        return min(step, self.last_step) - self.first_step + 1

    def has_stop_string(self, count: int, last_token: int) -> bool:
        """Whether its text holds a stop string, now that it has ``count`` tokens, this one the last."""
        if self.watch is not None and self.watch.num_pushed < count and self.watch.push(int(last_token)):
            self.stopped_at = int(count)
        return self.stopped_at is not None

    @property
    def num_past(self) -> int:
        """Tokens that it had when it sat down."""
        return 0 if self.past is None else self.past.token_ids.size

    @property
    def sample_index(self) -> int:
        """As its sample will have it."""
        return self.running.request.sample_offset + self.number

    @property
    def draw_key(self) -> tuple[int, str, int]:
        """Seed, identity and sample index: what all its draws come from."""
        if self.past is not None:
            return self.past.seed, self.past.identity, self.past.sample_index
        request = self.running.request
        return request.seed, request.identity, self.sample_index

    def sample(
        self, generated: Generated, tokenizer: Any | None, versions: TokenIds, *, aborted: bool = False
    ) -> Sample:
        """What the slot generated, as a sample with its reason to end.

        versions: of the weights that drew each token. A last token that is none to draw is left out.
        """
        seed, identity, index = self.draw_key
        reason, match = self._ending(generated, aborted)
        weight_version = int(versions[-1])
        if reason == "error":
            generated, versions = generated.without_last(), versions[:-1]
        return Sample(
            token_ids=generated.token_ids,
            text=self._text(generated, tokenizer, match),
            logprobs=generated.logprobs,
            sampling_logprobs=generated.sampling_logprobs,
            finish_reason=reason,
            stop_match=match,
            weight_version=weight_version,
            token_versions=versions,
            seed=seed,
            sample_index=index,
            identity=identity,
        )

    def _ending(self, generated: Generated, aborted: bool) -> tuple[FinishReason, str | int | None]:
        last = int(generated.token_ids[-1])
        if generated.is_broken:
            return "error", None
        if self.watch is not None and self.watch.match is not None:
            return "stop", self.watch.match
        if last in self.running.stop_ids:
            return "stop", self.running.stop_ids[last]
        return ("aborted", None) if aborted else ("length", None)

    def _text(self, generated: Generated, tokenizer: Any | None, match: str | int | None) -> str:
        if tokenizer is None:
            return ""
        if self.watch is not None and match is not None and match == self.watch.match:
            return self.watch.text
        return str(tokenizer.decode(generated.token_ids.tolist(), skip_special_tokens=True))


def _fault(request: ResolvedRequest, samples: list[Sample]) -> str | None:
    broken = next((sample for sample in samples if sample.finish_reason == "error"), None)
    if broken is None:
        return None
    return (
        f"{request.label}: sample {broken.sample_index}: the logits are not finite at new token "
        f"{broken.token_ids.size + 1}, or leave no token to draw; check the weights for nan or inf"
    )
