"""A model that is ready to be served: loaded, checked, tried out, with its memory planned."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from transformers import Cache, PreTrainedModel

from rollout_pool.actors import support
from rollout_pool.actors.borrowed_model import BorrowedModel, borrow
from rollout_pool.actors.kv_cache import cache_bytes
from rollout_pool.actors.linear_layout import (
    Layouts,
    PackedLinears,
    fastest_layouts,
    is_packable,
    lay_out,
    one_layout,
)
from rollout_pool.actors.loading import (
    eos_token_ids,
    load_config,
    load_model,
    load_tokenizer,
)
from rollout_pool.actors.memory import MemoryPlan, plan_memory
from rollout_pool.actors.model_runner import ModelRunner
from rollout_pool.actors.rank_group import RankGroup
from rollout_pool.actors.strict import ask_for_strict_products
from rollout_pool.config import Dtype, EngineConfig, TensorParallelBackend
from rollout_pool.errors import ConfigError, RolloutPoolError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """What an engine needs to know of a model, found out before anything is allocated."""

    model: PreTrainedModel
    tokenizer: Any | None
    runner: ModelRunner
    example: Cache
    """A small prefill's cache; its tensors give the slot cache its shapes."""
    memory_plan: MemoryPlan
    eos_token_ids: tuple[int, ...]
    borrowed: BorrowedModel | None
    """Set when a trainer's model is served."""
    packed: PackedLinears | None = None
    """Copies of linear weights, to be made again when these change."""


def serve(
    model: Any,
    config: EngineConfig,
    *,
    tokenizer: Any | None,
    dtype: Dtype,
    device: str | None,
    trust_remote_code: bool,
    group: RankGroup | None = None,
    backend: TensorParallelBackend = "transformers",
) -> ServedModel:
    """Load a model if need be, refuse it if it cannot be served, and plan its memory.

    With a ``group``, every rank calls this at the same time and gets its shard; so does every rank of a
    trainer whose model ZeRO-3 has partitioned. Raises ConfigError, UnsupportedModelError or CapacityError,
    each with the way out.
    """
    if config.deterministic == "strict":
        ask_for_strict_products()
    borrowed = None if isinstance(model, str) else borrow(model)
    if isinstance(model, str):
        load_config(
            model, trust_remote_code=trust_remote_code
        )  # what is wrong with it is not the tokenizer's
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code, required=True)
        tokenizer = tokenizer or load_tokenizer(model, trust_remote_code=trust_remote_code)
        model = _load(model, dtype, device, trust_remote_code, group, backend)
    else:
        assert borrowed is not None
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code, required=True)
        model = _lent(borrowed, config, dtype, device, group)
    is_aligned = config.layout == "aligned"
    support.refuse_by_configuration(model, config.max_length, is_aligned)
    is_whole = group is None
    vocab_size = None if is_whole else model.config.get_text_config(decoder=True).vocab_size
    runner = ModelRunner(model, vocab_size, config.zero3_gather)
    if borrowed is None:
        runner.own_modules = list(model.modules())
    packed = lay_out(model, _linear_layouts(runner, config, is_own=borrowed is None, is_whole=is_whole))
    if packed is not None:
        packed.make_ready(config.num_slots)  # before memory is planned and the model tried
    example, plan = _try_out(runner, config)
    if packed is not None:
        plan = replace(plan, weight_bytes=plan.weight_bytes + packed.nbytes)
    return ServedModel(
        model, tokenizer, runner, example, plan, eos_token_ids(model, tokenizer), borrowed, packed
    )


def _linear_layouts(runner: ModelRunner, config: EngineConfig, *, is_own: bool, is_whole: bool) -> Layouts:
    """How linear weights are to lie; those of shapes that are not named stay.

    is_own: the engine loaded them. is_whole: they are not a shard.
    """
    asked = config.linear_layout
    if runner.device.type != "cpu":
        return {}
    if asked == "packed" and not (is_whole and is_packable(runner.model)):
        what = (
            f"weights in {runner.model.dtype}, by this build of PyTorch," if is_whole else "parts of weights"
        )
        raise ConfigError(f"engine.linear_layout 'packed': {what} cannot be packed; leave it at 'auto'")
    if asked != "auto":
        return one_layout(runner.model, asked)
    if not is_own:
        return {}
    if not is_whole or config.deterministic == "strict":  # every process has to come to the same
        return one_layout(runner.model, "transposed")
    return fastest_layouts(runner.model, config.num_slots)


def _try_out(runner: ModelRunner, config: EngineConfig) -> tuple[Cache, MemoryPlan]:
    """A small prefill's cache, and the plan. What fails on one rank of a trainer fails on all."""
    error: RolloutPoolError | None = None
    try:
        wants_sharing = config.may_share_prompts
        with runner.together():
            example = support.trial(runner, config.layout == "aligned", shares=wants_sharing).cache
        if config.prefix == "shared":
            support.refuse_sharing(runner)
        can_share = runner.no_sharing is None
        plan = plan_memory(runner.model, config, *cache_bytes(example), runner.device, can_share)
        plan.check()
        if wants_sharing and not can_share and config.max_new_tokens is not None:
            logger.warning(
                "slots hold engine.max_length %d tokens, since rows of this model cannot share prompts: %s",
                config.max_length,
                runner.no_sharing,
            )
    except RolloutPoolError as found:
        error = found
    if runner.partitioned is not None:
        runner.partitioned.agree(error, "serve the model")
    if error is not None:
        raise error
    return example, plan


def _lent(
    borrowed: BorrowedModel,
    config: EngineConfig,
    dtype: Dtype,
    device: str | None,
    group: RankGroup | None,
) -> PreTrainedModel:
    if dtype != "auto" or device is not None:
        raise ConfigError("dtype and device are for loading; a model that is loaded already keeps its own")
    if group is not None:
        raise ConfigError("a tensor-parallel engine loads its model itself: pass a folder or a name")
    borrowed.refuse_layout(config.linear_layout)
    return borrowed.model


def _load(
    name: str,
    dtype: Dtype,
    device: str | None,
    trust_remote_code: bool,
    group: RankGroup | None,
    backend: TensorParallelBackend,
) -> PreTrainedModel:
    if group is None:
        return load_model(name, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    from rollout_pool.actors.sharding import load_shard

    return load_shard(name, group, dtype=dtype, backend=backend, trust_remote_code=trust_remote_code)
