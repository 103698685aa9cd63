"""When memory runs out in the middle of a step: all rows get up, and fewer sit down again.

What a step has half done is dropped with its batch. Samples keep what they have drawn and go on from there,
as resumed ones do, so they draw the same tokens.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import torch

from rollout_pool.actors.batch import Batch
from rollout_pool.actors.running import Running
from rollout_pool.config import EngineConfig
from rollout_pool.errors import one_line

logger = logging.getLogger(__name__)

STRICT_TRIES = 3
"""Steps in a row without memory after which a strict batch gives its groups up."""

_ON_CPU = "DefaultCPUAllocator: can't allocate memory"
"""How torch words it where it has no class for it."""


class ElasticBatch:
    """A batch, and the smaller one that takes its place when memory runs out.

    new_batch: makes one. is_split: one rank alone cannot go on with fewer rows than the others, so that a
    shortage is raised, and ends them all. on_failed: gets groups that no smaller batch helps, and why they
    fail.
    """

    def __init__(
        self,
        new_batch: Callable[[EngineConfig], Batch],
        config: EngineConfig,
        is_split: bool,
        on_failed: Callable[[Running, str], None],
    ) -> None:
        self.batch = new_batch(config)
        self._new_batch = new_batch
        self._config = config
        self._is_strict = config.deterministic == "strict"
        self._is_split = is_split
        self._on_failed = on_failed
        self._in_a_row = 0

    def advance(self) -> None:
        """See :meth:`Batch.advance`."""
        shortage = None
        try:
            self.batch.advance()
            self._in_a_row = 0
        except (RuntimeError, MemoryError) as error:
            shortage = self._as_shortage(error)
        if shortage is not None:  # out here the error is gone, and with it what its frames held
            self._go_on_smaller(shortage)

    def update_weights(self, version: int, recompute: bool) -> None:
        """See :meth:`Batch.update_weights`."""
        shortage = None
        try:
            self.batch.update_weights(version, recompute)
        except (RuntimeError, MemoryError) as error:
            if self.batch.versions.current < version:
                raise  # nothing is known about what was written
            shortage = self._as_shortage(error)
        if shortage is not None:
            self._go_on_smaller(shortage)

    def _as_shortage(self, error: RuntimeError | MemoryError) -> str:
        """One line for an error that a smaller batch may be spared; raises any other."""
        if self._is_split or not is_out_of_memory(error):
            raise error
        return one_line(error)

    def _go_on_smaller(self, reason: str) -> None:
        """Replace the batch; its groups go on, or fail when no smaller one is possible.

        Strict batches keep their size, since the bits of a result depend on it: they try again, as the memory
        may have been in pieces.
        """
        before, config = self.batch, self.batch.config
        self._in_a_row += 1
        seated, waiting = before.evict()
        free_memory(before.worker.runner.device)
        is_last = self._in_a_row >= STRICT_TRIES if self._is_strict else config.num_slots == 1
        # When one slot was too many for some group, the next may do with all of them.
        num_slots = config.num_slots if self._is_strict else config.num_slots // 2 or self._config.num_slots
        logger.warning(
            "out of memory with %d slots, going on with %d: %s", config.num_slots, num_slots, reason
        )
        self.batch = self._new_batch(config.model_copy(update={"num_slots": num_slots}))
        self.batch.follow(before)
        for running in waiting if is_last else [*seated, *waiting]:
            self.batch.add(running)
        for running in seated if is_last else ():
            self._on_failed(running, _no_way_out(running, reason))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of a GPU or of the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _ON_CPU in str(error)


def free_memory(device: torch.device) -> None:
    """Give back what is not in use: what a failed step held may be part of a cycle, or of torch's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _no_way_out(running: Running, reason: str) -> str:
    params = running.request.sampling
    return (
        f"out of memory at its prompt of {running.prompt.size} tokens with up to {params.max_new_tokens} new "
        f"ones: shorten them, or lower engine.num_slots or engine.max_length ({reason})"
    )
