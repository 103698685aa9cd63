"""What runs on the device for one engine: the model, the slot cache, and where every row stands.

A worker does as it is told and decides nothing. All it is told are numbers, so that the workers of a
tensor-parallel group can be told the same (:mod:`rollout_pool.actors.rank_worker`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from rollout_pool.actors.graphs import GraphedStep, Recorder
from rollout_pool.actors.kv_cache import STRICT_VIEW_STEP, VIEW_STEP, SlotCache
from rollout_pool.actors.memory import prefix_cache_tokens
from rollout_pool.actors.model_tensors import ModelTensors
from rollout_pool.actors.prefix_cache import PrefixCache
from rollout_pool.actors.served_model import ServedModel
from rollout_pool.actors.shared_prefixes import SharedPrefixes
from rollout_pool.actors.stored_weights import StoredWeights
from rollout_pool.config import EngineConfig
from rollout_pool.kernels import ops
from rollout_pool.types import TokenIds

Draw = Callable[[torch.Tensor], torch.Tensor]
"""From logits float32 ``[rows, vocab]``, which it may overwrite, to int64 ``[2, rows]``: the tokens drawn,
and 1 where the row goes on, 0 where it ended."""


UNSHARED = -2
"""In place of the number of a prompt that rows share."""


class StagedWeights(Protocol):
    """Weights that have been checked and wait to be written."""

    def commit(self, version: int) -> object:
        """Write those of this version into the model, in place."""


class Worker:
    """Runs prompts and rows of one model. Call it within ``runner.session()``."""

    def __init__(self, served: ServedModel, config: EngineConfig) -> None:
        self.runner = served.runner
        is_aligned, is_strict = config.layout == "aligned", config.deterministic == "strict"
        self.cache = SlotCache(
            served.example,
            config.num_slots,
            served.memory_plan.slot_length,
            is_aligned,
            STRICT_VIEW_STEP if is_strict else VIEW_STEP,
        )
        device = self.runner.device
        # A slot that is not live keeps harmless values: it writes column 0 of its own row.
        self.live = torch.zeros(config.num_slots, dtype=torch.int64, device=device)
        self.position = torch.zeros_like(self.live)  # column of the next write
        self.last_token = torch.zeros_like(self.live)
        self.prefixes = SharedPrefixes(config.num_slots, device, apart=is_strict)
        whole_only = is_strict or not self.runner.goes_on
        self.recent = PrefixCache(self.runner, prefix_cache_tokens(config), whole_only)
        self.weights: StagedWeights | None = None
        """What new weights are staged in, when this worker takes any."""
        self._borrowed = served.borrowed
        self._packed = served.packed
        if self._packed is not None:
            self._packed.make_ready(config.num_slots)
        self._stored: StoredWeights | None = None
        self.graphs: GraphedStep | None = None
        """Recordings of decode steps; see :meth:`record_steps`."""

    def record_steps(self, recorder: Recorder, draw_state: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Record decode steps from now on, and replay them. Only for layout ``ragged``.

        draw_state: the tensors that draws read or write. Whole steps are recorded: forward pass, draw,
        positions. Rows that are not live write their own slots' first column, so no padding row ever
        writes to a live one.
        """
        assert not self.cache.is_aligned, "its column is a number in Python, which a recording keeps for ever"
        model_tensors = ModelTensors(self.runner.model)

        def state() -> list[torch.Tensor]:
            return [self.live, self.position, self.last_token, *draw_state()]

        def weights() -> Iterable[torch.Tensor]:
            return chain(model_tensors(), self.cache.tensors())

        self.graphs = GraphedStep(recorder, weights, state)

    def prepare(self, num_rows: int, draw: Draw, kind: tuple[bool, ...]) -> None:
        """Record the step of one batch size before it is needed. No row may be live."""
        if self.graphs is not None:
            self.graphs.prepare({(num_rows, *kind): self._whole_step(num_rows, self.cache.length - 1, draw)})

    def prefill(self, group: int, tokens: Sequence[int] | TokenIds) -> int:
        """Compute a prompt and hold it under the number ``group``; below 0 it is of no use to later ones.

        Returns how many of its tokens had been computed before.
        """
        ids = np.asarray(tokens, dtype=np.int64)
        prefix, num_reused = self.recent.prefill(ids, keep=group >= 0)
        self.prefixes.hold(group, prefix)
        return num_reused

    def compute_ahead(self, prompts: Sequence[TokenIds]) -> None:
        """Prompts that are about to be computed, so that some may be computed together."""
        self.recent.compute_ahead(prompts)

    def seat(self, group: int, column: int, slots: Sequence[int], draw: Draw, shared: int = UNSHARED) -> None:
        """Copy the KV of a sequence into ``slots`` from ``column`` on, and draw their next tokens.

        shared: the number of its beginning, which these rows share with others. It is not copied.
        """
        prefix, at = self.prefixes[group], ops.upload(slots, self.runner.device)
        if shared != UNSHARED:
            self.prefixes.seat(shared, slots, at)
        self.cache.expand(prefix.cache, at, prefix.length, column, self.prefixes.length_at(slots[0]))
        self.position[at] = prefix.length
        self._accept(draw(prefix.logits.expand(len(slots), -1).clone()), at)

    def refill(self, group: int, column: int, slots: Sequence[int]) -> None:
        """Copy the KV of a sequence into ``slots`` that hold it already, made with other weights."""
        prefix, at = self.prefixes[group], ops.upload(slots, self.runner.device)
        self.cache.expand(prefix.cache, at, prefix.length, column, self.prefixes.length_at(slots[0]))

    def commit(self, version: int) -> None:
        """Write the staged weights of this version into the model, unless its trainer has."""
        weights = self.weights or self._borrowed
        assert weights is not None
        weights.commit(version)
        if self._packed is not None:
            self._packed.pack()
        self.recent.clear()

    def drop(self, group: int) -> None:
        """Nobody waits for the prompt any more; rows that share it keep it."""
        self.prefixes.drop(group)

    def decode(self, num_rows: int, column: int, draw: Draw, kind: tuple[bool, ...] = ()) -> None:
        """One token for each of the first ``num_rows`` slots.

        column: of the writes in layout ``aligned``; in ``ragged`` it bounds them. kind: what besides the
        number of rows decides which work ``draw`` does.
        """
        if self.graphs is None or self.prefixes.is_any:  # who shares changes from step to step
            self._whole_step(num_rows, column, draw)()
        else:  # a recording reads the cache to its end, or as far as the kernel finds cells to read
            self.graphs((num_rows, *kind), self._whole_step(num_rows, self.cache.length - 1, draw))

    def _whole_step(self, num_rows: int, column: int, draw: Draw) -> Callable[[], None]:
        rows = slice(0, num_rows)

        def step() -> None:
            shared = self.prefixes.step(num_rows, self.cache.addresses)
            tokens, positions = self.last_token[rows], self.position[rows]
            logits = self.runner.decode(self.cache, tokens, positions, column, shared)
            self.position[rows] += self.live[rows]
            self._accept(draw(logits), rows)

        return step

    def move(self, columns: int, moves: Sequence[tuple[int, int]]) -> None:
        """Move rows (source, target) with all they hold in ``columns``; sources are free afterwards."""
        device = self.runner.device
        source, target = (ops.upload(side, device) for side in zip(*moves, strict=True))
        self.cache.move(source, target, columns)
        ops.move_rows([self.live, self.position, self.last_token, self.prefixes.lengths], source, target)
        self.prefixes.move(moves)
        self._free(source)

    def trim(self, num_rows: int, columns: int, length: int) -> None:
        """Drop the first ``columns`` of ``length`` columns in use, in layout ``aligned``."""
        self.cache.trim(num_rows, columns, length)

    def free(self, slots: Sequence[int]) -> None:
        """These slots hold nobody any more."""
        self.prefixes.free(slots)
        self._free(ops.upload(slots, self.runner.device))

    def clear(self, slots: Sequence[int]) -> None:
        """Zero the cache of slots whose numbers broke."""
        self.cache.clear(ops.upload(slots, self.runner.device))

    def sleep(self, weights: bool = False) -> None:
        """Give the memory of the slots, of recorded steps and of ``weights`` back. No row may be live."""
        if weights and self._stored is None:
            self._stored = StoredWeights(self.runner.model)  # first: it fails when the disk is full
        if self.graphs is not None:
            self.graphs.invalidate()
        if self._packed is not None:
            self._packed.release()
        self.cache.release()
        self.prefixes.clear()
        self.recent.clear()

    def wake(self) -> None:
        """Take the memory again."""
        if self._stored is not None:
            self._stored.restore()
            self._stored = None
        if self._packed is not None:
            self._packed.pack()
        self.cache.restore()

    def close(self) -> None:
        """Nothing follows."""

    def _accept(self, drawn: torch.Tensor, slots: torch.Tensor | slice) -> None:
        self.last_token[slots], self.live[slots] = drawn[0], drawn[1]

    def _free(self, slots: torch.Tensor) -> None:
        for column in (self.live, self.position, self.last_token, self.prefixes.lengths):
            column[slots] = 0
