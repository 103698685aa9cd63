"""A checkpoint's model on torch's meta device: classes, shapes and dtypes, without memory or weights.

What is only planned is built from the same code as what is loaded, and its cache has the shapes of a real
prefill, so that a plan and an engine cannot disagree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import Cache, PreTrainedModel
from transformers.utils import logging as transformers_logging

from rollout_pool.actors.checkpoint_files import INDEX, SINGLE, refuse_unreadable
from rollout_pool.actors.loading import TORCH_DTYPES, has_softcap, load_config
from rollout_pool.actors.model_runner import ModelRunner
from rollout_pool.actors.splits import Skeleton, SplitRules
from rollout_pool.config import Dtype, TensorParallelBackend
from rollout_pool.errors import UnsupportedModelError, one_line

STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PROMPT_LENGTH = 6


def stored_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its name there, on the meta device, from the files' headers alone.

    Raises :class:`ConfigError` for files that cannot be read, and :class:`UnsupportedModelError` for a
    dtype that no causal LM is loaded from.
    """
    refuse_unreadable(folder)
    found: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        # With framework "pt" the whole file would count as memory that may be written.
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is no mapping)
                part = tensors.get_slice(name)
                dtype = STORED_DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise UnsupportedModelError(
                        f"cannot plan {str(folder)!r}: {name} is stored as {part.get_dtype()}; "
                        "give a checkpoint that is not quantised"
                    )
                found[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
    return found


def weight_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a readable checkpoint."""
    path = Path(folder)
    if (path / SINGLE).exists():
        return [path / SINGLE]
    places = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
    return [path / name for name in sorted(set(places.values()))]


def meta_model(
    folder: str | Path, stored: dict[str, torch.Tensor], *, dtype: Dtype, trust_remote_code: bool
) -> PreTrainedModel:
    """The model that an engine would load from ``folder``, in evaluation mode, on the meta device.

    stored: what :func:`stored_tensors` returned. Raises :class:`ConfigError` as loading would.
    """
    config = load_config(str(folder), trust_remote_code=trust_remote_code)
    kind = type(Skeleton.of(config).model)
    transformers_logging.disable_progress_bar()
    model: PreTrainedModel = kind.from_pretrained(
        None,
        config=config,
        state_dict=dict(stored),
        device_map="meta",
        dtype="auto" if dtype == "auto" else TORCH_DTYPES[dtype],
        attn_implementation="eager" if has_softcap(config.get_text_config()) else None,
    ).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the others look at values, or at dtypes of a GPU
    return model


def shrink_to_shard(model: PreTrainedModel, size: int, backend: TensorParallelBackend) -> None:
    """Give a meta model's parameters the shapes that one of ``size`` ranks holds.

    Whether the model can be split is for :func:`~rollout_pool.actors.sharding.refuse_unsplittable`. What
    AutoTP leaves runs no more: it cuts some layers by their inputs, and does not say which.
    """
    skeleton = Skeleton(type(model).__name__, model.config.get_text_config(decoder=True), model)
    if backend == "transformers":
        cuts = [
            (name, split.dim, split.length // size)
            for name, split in SplitRules.of_plan(skeleton).splits.items()
        ]
    else:
        splits = [split for split in SplitRules.of_auto_tp(skeleton).splits.values() if split.name]
        cuts = [(split.name, split.dim, split.length // size) for split in splits]
        cuts += _cut_head(model, size)
    done: dict[int, torch.nn.Parameter] = {}  # tied parameters are one, and stay so
    for name, dim, length in cuts:
        owner_name, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        whole = getattr(owner, leaf)
        if id(whole) not in done:
            shape = list(whole.shape)
            shape[dim] = length
            part = torch.empty(shape, dtype=whole.dtype, device="meta")
            done[id(whole)] = torch.nn.Parameter(part, requires_grad=False)
        setattr(owner, leaf, done[id(whole)])


def _cut_head(model: PreTrainedModel, size: int) -> list[tuple[str, int, int]]:
    """AutoTP cuts the head at its input, in a tensor of its own where it was tied."""
    head: Any = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
    name = next(name for name, module in model.named_modules() if module is head)
    return [(f"{name}.weight", 1, head.weight.shape[1] // size)]


def example_cache(model: PreTrainedModel) -> Cache:
    """The cache of a small prefill; its tensors are on the meta device.

    Raises :class:`UnsupportedModelError` for a model whose code looks at values, which are not there.
    """
    before = model.config.pad_token_id
    model.config.pad_token_id = None  # some models would look for it in the prompt
    runner = ModelRunner(model)
    prompt = torch.zeros(PROMPT_LENGTH, dtype=torch.long, device="meta")
    try:
        with runner.session():
            try:
                return runner.prefill(prompt).cache
            except RuntimeError:  # SDPA may look at what a mask holds
                model.set_attn_implementation("eager")
                return runner.prefill(prompt).cache
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be planned without its weights ({one_line(error, 200)}); start "
            "an engine, which tells its memory plan"
        ) from error
    finally:
        model.config.pad_token_id = before


def bytes_by_dtype(tensors: Iterator[torch.Tensor]) -> dict[str, int]:
    """How many bytes are of which dtype, largest first."""
    found: dict[str, int] = {}
    for tensor in tensors:
        name = str(tensor.dtype).removeprefix("torch.")
        found[name] = found.get(name, 0) + tensor.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))
