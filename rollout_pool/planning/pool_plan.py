"""The plan of a pool: what each rank holds, what fits, and what is asked of Ray."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rollout_pool.actors.kv_cache import cache_bytes
from rollout_pool.actors.memory import MemoryPlan, plan_memory
from rollout_pool.actors.meta_model import (
    bytes_by_dtype,
    example_cache,
    meta_model,
    shrink_to_shard,
    stored_tensors,
)
from rollout_pool.actors.support import is_known_not_to_share, refuse_by_configuration
from rollout_pool.config import PoolConfig
from rollout_pool.errors import CapacityError, ConfigError, UnsupportedModelError
from rollout_pool.planning.machine import Machine
from rollout_pool.preflight import ActorResources, actors_on, check_split, plan_actors

PROCESS_BYTES = 512 * 2**20
"""What a rollout process takes of host memory for itself: Python, torch, Transformers and Ray."""
MOST_SLOTS = 65_536


@dataclass(frozen=True)
class PoolPlan:
    """Everything that is known of a pool before it starts."""

    config: PoolConfig
    machine: Machine
    kind: str
    """The model's class."""
    num_parameters: int
    """Of the whole model; tied ones count once."""
    stored: Mapping[str, int]
    """Bytes in the checkpoint's files by dtype."""
    loaded: Mapping[str, int]
    """Bytes of one rank's weights by dtype."""
    resources: ActorResources
    ranks_per_node: int
    """On the fullest node."""
    memory: MemoryPlan
    """Of one rank."""

    @property
    def num_ranks(self) -> int:
        """Of all engines together."""
        return self.config.num_actors * self.config.tensor_parallel_size

    @cached_property
    def slots_that_fit(self) -> int:
        """The largest ``engine.num_slots`` that an engine would accept at this ``max_length``; 0: none."""
        low, high = 0, MOST_SLOTS
        while low < high:
            middle = (low + high + 1) // 2
            if _refusal(dataclasses.replace(self.memory, num_slots=middle)) is None:
                low = middle
            else:
                high = middle - 1
        return low

    @cached_property
    def problem(self) -> str | None:
        """Why the pool would not start, in one line with the way out; None when it would."""
        if self.memory.free_bytes <= 0:
            total = self.memory.weight_bytes * self._sharing + (0 if self._is_on_gpu else self._processes)
            room = self.machine.gpu_bytes if self._is_on_gpu else self.machine.host_bytes
            what = "a GPU" if self._is_on_gpu else "a node"
            more = f" for {self._sharing} ranks" if self._sharing > 1 else ""
            return (
                f"the weights{more} take {total / 2**30:.2f} GiB, {what} has {room / 2**30:.2f} GiB free; "
                "use fewer actors on it, a smaller dtype, or a larger tensor_parallel_size"
            )
        return _refusal(self.memory)

    @property
    def _is_on_gpu(self) -> bool:
        return self.resources.device == "cuda"

    @property
    def _sharing(self) -> int:
        """Ranks that share the memory of one device."""
        return sharing(self.resources, self.ranks_per_node)

    @property
    def _processes(self) -> int:
        return PROCESS_BYTES * self.ranks_per_node


def make_plan(config: PoolConfig, machine: Machine) -> PoolPlan:
    """Plan ``config`` for ``machine`` without loading a weight or starting a process.

    Raises :class:`ConfigError` and its kinds for what an engine would refuse whatever the memory, and
    :class:`CapacityError` when the machine has too few cores or GPUs.
    """
    folder = local_folder(config.model)
    local = config.model_copy(update={"model": str(folder)})
    check_split(local)
    resources = plan_actors(local, machine.nodes)
    stored = stored_tensors(folder)
    model = meta_model(folder, stored, dtype=config.dtype, trust_remote_code=config.trust_remote_code)
    refuse_by_configuration(model, config.engine.max_length, config.engine.layout == "aligned")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    per_token, per_slot = _shard_and_measure(model, config)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    on_node = min(actors_on(machine.nodes[0], resources), config.num_actors * config.tensor_parallel_size)
    can_share = not is_known_not_to_share(model)
    if config.engine.prefix == "shared" and not can_share:
        raise UnsupportedModelError(
            f"{type(model).__name__} caches no keys, so rows share no prompts; set engine.prefix to 'auto'"
        )
    memory = dataclasses.replace(
        plan_memory(model, config.engine, per_token, per_slot, torch.device("cpu"), can_share),
        free_bytes=_free_bytes(machine, resources, on_node, weights),
        device=resources.device,
    )
    return PoolPlan(
        config=config,
        machine=machine,
        kind=type(model).__name__,
        num_parameters=num_parameters,
        stored=bytes_by_dtype(iter(stored.values())),
        loaded=bytes_by_dtype(model.parameters()),
        resources=resources,
        ranks_per_node=on_node,
        memory=memory,
    )


def local_folder(model: str) -> Path:
    """The folder of a model that is one, or is in the hub's cache. Never asks the network.

    Raises :class:`ConfigError` when there is none.
    """
    if os.path.isdir(model):
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except Exception:
        raise ConfigError(
            f"model: {model!r} is neither a folder nor in the hub's cache on this machine; give the path of "
            "a folder, or download the model first"
        ) from None


def sharing(resources: ActorResources, ranks_per_node: int) -> int:
    """Ranks that share one device's memory: those of a GPU, or all of a node."""
    if resources.device != "cuda":
        return max(1, ranks_per_node)
    return max(1, int(1 / resources.num_gpus)) if resources.num_gpus < 1 else 1


def _shard_and_measure(model: PreTrainedModel, config: PoolConfig) -> tuple[int, int]:
    """Leave ``model`` as one rank holds it; returns KV bytes per token and per slot of that rank."""
    size, backend = config.tensor_parallel_size, config.tensor_parallel_backend
    if size == 1 or backend == "transformers":
        if size > 1:
            shrink_to_shard(model, size, backend)
        return cache_bytes(example_cache(model))
    # AutoTP's shards do not run here; a rank has its part of the KV heads, which must divide.
    whole: list[Any] = example_cache(model).layers
    for layer in whole:
        layer.keys, layer.values = layer.keys[:, ::size], layer.values[:, ::size]
    shrink_to_shard(model, size, backend)
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    cache.layers = whole
    return cache_bytes(cache)


def _free_bytes(machine: Machine, resources: ActorResources, on_node: int, weights: int) -> int:
    """What is left for one rank when every rank beside it has loaded its weights, too."""
    if resources.device == "cuda":
        return machine.gpu_bytes // sharing(resources, on_node) - weights
    return machine.host_bytes // max(1, on_node) - PROCESS_BYTES - weights


def _refusal(memory: MemoryPlan) -> str | None:
    try:
        memory.check()
    except CapacityError as error:
        return str(error)
    return None
