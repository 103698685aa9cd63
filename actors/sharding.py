"""This rank's shard of a model, and what cannot be split.

Two ways to split: the tensor-parallel plans that Transformers ships with its models, and DeepSpeed's
AutoTP, which finds the splits by itself, for models without a plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rollout_pool.actors.checkpoint_files import refuse_unreadable
from rollout_pool.actors.loaded_weights import load_whole
from rollout_pool.actors.loading import TORCH_DTYPES, cannot_load, has_softcap, load_config
from rollout_pool.actors.rank_group import RankGroup
from rollout_pool.actors.splits import Skeleton, SplitRules
from rollout_pool.config import Dtype
from rollout_pool.errors import ConfigError, UnsupportedModelError

Backend = Literal["transformers", "deepspeed"]


def refuse_unsplittable(config: PretrainedConfig, size: int, backend: str) -> None:
    """Raise :class:`UnsupportedModelError` when ``size`` ranks cannot split the model, with the numbers.

    Needs neither weights nor other ranks: the model is built without memory, and its plan is read.
    A group of one is never refused.
    """
    if size == 1:
        return
    skeleton = Skeleton.of(config)
    rules = {"transformers": SplitRules.of_plan, "deepspeed": SplitRules.of_auto_tp}
    refusing = rules.pop(backend)(skeleton)
    reason = refusing.reason_against(size)
    if reason is None:
        return
    if refusing.refusal is not None:
        ((other, rules_of),) = rules.items()
        can_other = rules_of(skeleton).reason_against(size) is None
        reason += f"; use tensor_parallel_backend: {other}" if can_other else "; use tensor_parallel_size: 1"
    raise UnsupportedModelError(f"{skeleton.name}: {reason}")


def load_shard(
    name: str, group: RankGroup, *, dtype: Dtype, backend: Backend, trust_remote_code: bool
) -> PreTrainedModel:
    """This rank's shard of a causal LM, in evaluation mode on ``group.device``, from safetensors only.

    Called by all ranks together. A forward, without gradients and by all ranks together, gives the full
    logits ``[rows, tokens, vocab]`` on each, and fills a cache with the shard's KV heads. Raises
    :class:`UnsupportedModelError` when the model cannot be split, and :class:`ConfigError` when it cannot
    be read.
    """
    if Path(name).is_dir():
        refuse_unreadable(name)
    config = load_config(name, trust_remote_code=trust_remote_code)
    refuse_unsplittable(config, group.size, backend)
    options: dict[str, Any] = {
        "dtype": "auto" if dtype == "auto" else TORCH_DTYPES[dtype],
        "trust_remote_code": trust_remote_code,
    }
    if has_softcap(config.get_text_config()):
        options["attn_implementation"] = "eager"
    try:
        if backend == "transformers":
            model = _load_by_plan(name, group, options)
        else:
            from rollout_pool.actors.auto_tp import load_by_auto_tp

            model = load_by_auto_tp(name, group, options)
    except ConfigError:
        raise
    except Exception as error:
        raise cannot_load(name, error) from error
    return model


def _load_by_plan(name: str, group: RankGroup, options: dict[str, Any]) -> PreTrainedModel:
    """Every rank reads its own part of each tensor; nothing else of the model is ever in memory."""
    from transformers.distributed.configuration_utils import DistributedConfig

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    seen = "cpu" if accelerator is None else accelerator.type
    if seen != group.device.type:
        raise ConfigError(
            f"a rank on {group.device.type} sees a device of type {seen}, and Transformers would shard onto "
            "that one; start the ranks with CUDA_VISIBLE_DEVICES empty to stay on the CPU"
        )
    parallel = DistributedConfig(tp_size=group.size)
    model: PreTrainedModel = load_whole(name, distributed_config=parallel, **options).eval()
    _unwrap_linears(model)
    return model


def _unwrap_linears(model: PreTrainedModel) -> None:
    """Make the weights of linear layers ordinary tensors, each rank's own part.

    Without gradients, their forward takes the local part anyway, after a detour in every layer of
    every step; and what stores weights in another order cannot reach through a DTensor. A head that is
    tied to the embedding stays as it is, as embeddings and fused experts do.
    """
    from torch.distributed.tensor import DTensor

    embedding = model.get_input_embeddings().weight
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.weight is not embedding:
            for name, parameter in module.named_parameters(recurse=False):
                if isinstance(parameter, DTensor):
                    local = torch.nn.Parameter(parameter.to_local().detach(), requires_grad=False)
                    setattr(module, name, local)
