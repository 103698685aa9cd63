"""Rollouts for TRL's ``GRPOTrainer``: its ``rollout_func``, on the trainer's own model or on a pool.

Needs ``pip install 'rollout-pool[trl]'``. TRL is reached only through the trainer that it hands over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from rollout_pool.adapters.rollouts import (
    LogprobKind,
    check_kind,
    draw_seed,
    logprobs_of,
    require_complete,
    roll_out,
)
from rollout_pool.config import EngineConfig
from rollout_pool.errors import ConfigError, RolloutPoolError
from rollout_pool.types import RolloutGroup, RolloutRequest, Sample, SamplingParams

TRLPrompt = str | Sequence[dict[str, Any]]
SyncWeights = Callable[[Any], int | None]
Extra = Callable[[RolloutGroup, Sample], dict[str, Any]]

_FROM_GENERATION_KWARGS = {
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "stop_strings": "stop",
    "stop": "stop",
}


class GRPORollout:
    """A ``rollout_func``; made by :func:`rollout_func`."""

    def __init__(
        self,
        source: Any | None,
        sync: SyncWeights | None,
        engine_config: EngineConfig | None,
        logprobs: LogprobKind,
        extra: Extra | None,
    ) -> None:
        check_kind(logprobs)
        if source is not None and sync is None:
            raise ConfigError(
                "rollout_func on a pool or an engine of its own needs sync=, a function of the trainer that "
                "brings it the weights; without one it would roll out the weights of the start for ever"
            )
        if source is None and sync is not None:
            raise ConfigError("sync= is for a pool; an engine on the trainer's own model has its weights")
        if source is not None and engine_config is not None:
            raise ConfigError("engine_config= is for an engine on the trainer's own model")
        self._source, self._sync = source, sync
        self._engine_config = engine_config
        self._logprobs: LogprobKind = logprobs
        self._extra = extra
        self._borrowed: Any = None  # the model that the engine of this process runs on
        self._version: int | None = None
        self._synced_step: int | None = None
        self._place: tuple[int, bool] = (-1, True)  # step and mode of the last call
        self._calls_here = 0
        self.last_groups: list[RolloutGroup] = []
        """The groups of the last call, with all that TRL has no field for."""

    def __call__(self, prompts: Sequence[TRLPrompt], trainer: Any) -> dict[str, list[Any]]:
        """One completion for each item of ``prompts``, in order; equal neighbours share a prefill.

        Returns TRL's ``prompt_ids``, ``completion_ids`` and ``logprobs``, lists of one list for each
        completion, and what reward functions get as keyword arguments: ``finish_reason``,
        ``weight_version`` and what ``extra`` adds. Raises :class:`RequestError` when a prompt cannot be
        served and :class:`RolloutPoolError` when a sample is not of the weights that ``sync`` brought.
        """
        source = self._ready_source(trainer)
        seed = self._next_seed(trainer)
        params = sampling_params(trainer, seed=seed)
        ids = encode_prompts(prompts, trainer)
        requests = [
            RolloutRequest(prompt, sampling=params.model_copy(update={"n": len(list(equal))}))
            for prompt, equal in groupby(ids)
        ]
        self.last_groups = require_complete(roll_out(source, requests, params))
        self._require_current(self.last_groups)
        rows = [(group, sample) for group in self.last_groups for sample in group.samples]
        fields: dict[str, list[Any]] = {
            "prompt_ids": [group.prompt_token_ids.tolist() for group, _ in rows],
            "completion_ids": [sample.token_ids.tolist() for _, sample in rows],
            "logprobs": [logprobs_of(sample, self._logprobs).tolist() for _, sample in rows],
            "finish_reason": [sample.finish_reason for _, sample in rows],
            "weight_version": [sample.weight_version for _, sample in rows],
        }
        return fields | self._extra_fields(rows)

    def _extra_fields(self, rows: list[tuple[RolloutGroup, Sample]]) -> dict[str, list[Any]]:
        if self._extra is None:
            return {}
        found = [self._extra(group, sample) for group, sample in rows]
        return {name: [fields[name] for fields in found] for name in found[0]}

    def _ready_source(self, trainer: Any) -> Any:
        """Where to roll out now, with the weights of now."""
        if self._sync is None:
            return self._own_engine(trainer)
        if self._synced_step != trainer.state.global_step:
            version = self._sync(trainer)
            # Another process must not roll out before the weights are there.
            trainer.accelerator.wait_for_everyone()
            self._synced_step, self._version = trainer.state.global_step, version
        return self._source

    def _own_engine(self, trainer: Any) -> Any:
        """An engine on the trainer's own model, made when the first prompts come."""
        if getattr(trainer, "is_fsdp_enabled", False):
            raise ConfigError("an engine cannot run on a model that FSDP has split; give rollout_func a pool")
        model = trainer.accelerator.unwrap_model(trainer.model)
        if hasattr(model, "peft_config"):  # the model that PEFT has put its adapters into
            model = model.get_base_model()
        if self._borrowed is not model:
            from rollout_pool.actors.engine import Engine

            tokenizer = _tokenizer(trainer)
            self._source = Engine(model, self._engine_config or EngineConfig(), tokenizer=tokenizer)
            self._borrowed = model
        return self._source

    def _next_seed(self, trainer: Any) -> int:
        """Of the trainer's seed, step, mode and process: a run that is resumed draws what it would have."""
        place = (int(trainer.state.global_step), bool(trainer.model.training))
        if place != self._place:
            self._place, self._calls_here = place, 0
        coordinates = (*map(int, place), self._calls_here, int(trainer.accelerator.process_index))
        self._calls_here += 1
        return draw_seed(int(trainer.args.seed), *coordinates)

    def _require_current(self, groups: list[RolloutGroup]) -> None:
        if self._version is None:
            return
        for group in groups:
            for sample in group.samples:
                if sample.weight_version != self._version:
                    raise RolloutPoolError(
                        f"request {group.request_id!r} was rolled out with weights of version "
                        f"{sample.weight_version}; sync brought version {self._version}"
                    )


def rollout_func(
    source: Any | None = None,
    *,
    sync: SyncWeights | None = None,
    engine_config: EngineConfig | None = None,
    logprobs: LogprobKind = "logprobs",
    extra: Extra | None = None,
) -> GRPORollout:
    """The ``rollout_func`` of ``GRPOTrainer``.

    ::

        trainer = GRPOTrainer(..., rollout_func=rollout_func(engine_config=EngineConfig(num_slots=64)))
        trainer = GRPOTrainer(..., rollout_func=rollout_func(pool, sync=bring_weights))

    Args:
        source: the handle of a pool. None: an engine on the trainer's own model, in its process, without a
            second copy of the weights.
        sync: brings the trainer's weights to ``source``; called with the trainer, on every process, before
            the first rollout of each step. What it returns, unless None, is the version that every
            sample must be of.
        engine_config: of the engine on the trainer's own model. ``max_length`` holds prompt and completion.
        logprobs: what TRL gets as the log-probabilities of sampling. ``logprobs`` is what the trainer
            recomputes; ``sampling_logprobs`` is after top-k, top-p, min-p and penalties.
        extra: more fields for the reward functions, from a group and a sample.

    Raises :class:`ConfigError` when the arguments contradict each other.
    """
    return GRPORollout(source, sync, engine_config, logprobs, extra)


def sampling_params(trainer: Any, *, seed: int | None = None) -> SamplingParams:
    """The sampling that ``trainer`` is configured with, for one completion of each prompt.

    Raises :class:`ConfigError` when ``generation_kwargs`` asks for something that has no counterpart.
    """
    fields: dict[str, Any] = {
        "max_new_tokens": trainer.max_completion_length,
        "temperature": float(trainer.temperature),
        "top_p": float(trainer.top_p),
        "top_k": trainer.top_k,
        "min_p": float(trainer.min_p or 0.0),
        "repetition_penalty": float(trainer.repetition_penalty),
        "stop_token_ids": tuple(trainer.eos_token_ids),
        "seed": seed,
    }
    for name, value in (trainer.args.generation_kwargs or {}).items():
        if name not in _FROM_GENERATION_KWARGS:
            known = ", ".join(_FROM_GENERATION_KWARGS)
            raise ConfigError(f"generation_kwargs: {name!r} has no counterpart here; known: {known}")
        fields[_FROM_GENERATION_KWARGS[name]] = value
    return SamplingParams(**fields)


def encode_prompts(prompts: Sequence[TRLPrompt], trainer: Any) -> list[list[int]]:
    """Token ids of texts or conversations, as ``trainer`` makes them for its own generation.

    Raises :class:`ConfigError` for what only TRL's own generation can do: tools, environments, images.
    """
    if getattr(trainer, "tools", None) or getattr(trainer, "environment_factories", None):
        raise ConfigError(
            "tools and environments: TRL generates every turn after the first by itself, so a rollout_func "
            "would serve only part of each sample; leave one of the two out"
        )
    tokenizer = trainer.processing_class
    if _tokenizer(trainer) is not tokenizer:
        raise ConfigError("a model of text and images cannot be rolled out: prompts are text only")
    if isinstance(prompts[0], str):
        ids: list[list[int]] = tokenizer(text=list(prompts))["input_ids"]
        return ids
    encoded = tokenizer.apply_chat_template(
        conversation=list(prompts),
        chat_template=getattr(trainer, "chat_template", None),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    ids = encoded["input_ids"]
    return ids


def _tokenizer(trainer: Any) -> Any:
    """The tokenizer of a trainer whose ``processing_class`` may be a processor around it."""
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
