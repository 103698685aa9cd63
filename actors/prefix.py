"""A prompt that has been computed."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

UNBOUNDED = 1 << 62


@dataclass(frozen=True)
class Prefix:
    """A prompt that has been computed: its cache, and the logits of its next token.

    Nothing writes into the tensors of its cache; who goes on from it makes new ones.
    """

    cache: Cache
    logits: torch.Tensor  # float32 [1, vocab]
    length: int

    def layer(self, index: int) -> Any:
        """One layer of the cache. A sliding layer has only its last cells."""
        return self.cache.layers[index]

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values, as they lie in memory: a sliding layer's are a view of all cells."""
        tensors = (getattr(layer, name, None) for layer in self.cache.layers for name in ("keys", "values"))
        storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def row_of(batch: Cache, row: int, length: int) -> Cache:
    """One row of a cache of several, its first ``length`` columns, in memory of its own."""
    cache = first_columns(batch, length)
    layers: list[Any] = cache.layers
    for layer in layers:
        layer.keys, layer.values = (one[row : row + 1].clone() for one in (layer.keys, layer.values))
    return cache


def repeated(whole: Cache, rows: int) -> Cache:
    """A cache of one row as one of several; its tensors are views, and who goes on makes new ones."""
    layers = [copy.copy(layer) for layer in whole.layers]
    for layer in layers:
        mine: Any = layer
        mine.keys, mine.values = (one.expand(rows, -1, -1, -1) for one in (mine.keys, mine.values))
    cache = copy.copy(whole)
    cache.layers = layers
    return cache


def first_columns(whole: Cache, length: int) -> Cache:
    """A cache of the first ``length`` columns of another; its tensors are views."""
    layers = []
    for layer in whole.layers:
        mine: Any = copy.copy(layer)
        mine.keys, mine.values = mine.keys[:, :, :length], mine.values[:, :, :length]
        if type(layer) is DynamicSlidingWindowLayer:
            mine.cumulative_length = length
        layers.append(mine)
    cache = copy.copy(whole)
    cache.layers = layers
    return cache


def longest_row(cache: Cache) -> int:
    """Tokens of the longest row that :func:`row_of` can take out of a cache like this one; 0: of none.

    A recurrent state goes on to the end of the longest row, and a window drops what a shorter row needs.
    """
    longest = UNBOUNDED
    for layer in cache.layers:
        if type(layer) is DynamicSlidingWindowLayer:
            longest = min(longest, layer.sliding_window - 1)
        elif type(layer) is not DynamicLayer:
            return 0
    return longest
