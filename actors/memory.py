"""How much memory an engine will take, said before it takes it."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from rollout_pool.actors.zero3 import full_bytes, held_bytes, is_partitioned
from rollout_pool.config import EngineConfig
from rollout_pool.errors import CapacityError

_GIB = 1 << 30
_RESERVE = 0.1
"""Share of the free memory left for activations and everything else."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one engine: the model's weights (loaded already) and the KV of all slots."""

    weight_bytes: int
    bytes_per_token: int
    bytes_per_slot: int
    """Of a slot at its full length: its tokens, and its recurrent states."""
    num_slots: int
    max_length: int
    free_bytes: int
    device: str
    prefix_tokens: int = 0
    """Of recent prompts whose KV is kept."""
    gather_bytes: int = 0
    """Of the whole model, where ZeRO-3's parts come together for a rollout."""

    @property
    def kv_bytes(self) -> int:
        """KV of all slots, of one prompt whose samples wait for a slot, and of recent prompts."""
        return self.bytes_per_slot * (self.num_slots + 1) + self.prefix_bytes

    @property
    def prefix_bytes(self) -> int:
        """KV of recent prompts."""
        return self.bytes_per_token * self.prefix_tokens

    def check(self) -> None:
        """Raise :class:`CapacityError` when the slots do not fit into the free memory."""
        usable = int(self.free_bytes * (1 - _RESERVE)) - self.gather_bytes
        if usable < 0:
            raise CapacityError(
                f"the whole model takes {_gib(self.gather_bytes)} on {self.device}, of which "
                f"{_gib(self.free_bytes)} are free: set engine.zero3_gather to 'layers'"
            )
        if self.kv_bytes <= usable:
            return
        for_slots = max(0, usable - self.prefix_bytes)
        slots = max(0, for_slots // self.bytes_per_slot - 1)
        length = for_slots // ((self.num_slots + 1) * max(1, self.bytes_per_token))
        ways = [f"engine.num_slots to at most {slots}"] if slots else []
        ways += [f"engine.max_length to at most {length}"] if length >= 2 else []
        remedy = "lower " + " or ".join(ways) if ways else "lower both, or use a machine with more memory"
        raise CapacityError(
            f"engine.num_slots {self.num_slots} x engine.max_length {self.max_length} needs "
            f"{_gib(self.kv_bytes)} of KV memory on {self.device}, {_gib(usable)} of "
            f"{_gib(self.free_bytes)} free is usable; {remedy}"
        )

    def describe(self) -> str:
        """One line for a person."""
        return (
            f"weights {_gib(self.weight_bytes)}, KV {self.num_slots} slots x {self.max_length} tokens x "
            f"{self.bytes_per_token:,} B = {_gib(self.kv_bytes)} at most, on {self.device}"
        )


def plan_memory(
    model: torch.nn.Module, config: EngineConfig, per_token: int, per_slot: int, device: torch.device
) -> MemoryPlan:
    """The plan for a loaded model whose cache takes ``per_token`` and ``per_slot`` bytes."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    is_gathered = config.zero3_gather == "whole" and is_partitioned(model)
    return MemoryPlan(
        weight_bytes=sum(map(held_bytes, model.parameters())),
        bytes_per_token=per_token,
        bytes_per_slot=per_token * config.max_length + per_slot,
        num_slots=config.num_slots,
        max_length=config.max_length,
        prefix_tokens=prefix_cache_tokens(config),
        free_bytes=int(free),
        device=str(device),
        gather_bytes=sum(map(full_bytes, model.parameters())) if is_gathered else 0,
    )


def prefix_cache_tokens(config: EngineConfig) -> int:
    """How many tokens of recent prompts an engine keeps."""
    if config.prefix == "off":
        return 0
    return 2 * config.max_length if config.prefix_cache_tokens is None else config.prefix_cache_tokens


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
