"""What a pool remembers when its process is killed and Ray starts another: kept in Ray's own store.

A new process starts from the checkpoint. It must know that it is not the first, or it would draw once more
what its predecessor drew; and that there had been newer weights, or it would serve the old ones in silence.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Protocol

import ray
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

NAMESPACE = b"rollout-pool"
CALLS_PER_PROCESS = 1 << 32
"""A pool whose process is killed goes on numbering its calls above any number that was used: the seeds of
calls that bring none come from it."""


@dataclass(frozen=True, slots=True)
class PoolPast:
    """What was before this process, or is to be told to the next."""

    num_starts: int = 0
    """Processes of this pool so far."""
    weight_version: int = 0
    """Of the last weights that it was to have; 0: those that actors load."""
    is_full: bool = False
    """Whether any update so far was more than adapters."""
    is_closed: bool = False
    """It was shut down."""

    @property
    def first_call(self) -> int:
        """The number of the first call of the process that started last."""
        return max(0, self.num_starts - 1) * CALLS_PER_PROCESS


class PoolMemory(Protocol):
    """Where a pool's past is kept."""

    def read(self) -> PoolPast:
        """Nothing, in the first process."""

    def write(self, past: PoolPast) -> None:
        """It is kept when this returns, which may take a while."""


def one_more_start(memory: PoolMemory | None) -> PoolPast:
    """What was before, this process counted; the next one will be told."""
    past = memory.read() if memory is not None else PoolPast()
    past = dataclasses.replace(past, num_starts=past.num_starts + 1)
    if memory is not None:
        memory.write(past)
    return past


class RayMemory:
    """In Ray's key-value store, under the pool's id as an actor, which does not change with its process."""

    def read(self) -> PoolPast:
        kept = _internal_kv_get(_key(), namespace=NAMESPACE)
        return PoolPast(**json.loads(kept)) if kept else PoolPast()

    def write(self, past: PoolPast) -> None:
        _internal_kv_put(_key(), json.dumps(dataclasses.asdict(past)), namespace=NAMESPACE)


def _key() -> str:
    return str(ray.get_runtime_context().get_actor_id())
