"""Configuration: frozen pydantic models, the same keys in Python and in YAML.

A wrong value or an unknown key raises :class:`ConfigError` with the full path of the key
(``engine.num_slots``) and what is allowed there.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rollout_pool.errors import ConfigError, one_line

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
TensorParallelBackend = Literal["transformers", "deepspeed"]


class StrictModel(BaseModel):
    """A frozen model whose validation errors are one-line :class:`ConfigError` messages."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(describe(error, type(self))) from None

    @classmethod
    def parse(cls, values: Any, source: str) -> Self:
        """Validate a plain mapping; ``source`` (a file name, say) opens the error message."""
        if not isinstance(values, dict):
            raise ConfigError(f"{source}: expected a mapping of keys, got {type(values).__name__}")
        unnamed = [key for key in values if not isinstance(key, str)]
        if unnamed:
            raise ConfigError(f"{source}: keys are strings, got {unnamed[0]!r}")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None


class EngineConfig(StrictModel):
    """What one engine holds and how it decodes.

    ``num_slots`` rows decode at once; each row has room for ``max_length`` tokens (prompt and
    new tokens together), so the KV memory is ``num_slots * max_length`` cells and never more, plus
    those of one prompt whose samples still wait for a slot, and of prompts that rows share. With
    ``max_new_tokens`` slots hold new tokens only: ``num_slots * max_new_tokens + prompt_tokens``.
    """

    num_slots: int = Field(default=32, ge=1, le=65536)
    """Samples that decode at once. KV memory grows with it, and so does the speed, up to a point."""
    max_length: int = Field(default=1024, ge=2)
    """Tokens per sample, prompt and new ones together. A prompt that leaves no room for ``max_new_tokens``
    fails its own group."""
    layout: Literal["ragged", "aligned"] = "ragged"
    """``ragged``: every row at its own position. ``aligned``: all rows write one column, as a left-padded
    batch does; it also serves models that derive positions from a mask (ALiBi: BLOOM, MPT, Falcon)."""
    prefix: Literal["auto", "shared", "expand", "off"] = "auto"
    """``expand``: a prompt is computed once, and its KV copied into the slot of every sample. ``shared``: its
    KV is kept once and attended once for all samples of the group. ``auto``: for each group what is faster
    by the rule in ``docs/prefix.md``, and shared where slots are too short for the prompt. ``off``: computed
    once per sample."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Cells of a slot, when prompts are shared and slots hold new tokens only: the most that a request may
    ask for. None: ``max_length``, so that any row fits a slot with its prompt."""
    prompt_tokens: int | None = Field(default=None, ge=1)
    """Of all prompts whose KV rows share at the same time; a group waits while there is no room for its own.
    None: one prompt of ``max_length`` for every 8 slots, at least two where prompts must be shared."""
    prefix_cache_tokens: int | None = Field(default=None, ge=0)
    """Tokens of recent prompts whose KV is kept, for prompts that begin like them: system prompts, examples,
    turns of a conversation. None: twice ``max_length``. 0: none. Under ``strict`` only whole prompts are
    used again."""
    deterministic: Literal["seeded", "strict"] = "seeded"
    """``seeded``: same draws for the same seed. ``strict``: the same bits whatever shares the batch."""
    compact: bool = True
    """Move live rows together at the tail, so that a smaller batch decodes them."""
    linear_layout: Literal["auto", "native", "transposed", "packed"] = "auto"
    """How linear weights lie in CPU memory. ``transposed``: faster at few rows, in the same memory.
    ``packed``: copies in the math library's own form beside them, which take the memory of the weights once
    more and are made again for new weights. ``auto``: of a model that the engine loaded itself each shape of
    weight is transposed (a head is not), or what a short measurement at ``num_slots`` rows finds clearly
    faster; a lent one stays native."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """``auto``: decode steps are captured once per batch size on a GPU, and replayed. ``off``: never."""
    readback_every: int | None = Field(default=None, ge=1, le=64)
    """Steps between two looks at which rows have ended. A look never stops the device, but a row that
    ended before it still takes part in the steps until then. None: 4 on a GPU, 1 on a CPU."""
    zero3_gather: Literal["layers", "whole"] = "layers"
    """How a trainer's weights come together that ZeRO-3 has partitioned. ``layers``: one layer at a time in
    every forward, in no more memory than training takes. ``whole``: all of them once per rollout."""

    @property
    def may_share_prompts(self) -> bool:
        """Whether rows share their prompt's KV, if the model lets them."""
        return self.layout == "ragged" and self.prefix in ("auto", "shared")

    @model_validator(mode="after")
    def _sharing_is_ragged(self) -> Self:
        sized = [name for name in ("max_new_tokens", "prompt_tokens") if getattr(self, name) is not None]
        if self.layout == "aligned" and (self.prefix == "shared" or sized):
            key = "prefix: 'shared'" if self.prefix == "shared" else f"{sized[0]}:"
            raise ConfigError(f"{key} needs layout 'ragged'; in 'aligned' every slot holds its prompt")
        if self.prefix in ("expand", "off") and sized:
            raise ConfigError(f"{sized[0]}: needs prefix 'auto' or 'shared'; else slots hold their prompts")
        return self

    @model_validator(mode="after")
    def _strict_is_ragged(self) -> Self:
        if self.layout == "aligned" and self.deterministic == "strict":
            raise ConfigError(
                "deterministic: 'strict' needs layout 'ragged'; in 'aligned' the place of a row, and with it "
                "the order of sums, depends on the others"
            )
        if self.linear_layout == "packed" and self.deterministic == "strict":
            raise ConfigError(
                "linear_layout: 'packed' is not for deterministic 'strict', whose products are the same in "
                "every process; leave it at 'auto'"
            )
        return self


class PoolConfig(StrictModel):
    """What a pool runs: one model, ``num_actors`` engines, one seed."""

    model: str = Field(min_length=1)
    """A folder in Hugging Face format, or a name in the hub's cache. The same on every node."""
    tokenizer: str | None = None
    """A folder or name, where it is not the model's."""
    num_actors: int = Field(default=1, ge=1, le=65536)
    """Engines. Under tensor parallelism each is a group of ``tensor_parallel_size`` processes."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that one engine's weights and KV are split over; each is a Ray actor with its own device."""
    tensor_parallel_backend: TensorParallelBackend = "transformers"
    """Who splits the model: its own plan in transformers, or DeepSpeed AutoTP."""
    tensor_parallel_placement: Literal["strict_pack", "pack"] = "strict_pack"
    """``strict_pack``: all ranks of a group on one node. ``pack``: over several where one has no room."""
    dtype: Dtype = "auto"
    """Of weights and KV. ``auto``: the checkpoint's. Logits and log-probabilities are float32 in any case."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of calls that bring none, mixed with the number of the call, so that a repeated call draws anew."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    """What each engine holds and how it decodes."""
    cpus_per_actor: int | None = Field(default=None, ge=1)
    """Cores, and torch threads, per actor, or per rank of a tensor-parallel group. None: the cluster's
    cores divided among CPU actors."""
    gpus_per_actor: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Per actor, or per rank of a tensor-parallel group, and then 0 or 1. None: one where the cluster has
    GPUs, otherwise CPU actors."""
    start_timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """For an actor to find room and load the model, and for a new one to get the present weights."""
    step_timeout_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """An actor whose engine finishes nothing for so long, though it has work, is lost: killed and replaced.
    Must be above its longest step, prompt, or writing of new weights."""
    heartbeat_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """An actor that gives no answer for so long is lost, whether it has work or not."""
    max_start_failures: int = Field(default=3, ge=1)
    """A lost actor's replacement that fails to start is tried so often, with growing pauses. One that finds
    no room is not given up: the pool goes on with fewer until the cluster has room."""
    max_replays: int = Field(default=2, ge=0)
    """How often a group may be replayed after the loss of its actor before it fails."""
    max_staleness: int | None = Field(default=None, ge=0)
    """A group with a token of weights more than so many versions older than the present ones is not handed
    out but drawn anew, at most ``max_replays`` times. None: no bound. A call may ask for another."""
    max_queued_groups: int = Field(default=1_000_000, ge=1)
    """Groups that may wait for an actor, of all callers together."""
    min_part_samples: int | None = Field(default=16, ge=1)
    """When more actors are idle than groups wait, a group goes to several, in parts of so many samples
    or more. Samples stay the same; each part computes the prompt. None: every group goes to one actor."""
    stream_window: int = Field(default=64, ge=1)
    """Finished groups of one stream that may wait to be taken; then no more of its groups start."""
    weight_transport: Literal["object_store", "gloo", "nccl"] = "object_store"
    """How new weights come from a trainer that is a Ray actor: through Ray's object store, or straight from
    its memory by Ray's tensor transport, then from a ``TensorTransportSource``."""
    trust_remote_code: bool = False
    """Run code that a checkpoint or its tokenizer brings along. Leave it off unless you know that code."""

    @field_validator("model", "tokenizer")
    @classmethod
    def _home(cls, value: str | None) -> str | None:
        return os.path.expanduser(value) if value is not None else None

    @field_validator("engine", mode="before")
    @classmethod
    def _empty_section(cls, value: Any) -> Any:
        return {} if value is None else value  # `engine:` with all its keys commented out

    @model_validator(mode="after")
    def _one_device_per_rank(self) -> Self:
        if self.tensor_parallel_size > 1 and self.gpus_per_actor not in (None, 0, 1):
            raise ValueError(
                f"gpus_per_actor: with tensor_parallel_size {self.tensor_parallel_size} it counts per rank, "
                f"and a rank has one whole GPU (1) or runs on cores (0), got {self.gpus_per_actor:g}"
            )
        return self

    @model_validator(mode="after")
    def _one_process_group(self) -> Self:
        if self.weight_transport != "object_store" and self.tensor_parallel_size > 1:
            raise ValueError(
                f"weight_transport: {self.weight_transport} needs a process group that the ranks of a tensor-"
                "parallel group have in use; use object_store"
            )
        return self

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a configuration file; an empty or broken one raises :class:`ConfigError`."""
        return cls.parse(read_yaml(path), str(path))


def read_yaml(path: str | Path) -> Any:
    """What a YAML file holds, unchecked. Raises :class:`ConfigError` when it can't be read."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; save it as such") from None
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}; name a YAML file") from None
    try:
        _refuse_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader), str(path))
        return yaml.safe_load(text)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        reason = _short(" ".join((error.problem or error.context or "").split()), 120)
        raise ConfigError(f"{path}{line}: not valid YAML: {reason}; see configs/ for examples") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # a date that does not exist, say
        raise ConfigError(
            f"{path}: not valid YAML: {_short(one_line(error), 120)}; see configs/ for examples"
        ) from None


def _refuse_repeated_keys(root: Any, source: str) -> None:
    """YAML takes the last of two equal keys, and the first is silently lost."""
    waiting, known = [root], set()
    while waiting:
        node = waiting.pop()
        if not isinstance(getattr(node, "value", None), list) or id(node) in known:  # a node may stand twice
            continue
        known.add(id(node))
        seen: dict[str, int] = {}
        for item in node.value:
            key, value = item if isinstance(item, tuple) else (None, item)
            waiting.append(value)
            if key is None:  # of a list
                continue
            name, line = str(key.value), key.start_mark.line + 1
            if name in seen:
                raise ConfigError(
                    f"{source}, line {line}: {_short(name)} is given twice, in line {seen[name]} already; "
                    "remove one"
                )
            seen[name] = line


def describe(error: ValidationError, model: type[BaseModel]) -> str:
    """One line for the first fault of a pydantic error, with its full path and the way out."""
    faults = error.errors(include_url=False)
    first = faults[0]
    path = ".".join(_short(str(part)) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = list(model.model_fields)
        close = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else _short(f"known keys: {', '.join(known)}", 200)
        message = f"{path}: unknown key; {hint}"
    elif first["type"] == "missing":
        message = f"{path}: required, but not given; set it"
    elif isinstance(first.get("ctx", {}).get("error"), ConfigError):  # a nested model's own message
        message = f"{path}.{first['ctx']['error']}" if path else str(first["ctx"]["error"])
    else:
        text = first["msg"].removeprefix("Value error, ")
        message = f"{path}: {text}" if path else text
        if not isinstance(first["input"], (dict, BaseModel)):
            message += f", got {_short(repr(first['input']))}"
    more = len(faults) - 1
    return f"{message} (and {more} more)" if more else message


def _short(text: str, limit: int = 60) -> str:
    """Enough of a user's value to find it by."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
