"""Which part of every full tensor a rank of a tensor-parallel group holds."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rollout_pool.actors.checkpoint import Checkpoint
from rollout_pool.actors.checksums import checksum
from rollout_pool.actors.loading import load_config
from rollout_pool.actors.splits import Skeleton, SplitRules
from rollout_pool.actors.weight_places import Shard, SplitShard, split_candidates
from rollout_pool.config import PoolConfig


def find_shards(model: PreTrainedModel, config: PoolConfig, rank: int) -> dict[str, Shard]:
    """By the names of ``model``'s parameters: those that are not whole on this rank.

    model: as :func:`~rollout_pool.actors.sharding.load_shard` returned it, with the checkpoint's weights
    still in it. Transformers' plan says how it splits. AutoTP does not: its parts are found by their
    values. A parameter for which neither works out is left out, and takes no new weights then.
    """
    hub_config = load_config(config.model, trust_remote_code=config.trust_remote_code)
    skeleton, size = Skeleton.of(hub_config), config.tensor_parallel_size
    full_shapes = {
        name: tuple(p.shape) for name, p in skeleton.model.named_parameters(remove_duplicate=False)
    }
    local = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not isinstance(parameter, DTensor) and tuple(parameter.shape) != full_shapes.get(name)
    }
    if config.tensor_parallel_backend == "deepspeed":
        return _by_values(model, local, config.model, rank, size)
    splits = SplitRules.of_plan(skeleton).splits
    return {
        name: SplitShard(full_shapes[name], splits[name].dim, rank, size, splits[name].blocks)
        for name in local
        if name in splits
    }


def _by_values(
    model: PreTrainedModel, local: dict[str, torch.nn.Parameter], checkpoint: str, rank: int, size: int
) -> dict[str, Shard]:
    dtypes = {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}
    found: dict[str, Shard] = {}
    unclear: dict[str, list[SplitShard]] = {}
    head, embedding = _name(model, model.get_output_embeddings()), _name(model, model.get_input_embeddings())
    for name, full in Checkpoint(checkpoint).tensors(model, dtypes):
        names = [name, head] if name == embedding and head not in found else [name]
        for here in (each for each in names if each in local):
            matching = [
                shard
                for shard in split_candidates(full.shape, rank, size)
                if _holds(local[here], shard, full)
            ]
            if len(matching) == 1:
                found[here] = matching[0]
            elif matching:
                unclear[here] = matching
    for name, matching in unclear.items():  # a bias of equal values is split as the weight beside it
        beside = found.get(name.rpartition(".")[0] + ".weight")
        blocks = beside.blocks if isinstance(beside, SplitShard) else 1
        found[name] = next((shard for shard in matching if shard.blocks == blocks), matching[0])
    return found


def _holds(local: torch.Tensor, shard: SplitShard, full: torch.Tensor) -> bool:
    part = shard.take(full)
    return part.shape == local.shape and checksum(part) == checksum(local)


def _name(model: PreTrainedModel, module: torch.nn.Module | None) -> str:
    return next((f"{name}.weight" for name, each in model.named_modules() if each is module), "")
