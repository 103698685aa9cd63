"""The full tensors of a checkpoint, one after the other, as they would be loaded into a model.

What a shard is checked against: it is read from the safetensors files and never holds more than one
parameter, whatever the size of the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils.hub import cached_file

from rollout_pool.errors import ConfigError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass
class _Target:
    """What one parameter, or several that are made together, are made from."""

    converter: Any | None
    sources: list[tuple[str, str]] = field(default_factory=list)  # (name in the checkpoint, pattern)


class Checkpoint:
    """The safetensors files of the folder or name ``model``. Raises ConfigError where there are none."""

    def __init__(self, model: str) -> None:
        self._files = _files(model)
        """The file of every tensor, by the tensor's name."""

    def __len__(self) -> int:
        return len(self._files)

    def tensors(
        self, model: PreTrainedModel, dtypes: Mapping[str, torch.dtype]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in ``model``, full tensor on the CPU) of every tensor that ``model`` has a place for.

        model: may be a shard; only its names are used. dtypes: of its tensors, by name. Names and layouts
        that changed since the checkpoint was written (experts that are stacked, say) are converted as
        Transformers does when it loads. Tied tensors come once, under the name that the checkpoint has.
        """
        for name, target in self._targets(model, dtypes).items():
            yield from self._make(name, target, model, dtypes[name])

    def tensor(
        self, name: str, model: PreTrainedModel, dtypes: Mapping[str, torch.dtype]
    ) -> torch.Tensor | None:
        """One of :meth:`tensors`; None when the checkpoint does not have it."""
        target = self._targets(model, dtypes).get(name)
        made = {} if target is None else dict(self._make(name, target, model, dtypes[name]))
        return made.get(name)

    def _make(
        self, name: str, target: _Target, model: PreTrainedModel, dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if target.converter is None:
            (source, _), *_ = target.sources
            yield name, self._read(source).to(dtype)
            return
        converter = deepcopy(target.converter)
        for source, pattern in target.sources:
            converter.add_tensor(name, source, pattern, self._read(source).to(dtype))
        for made, tensor in converter.convert(name, model=model, config=model.config).items():
            yield made, tensor[0] if isinstance(tensor, list) else tensor

    def _targets(self, model: PreTrainedModel, dtypes: Mapping[str, torch.dtype]) -> dict[str, _Target]:
        mapping = get_model_conversion_mapping(model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        prefix, known = model.base_model_prefix, dict(dtypes)
        targets: dict[str, _Target] = {}
        for source in sorted(self._files, key=_natural):
            name, pattern = rename_source_key(source, renamings, converters, prefix, known)
            if name not in known and source in known:
                name, pattern = rename_source_key(source, [], [], prefix, known)
            if name in known:
                converter = None if pattern is None else by_pattern[pattern]
                targets.setdefault(name, _Target(converter)).sources.append((source, pattern or source))
        return targets

    def _read(self, name: str) -> torch.Tensor:
        with safe_open(self._files[name], framework="pt", device="cpu") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor


def _files(model: str) -> dict[str, Path]:
    index = cached_file(model, INDEX, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        names = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        paths = {part: _file(model, part) for part in set(names.values())}
        return {name: paths[part] for name, part in names.items()}
    path = _file(model, SINGLE)
    with safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys(), path)


def _file(model: str, name: str) -> Path:
    path = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    if path is None:
        raise ConfigError(f"{model} has no {name} to check its shards against")
    return Path(path)


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Experts and layers in the order of their numbers, which is the order in which they are stacked."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in name.split(".")]
