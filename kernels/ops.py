"""The kernels that the engine calls: on a GPU the Triton form, elsewhere the torch reference.

Both forms of a kernel have one name, one signature and one meaning: the reference's docstring holds for
both. Triton is imported when a tensor on a GPU first asks for it, so a machine without Triton runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch

from rollout_pool.kernels import counter_hash, prefix_reference, reference, sampling_reference
from rollout_pool.kernels.counter_hash import sample_key, vocabulary_hash
from rollout_pool.kernels.prefix_reference import BLOCK as ATTENTION_BLOCK
from rollout_pool.kernels.prefix_reference import PrefixRows, Prior
from rollout_pool.kernels.reference import upload
from rollout_pool.kernels.sampling_reference import SamplingRows

P = ParamSpec("P")
R = TypeVar("R")


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether work on ``tensor`` is done by Triton; a GPU without Triton runs the references."""
    return tensor.is_cuda and _has_triton()


def _by_device(reference_form: Callable[P, R], module: str) -> Callable[P, R]:
    """``reference_form``, or on a GPU the function of the same name in ``module``."""

    @cache
    def triton_form() -> Callable[P, R]:
        form: Callable[P, R] = getattr(
            import_module(f"rollout_pool.kernels.{module}"), reference_form.__name__
        )
        return form

    @wraps(reference_form)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = next(iter((*args, *kwargs.values())))  # a tensor, or a sequence of them
        tensor = first if isinstance(first, torch.Tensor) else next(iter(first), None)
        chosen = triton_form() if tensor is not None and uses_triton(tensor) else reference_form
        return chosen(*args, **kwargs)

    return call


expand_kv = _by_device(reference.expand_kv, "cache_triton")
expand_in_place = _by_device(reference.expand_in_place, "cache_triton")
compact_kv = _by_device(reference.compact_kv, "cache_triton")
move_rows = _by_device(reference.move_rows, "cache_triton")
trim_kv = _by_device(reference.trim_kv, "cache_triton")
write_kv = _by_device(reference.write_kv, "cache_triton")
decode_attention = _by_device(reference.decode_attention, "attention_triton")
prefix_attention = _by_device(prefix_reference.prefix_attention, "prefix_attention_triton")
position_keys = _by_device(counter_hash.position_keys, "counter_hash_triton")
sample_tokens = _by_device(sampling_reference.sample_tokens, "sampling_triton")

__all__ = [
    "ATTENTION_BLOCK",
    "PrefixRows",
    "Prior",
    "SamplingRows",
    "compact_kv",
    "decode_attention",
    "expand_in_place",
    "expand_kv",
    "move_rows",
    "position_keys",
    "prefix_attention",
    "sample_key",
    "sample_tokens",
    "trim_kv",
    "upload",
    "uses_triton",
    "vocabulary_hash",
    "write_kv",
]
