"""A prompt that has been computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache


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
