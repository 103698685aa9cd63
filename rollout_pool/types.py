"""The nouns that cross every boundary: what is asked for, and what comes back.

Nothing here imports torch or Ray, and every array is NumPy, so a group crosses a process
boundary as a few buffers rather than as one Python object per token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator, model_validator

from rollout_pool.config import StrictModel

TokenIds = npt.NDArray[np.int64]
Logprobs = npt.NDArray[np.float32]
FinishReason = Literal["stop", "length", "aborted", "error"]
Prompt = str | Sequence[int] | TokenIds | Sequence[Mapping[str, Any]]
MAX_SEED = 2**63
CANCELLED = "cancelled"
"""The ``error`` of a group that was asked to stop, and of no other."""


class SamplingParams(StrictModel):
    """How the samples of one prompt are drawn. Defaults are neutral: the model's own distribution.

    The order of operations is that of Hugging Face ``generate``: repetition penalty and
    ``min_new_tokens``, temperature, top-k, top-p, min-p.
    """

    n: int = Field(default=1, ge=1, le=65536)
    """Samples per prompt; the prompt is computed once for all of them."""
    max_new_tokens: int = Field(default=128, ge=1)
    """A sample that has not ended by then is cut, with ``finish_reason`` "length"."""
    min_new_tokens: int = Field(default=0, ge=0)
    """No sample ends before it has so many."""
    temperature: float = Field(default=1.0, ge=0.0, le=1e6, allow_inf_nan=False)
    """0 is greedy, whatever the other fields say. Otherwise at least 1e-6: float32 ends there."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Draw from the most likely tokens whose probabilities add up to this. 1: from all."""
    top_k: int | None = Field(default=None, le=2**31 - 1)
    """Off: None, 0 (Hugging Face, TRL) or -1 (vLLM, DeepSpeed)."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Leave out tokens less likely than this share of the likeliest one. 0: none."""
    repetition_penalty: float = Field(default=1.0, ge=1e-3, le=1e3, allow_inf_nan=False)
    """Above 1: tokens of the prompt and of the sample so far become less likely."""
    stop: tuple[str, ...] = ()
    """Strings that end a sample; they may cross token boundaries. The text ends before the match."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sample, besides the EOS ids of the model and its tokenizer."""
    ignore_eos: bool = False
    """Go on after an EOS, to ``max_new_tokens`` or a stop of your own."""
    seed: int | None = Field(default=None, ge=0, lt=MAX_SEED)
    """Of the draws. None: the pool's, mixed with the number of the call."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many_strings(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _one_or_many_ids(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            value = (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty stop string would end every sample at once")
        return value

    @field_validator("temperature")
    @classmethod
    def _in_float32(cls, value: float) -> float:
        if 0 < value < 1e-6:
            raise ValueError("must be 0 (greedy) or at least 1e-6")
        return value

    @field_validator("top_k")
    @classmethod
    def _top_k_off(cls, value: int | None) -> int | None:
        if value is not None and value < -1:
            raise ValueError("must be positive, or -1, 0 or None for no top-k")
        return value if value is not None and value > 0 else None

    @model_validator(mode="after")
    def _budget(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens ({self.min_new_tokens}) is above max_new_tokens ({self.max_new_tokens})"
            )
        return self


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One prompt with its own settings. What is left None comes from the call.

    ``request_id`` is the identity that randomness is drawn from: a named request gives the same
    samples in any order and in any batch. Without one, the identity is the index in the call.
    ``sample_offset`` numbers the first sample, so n=4 equals n=2 followed by n=2 with offset 2.
    ``metadata`` comes back untouched.

    ``resume`` continues samples of the same prompt that were cut off (``finish_reason`` "aborted", or
    "length" under a smaller budget): each goes on where it ended, token for token as if nothing had
    happened, with its own seed. Samples that ended by themselves come back as they are; those of the n
    that are not given start anew.
    """

    prompt: Prompt
    sampling: SamplingParams | None = None
    seed: int | None = None
    request_id: str | int | None = None
    sample_offset: int = 0
    metadata: Any = None
    resume: Sample | Sequence[Sample] | None = None


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request with nothing left open: what the pool queues and an engine runs.

    ``identity`` and ``seed`` (with sample index, position and vocabulary id) determine every draw,
    so the same resolved request gives the same samples on any actor and on any replay.
    """

    prompt: Prompt
    sampling: SamplingParams
    seed: int
    identity: str
    request_id: str | int
    index: int
    sample_offset: int = 0
    metadata: Any = None
    resume: tuple[Sample, ...] = ()
    fault: str | None = None
    """Set when the request is already known to be bad; it then fails its own group."""

    @property
    def label(self) -> str:
        """How messages name it: by the caller's own id, otherwise by its place in the call."""
        kind, _, name = self.identity.partition(":")
        name = name if len(name) <= 60 else f"{name[:57]}..."
        return f"request {name!r}" if kind == "name" else f"prompt {self.index}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished sample. All arrays have the length of ``token_ids``."""

    token_ids: TokenIds
    """Includes the EOS or stop token that ended the sample."""
    text: str
    """Decoded without special tokens; ends before a matched stop string."""
    logprobs: Logprobs
    """log-softmax of fp32 logits / temperature over the whole vocabulary (unscaled at temperature 0)."""
    sampling_logprobs: Logprobs
    """Under the distribution really drawn from: after penalties, top-k, top-p and min-p. 0 when greedy."""
    finish_reason: FinishReason
    stop_match: str | int | None
    """The stop string or token id that ended the sample."""
    weight_version: int
    """Of the weights that drew its last token."""
    token_versions: TokenIds
    """Of the weights that drew each token."""
    seed: int
    sample_index: int
    identity: str = ""
    """Of the request that it was drawn for; with ``seed`` and ``sample_index`` it determines every draw."""


@dataclass(frozen=True, slots=True)
class Stay:
    """A sample's time in one slot; one that is moved has a stay for each slot.

    Times are seconds since the epoch by the clock of the actor's host.
    """

    sample_index: int
    slot: int
    start: float
    """When it was given the slot. Its prompt is computed from here on, if no other sample's is shared."""
    ready: float
    """From here on it decodes."""
    end: float
    """When the host learned that it was over, or moved it."""
    actor: str = ""
    """Which rollout actor's slot; empty where it is that of the group's :class:`Timing`."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a group spent in one engine: waiting, and from its prefill to its last token."""

    queue_s: float = 0.0
    run_s: float = 0.0
    prefill_tokens: int = 0
    """Prompt tokens really computed for this group."""
    actor: str = ""
    """Which rollout actor served it, or its first part; empty without a pool."""
    stays: tuple[Stay, ...] = ()
    """Which slots its samples sat in, and when, in the order in which they left."""


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All samples of one prompt, or the reason why there are none."""

    request_id: str | int
    index: int
    prompt_token_ids: TokenIds
    samples: list[Sample]
    error: str | None = None
    metadata: Any = None
    sampling: SamplingParams | None = None
    """What the samples were drawn with; None when the request could not be read."""
    timing: Timing = field(default_factory=Timing)

    @property
    def is_cancelled(self) -> bool:
        """Whether it was asked to stop. Its samples are what there was of them: ``finish_reason`` "aborted"
        where they were cut off, none where they had not begun. ``RolloutRequest(resume=...)`` goes on."""
        return self.error == CANCELLED

    def replace(self, **changes: Any) -> RolloutGroup:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of one engine since it started, and its state now.

    submitted = finished + failed + cancelled + (waiting + running), always.
    """

    submitted: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    waiting_groups: int = 0
    running_groups: int = 0
    num_slots: int = 0
    live_rows: int = 0
    waiting_samples: int = 0
    """Samples that have no slot yet, those of partly admitted groups included."""
    prefills: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed."""
    prefill_tokens_saved: int = 0
    """Prompt tokens that sharing a prefill among samples made unnecessary."""
    prefill_tokens_reused: int = 0
    """Prompt tokens whose KV was still there from an earlier prompt."""
    shared_groups: int = 0
    """Groups whose samples shared their prompt's KV."""
    decode_steps: int = 0
    rows_decoded: int = 0
    """Live rows summed over decode steps."""
    rows_computed: int = 0
    """Rows the model computed, idle ones included, summed over decode steps."""
    compactions: int = 0
    rows_moved: int = 0
    trims: int = 0
    """Shifts to the left in layout ``aligned``."""
    trimmed_bytes: int = 0
    """Bytes of KV that trims moved."""
    new_tokens: int = 0
    samples_finished: int = 0
    kv_bytes: int = 0
    """Of all slots."""
    shared_kv_bytes: int = 0
    """Of the prompts that rows share now."""
    shortages: int = 0
    """How often memory ran out in a step. ``num_slots`` is what the engine went on with."""
    weight_version: int = 0


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Groups in and out of a pool since it started, and what its actors are doing.

    submitted = returned + failed + cancelled + in_flight, always (``is_balanced``). Each group is counted
    once, when its caller gets it or leaves: as ``cancelled`` when it was cancelled (with or without samples),
    as ``failed`` when it comes with another ``error``, otherwise as ``returned``.
    """

    submitted: int = 0
    returned: int = 0
    failed: int = 0
    cancelled: int = 0
    in_flight: int = 0
    """Not yet with their callers: queued, running, or finished and not taken."""
    replayed: int = 0
    """Sent out again after the loss of an actor, counted each time."""
    restarted: int = 0
    """Drawn anew because their tokens were older than ``max_staleness``, counted each time."""
    dropped: int = 0
    """Results that came for groups that were settled already."""
    queued: int = 0
    """Of those in flight, the ones no actor has yet."""
    actors_lost: int = 0
    num_actors: int = 0
    weight_version: int = 0
    """Of the weights that every actor has which takes work; 0 for those that were loaded."""
    weight_syncs: int = 0
    """Those that went through."""
    weight_sync_s: float = 0.0
    """Seconds that they took, from the call to the last receipt."""
    actors: tuple[EngineStats, ...] = ()
    """Of those that answered in time."""
    actor_names: tuple[str, ...] = ()
    """Whose counters ``actors`` are."""

    @property
    def is_balanced(self) -> bool:
        """Whether every group is accounted for, once."""
        return self.submitted == self.returned + self.failed + self.cancelled + self.in_flight
