"""The tensors of a safetensors checkpoint, one at a time, under the names of the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from rollout_pool.actors.checkpoint import Checkpoint
from rollout_pool.errors import ConfigError


def checkpoint_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of a file as they are, or of a folder with ``config.json`` as the model has them.

    A folder may hold one file or an index of several. Names and layouts that a checkpoint has for
    historical reasons are converted as Transformers does when it loads. Raises :class:`ConfigError`.
    """
    path = path.expanduser()
    try:
        if path.is_dir():
            yield from _of_folder(path)
        elif path.is_file():
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118  # it is no mapping
                    yield name, file.get_tensor(name)
        else:
            raise ConfigError(f"{path} is neither a folder nor a file")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read weights from {path}: {' '.join(str(error).split())}") from error


def _of_folder(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json, from which the names of its weights are known")
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    yield from Checkpoint(str(path)).tensors(model, {name: tensor.dtype for name, tensor in named.items()})
