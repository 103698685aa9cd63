"""How much memory an engine will take, said before it takes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import psutil
import torch

from rollout_pool.actors.zero3 import full_bytes, held_bytes, is_partitioned
from rollout_pool.config import EngineConfig
from rollout_pool.errors import CapacityError

_GIB = 1 << 30
_RESERVE = 0.1
"""Share of the free memory left for activations and everything else."""
ROWS_PER_PROMPT = 8
"""Unless the configuration says otherwise, prompts are expected to be shared by so many rows each."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one engine: the model's weights (loaded, and packed copies) and the KV of all slots."""

    weight_bytes: int
    bytes_per_token: int
    bytes_per_slot: int
    """Of a slot at its full length: its tokens, and its recurrent states."""
    num_slots: int
    max_length: int
    slot_length: int
    """Tokens that a slot has room for."""
    free_bytes: int
    device: str
    prefix_tokens: int = 0
    """Of recent prompts whose KV is kept."""
    gather_bytes: int = 0
    """Of the whole model, where ZeRO-3's parts come together for a rollout."""
    sharing: Literal["never", "optional", "needed"] = "never"
    """Whether rows share prompts: at most where memory is left for it, or because slots have no room for
    prompts, or because it is asked for."""
    asked_prompt_tokens: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Of the prompts that rows may share at the same time."""
        if self.sharing == "never":
            return 0
        usual = self.num_slots // ROWS_PER_PROMPT * self.max_length
        if self.sharing == "needed":
            return self.asked_prompt_tokens or max(2 * self.max_length, usual)
        left = (self._usable - self._fixed_bytes) // max(1, self.bytes_per_token)
        return max(0, min(left, self.asked_prompt_tokens or usual))

    @property
    def kv_bytes(self) -> int:
        """KV of all slots, of one prompt whose samples wait for a slot, of shared and of recent prompts."""
        return self._fixed_bytes + self.prompt_bytes

    @property
    def prompt_bytes(self) -> int:
        """KV of the prompts that rows share."""
        return self.bytes_per_token * self.prompt_tokens

    @property
    def _fixed_bytes(self) -> int:
        held = self.bytes_per_slot + self.bytes_per_token * (self.max_length - self.slot_length)
        return self.bytes_per_slot * self.num_slots + held + self.prefix_bytes

    @property
    def _usable(self) -> int:
        return int(self.free_bytes * (1 - _RESERVE)) - self.gather_bytes

    @property
    def prefix_bytes(self) -> int:
        """KV of recent prompts."""
        return self.bytes_per_token * self.prefix_tokens

    def check(self) -> None:
        """Raise :class:`CapacityError` when the slots do not fit into the free memory."""
        usable = self._usable
        if usable < 0:
            raise CapacityError(
                f"the whole model takes {_gib(self.gather_bytes)} on {self.device}, of which "
                f"{_gib(self.free_bytes)} are free: set engine.zero3_gather to 'layers'"
            )
        if self.kv_bytes <= usable:
            return
        slots, length = self._slots_that_fit(), self._length_that_fits()
        ways = [f"engine.num_slots to at most {slots}"] if slots else []
        ways += [f"engine.max_length to at most {length}"] if length >= 2 else []
        if self.slot_length < self.max_length:
            ways.append(f"engine.max_new_tokens from {self.slot_length}")
        ways += ["engine.prompt_tokens"] if self.sharing == "needed" else []
        remedy = "lower " + " or ".join(ways) if ways else "lower both, or use a machine with more memory"
        raise CapacityError(
            f"engine.num_slots {self.num_slots} x engine.max_length {self.max_length} needs "
            f"{_gib(self.kv_bytes)} of KV memory on {self.device}, {_gib(usable)} of "
            f"{_gib(self.free_bytes)} free is usable; {remedy}"
        )

    def _slots_that_fit(self) -> int:
        """The largest number of slots that fit; 0: none."""
        low, high = 0, self.num_slots
        while low < high:
            middle = (low + high + 1) // 2
            fits = replace(self, num_slots=middle).kv_bytes <= self._usable
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _length_that_fits(self) -> int:
        """The largest ``max_length`` that fits, when slots are as long; 0 when they are not."""
        if self.slot_length < self.max_length:
            return 0
        rows = self.num_slots + 1
        if self.sharing == "needed" and self.asked_prompt_tokens is None:
            rows += max(2, self.num_slots // ROWS_PER_PROMPT)
        asked = self.asked_prompt_tokens or 0 if self.sharing == "needed" else 0
        room = self._usable - self.prefix_bytes - asked * self.bytes_per_token
        return max(0, room) // (rows * max(1, self.bytes_per_token))

    def describe(self) -> str:
        """One line for a person."""
        slots = f"{self.num_slots} slots x {self.slot_length} tokens"
        slots += f" and {self.prompt_tokens} of shared prompts" if self.prompt_tokens else ""
        return (
            f"weights {_gib(self.weight_bytes)}, KV {slots} x "
            f"{self.bytes_per_token:,} B = {_gib(self.kv_bytes)} at most, on {self.device}"
        )


def plan_memory(
    model: torch.nn.Module,
    config: EngineConfig,
    per_token: int,
    per_slot: int,
    device: torch.device,
    can_share: bool = True,
) -> MemoryPlan:
    """The plan for a loaded model whose cache takes ``per_token`` and ``per_slot`` bytes.

    can_share: whether its rows can share their prompt's KV.
    """
    shares = can_share and config.may_share_prompts
    slot_length = min(config.max_new_tokens or config.max_length, config.max_length)
    slot_length = slot_length if shares else config.max_length
    is_needed = config.prefix == "shared" or slot_length < config.max_length
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    is_gathered = config.zero3_gather == "whole" and is_partitioned(model)
    return MemoryPlan(
        weight_bytes=sum(map(held_bytes, model.parameters())),
        bytes_per_token=per_token,
        bytes_per_slot=per_token * slot_length + per_slot,
        num_slots=config.num_slots,
        max_length=config.max_length,
        slot_length=slot_length,
        sharing=("needed" if is_needed else "optional") if shares else "never",
        asked_prompt_tokens=config.prompt_tokens,
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
