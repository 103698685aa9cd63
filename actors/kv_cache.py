"""The slot cache: one row of KV (or recurrent state) per slot, each at its own length.

Layout ``ragged``: a row's tokens start in column 0, so a cell's column is its position, and a freed
slot is used again by setting one number. Layout ``aligned``: all rows write the same column, and a row
of n tokens occupies the n columns before it. Layers take their shapes from the tensors of a real
prefill, never from configuration keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionLayer

from rollout_pool.errors import UnsupportedModelError
from rollout_pool.kernels import ops

VIEW_STEP = 16
"""Attention reads the cache up to a multiple of this many columns."""
STRICT_VIEW_STEP = ops.ATTENTION_BLOCK
"""The same where the bits of a row must not depend on how long the others are."""


class DecodeStep:
    """What all layers share during one decode step: which rows run, where each writes, what each sees."""

    def __init__(
        self, positions: torch.Tensor, write_column: torch.Tensor, columns: int, cache_length: int
    ) -> None:
        self.positions = positions  # int64 [rows]; the query's position in its row
        self.rows = positions.shape[0]
        self.starts = write_column - positions  # int64 [rows]; column of the row's first token
        self.columns = columns
        self._write_column = write_column  # int64 [rows]
        self._cache_length = cache_length
        self._cells: dict[int, torch.Tensor] = {}

    def cells(self, kv_heads: int) -> torch.Tensor:
        """Index of every ``head_dim`` vector written in this step: int64 ``[rows * kv_heads]``."""
        if kv_heads not in self._cells:
            vectors = torch.arange(self.rows * kv_heads, device=self.positions.device)
            first = vectors.view(self.rows, kv_heads) * self._cache_length
            self._cells[kv_heads] = (first + self._write_column.unsqueeze(1)).flatten()
        return self._cells[kv_heads]

    def token_mask(self) -> torch.Tensor:
        """Where the rows have tokens, the new one included, as models take it: int64 ``[rows, columns]``."""
        columns = torch.arange(self.columns, device=self.positions.device)
        return (columns >= self.starts.unsqueeze(1)).to(torch.int64)


class _Stepping:
    """The step that is running; set by the cache, read by its layers."""

    step: DecodeStep
    first_position: torch.Tensor | int = 0
    """Of column 0 in each row: int64 ``[rows, 1, 1, 1]``, or 0 for all."""
    query_offset: torch.Tensor | int = 0
    """Position of each row's query, or one column for all."""


class SlotKVLayer(CacheLayerMixin):
    """Keys and values of one attention layer: ``[slots, kv_heads, length, head_dim]``."""

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, like: DynamicLayer, num_slots: int, length: int, clock: _Stepping) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock = clock
        self.keys = _rows_like(like.keys, num_slots, length)
        self.values = _rows_like(like.values, num_slots, length)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the shapes came with the prefill."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token per row at its position; return views of the rows and columns in use."""
        step = self._clock.step
        cells = step.cells(key_states.shape[1])
        # Under autocast a projection may come in another dtype than the prefill's.
        new_keys, new_values = key_states.to(self.keys.dtype), value_states.to(self.values.dtype)
        ops.write_kv(self.keys, self.values, new_keys, new_values, cells)
        return self.keys[: step.rows, :, : step.columns], self.values[: step.rows, :, : step.columns]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor whose first dimension is the slot."""
        yield self.keys
        yield self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """Columns that attention reads in this step, and the position of column 0 in every row."""
        return self._clock.step.columns, self._clock.first_position

    def get_seq_length(self) -> int:
        """Columns that attention reads; rows differ, and positions are always given explicitly."""
        return self._clock.step.columns - 1

    def get_max_length(self) -> int:
        """Cells per slot."""
        return int(self.keys.shape[2])


class SlotStateLayer(LinearAttentionLayer):
    """Convolution and recurrent states of one linear-attention layer: ``[slots, ...]`` each."""

    def __init__(self, like: LinearAttentionLayer, num_slots: int) -> None:
        super().__init__(number_of_states=like.number_of_states)
        self.device, self.dtype = like.device, like.dtype
        self.conv_kernel_size = dict(like.conv_kernel_size)
        self._conv = {i: _states_like(state, num_slots) for i, state in like.conv_states.items()}
        self._recurrent = {i: _states_like(state, num_slots) for i, state in like.recurrent_states.items()}
        self.is_conv_states_initialized = {i: s is not None for i, s in self._conv.items()}
        self.is_recurrent_states_initialized = {i: s is not None for i, s in self._recurrent.items()}
        self.has_previous_state = dict.fromkeys(self._conv, True)

    def begin(self, rows: int) -> None:
        """Show the model the states of the first ``rows`` slots; it updates them in place."""
        self.conv_states = {i: None if s is None else s[:rows] for i, s in self._conv.items()}
        self.recurrent_states = {i: None if s is None else s[:rows] for i, s in self._recurrent.items()}

    def expand(self, prefix: Any, slots: torch.Tensor) -> None:
        """Copy a prompt's final states into ``slots``."""
        for mine, theirs in ((self._conv, prefix.conv_states), (self._recurrent, prefix.recurrent_states)):
            for i, state in mine.items():
                if state is not None:
                    state[slots] = theirs[i]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor whose first dimension is the slot."""
        for states in (self._conv, self._recurrent):
            yield from (state for state in states.values() if state is not None)


class SlotCache(Cache):
    """A Transformers cache of ``num_slots`` rows for decoding one token per row and step."""

    def __init__(
        self,
        prefill: Cache,
        num_slots: int,
        length: int,
        is_aligned: bool = False,
        view_step: int = VIEW_STEP,
    ) -> None:
        """prefill: the cache of any finished prefill; only shapes, dtypes and devices are taken."""
        self.is_aligned = is_aligned
        self._view_step = view_step
        self._clock = _Stepping()
        self.length = length
        self._kv: dict[int, SlotKVLayer] = {}
        self._states: dict[int, SlotStateLayer] = {}
        layers: list[Any] = list(prefill.layers)
        for index, like in enumerate(layers):
            kind = type(like).__name__
            if kind in ("DynamicLayer", "DynamicSlidingWindowLayer") and getattr(
                like, "is_initialized", False
            ):
                layers[index] = self._kv[index] = SlotKVLayer(like, num_slots, length, self._clock)
            elif kind == "LinearAttentionLayer":
                layers[index] = self._states[index] = SlotStateLayer(like, num_slots)
            elif kind != "DummyLayer":  # a layer that keeps no state; not in all supported versions
                raise UnsupportedModelError(f"its cache has layers of type {kind}, which slots cannot hold")
        super().__init__(layers=layers)

    def begin(
        self,
        positions: torch.Tensor,
        column: int,
        by_mask: bool = False,
        before: torch.Tensor | None = None,
    ) -> None:
        """Start a step of rows whose queries stand at ``positions``, int64 ``[rows]``.

        Ragged: every row writes the column of its position, and ``column`` bounds them all. ``before``: int64
        ``[rows]``, how many of each row's first tokens are not in its slot. Aligned: all rows write
        ``column``. ``by_mask``: the model takes a mask of tokens and derives positions from it, as
        it does for left-padded batches; else :func:`rollout_pool.actors.attention.row_mask` has them.
        """
        clock = self._clock
        if self.is_aligned:
            front = torch.full_like(positions, column)
            clock.step = DecodeStep(positions, front, column + 1, self.length)
            clock.first_position = 0 if by_mask else -clock.step.starts.view(-1, 1, 1, 1)
        else:
            columns = min(self.length, -(-(column + 1) // self._view_step) * self._view_step)
            write = positions if before is None else positions - before
            clock.step = DecodeStep(positions, write, columns, self.length)
            clock.first_position = 0 if before is None else before.view(-1, 1, 1, 1)
        clock.query_offset = column if by_mask else positions
        for layer in self._states.values():
            layer.begin(positions.shape[0])

    def token_mask(self) -> torch.Tensor:
        """See :meth:`DecodeStep.token_mask`."""
        return self._clock.step.token_mask()

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Position of every row's query ``[rows]``, or the column that all of them write."""
        return self._clock.query_offset

    def trim(self, num_rows: int, columns: int, length: int) -> None:
        """Drop the first ``columns`` of ``length`` columns in use; the first rows shift to the left."""
        kv = [tensor[:num_rows] for layer in self._kv.values() for tensor in layer.tensors()]
        ops.trim_kv(kv, columns, length)

    def expand(self, prefix: Cache, slots: torch.Tensor, length: int, column: int = 0, skip: int = 0) -> None:
        """Copy a prompt of ``length`` tokens, but for its first ``skip``, into ``slots``, from ``column`` on.

        A sliding layer kept only its last cells, which go where they belong; the cells before them are
        outside the window for good. Layers that start in the same column are copied in one call.
        """
        sources: list[Any] = prefix.layers
        copies: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for index, layer in self._kv.items() if skip < length else ():
            source = sources[index]
            first = length - source.keys.shape[2]  # position of the first cell there is
            start = max(first, skip)
            caches, prefixes = copies.setdefault(column + start - skip, ([], []))
            caches += (layer.keys, layer.values)
            prefixes += (source.keys[:, :, start - first :], source.values[:, :, start - first :])
        for start, (caches, prefixes) in copies.items():
            ops.expand_kv(caches, prefixes, slots, start)
            for cache in caches if start > column else ():
                # Masked for good, so whatever a free row left there must be finite.
                cache[slots, :, column:start] = 0
        for index, states in self._states.items():
            states.expand(sources[index], slots)

    def addresses(self) -> dict[int, int]:
        """Where each attention layer's keys begin in memory now, by the layer's index."""
        return {index: layer.keys.data_ptr() for index, layer in self._kv.items()}

    def move(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """Move rows with all they hold; ``length`` bounds the cells in use."""
        kv = [tensor for layer in self._kv.values() for tensor in layer.tensors()]
        states = [tensor for layer in self._states.values() for tensor in layer.tensors()]
        ops.compact_kv(kv, source, target, length)
        ops.move_rows(states, source, target)

    def clear(self, slots: torch.Tensor) -> None:
        """Zero whole rows. A row that held nan must not be used again before: ``0 * nan`` is nan."""
        for tensor in self.tensors():
            tensor[slots] = 0

    def release(self) -> None:
        """Give the memory of all slots back; :meth:`restore` takes it again."""
        for tensor in self.tensors():
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take the memory of all slots again; they are empty."""
        for tensor in self.tensors():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            tensor.zero_()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of the cache; the first dimension of each is the slot."""
        for layer in self._kv.values():
            yield from layer.tensors()
        for states in self._states.values():
            yield from states.tensors()


def cache_bytes(prefill: Cache) -> tuple[int, int]:
    """Bytes that one slot takes per token of length, and besides, as a prefill's tensors show."""
    slot = SlotCache(prefill, num_slots=1, length=1)
    per_token = sum(tensor.nbytes for layer in slot._kv.values() for tensor in layer.tensors())
    return per_token, sum(tensor.nbytes for layer in slot._states.values() for tensor in layer.tensors())


def _rows_like(tensor: Any, num_slots: int, length: int) -> torch.Tensor:
    _, kv_heads, _, head_dim = tensor.shape
    return torch.zeros(num_slots, kv_heads, length, head_dim, dtype=tensor.dtype, device=tensor.device)


def _states_like(state: torch.Tensor | None, num_slots: int) -> torch.Tensor | None:
    if state is None:
        return None
    return torch.zeros(num_slots, *state.shape[1:], dtype=state.dtype, device=state.device)
