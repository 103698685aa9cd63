"""The configuration of one ``rollout-pool run``: a pool and the sampling of its prompts.

A file holds the keys of :class:`PoolConfig` and, under ``sampling``, those of
:class:`SamplingParams`. The command line overrides single keys by their path.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator

from rollout_pool.config import PoolConfig, read_yaml
from rollout_pool.errors import ConfigError
from rollout_pool.types import SamplingParams


class RunConfig(PoolConfig):
    """A :class:`PoolConfig` with the sampling that applies to every prompt without its own."""

    sampling: SamplingParams = Field(default_factory=SamplingParams)
    """Of every prompt that brings none of its own."""

    @field_validator("sampling", mode="before")
    @classmethod
    def _empty_sampling(cls, value: Any) -> Any:
        return {} if value is None else value

    @classmethod
    def load(cls, path: str | Path | None, overrides: Mapping[str, Any]) -> Self:
        """Read ``path`` (None: start from the defaults) and set ``overrides``, by dotted key.

        Raises :class:`ConfigError` with the full path of the key at fault.
        """
        values = {} if path is None else read_yaml(path)
        source = "the command line" if path is None else str(path)
        if not isinstance(values, dict):
            raise ConfigError(f"{source}: expected a mapping of keys, got {type(values).__name__}")
        for key, value in overrides.items():
            _set(values, key, value)
        if path is not None and overrides:
            source += f" with {', '.join(overrides)} from the command line"
        return cls.parse(values, source)

    @property
    def pool(self) -> PoolConfig:
        """The part that a pool is made from."""
        return PoolConfig(**{name: getattr(self, name) for name in PoolConfig.model_fields})

    def results_hash(self) -> str:
        """A hash of every key that all results depend on.

        Left out is what only says how the work is spread (actors, slots, cores): a run may be
        resumed on a pool of another size. Strict decoding fixes the shape of a step by its slots and
        ranks, so there they count.
        """
        is_strict = self.engine.deterministic == "strict"
        keys: dict[str, Any] = {
            "model": self.model,
            "tokenizer": self.tokenizer,
            "dtype": self.dtype,
            "seed": self.seed,
            "sampling": self.sampling.model_dump(mode="json"),
            "max_length": self.engine.max_length,
            "deterministic": self.engine.deterministic,
            "num_slots": self.engine.num_slots if is_strict else None,
        }
        if is_strict and self.tensor_parallel_size > 1:
            keys["tensor_parallel"] = [self.tensor_parallel_size, self.tensor_parallel_backend]
        return short_hash(keys)


def short_hash(value: Any) -> str:
    """16 hex digits of a hash over the canonical JSON of ``value``."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        # An empty section (`sampling:`) reads as None.
        inner = values.get(section) if values.get(section) is not None else {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{key}: {section} is not a section of the configuration")
        values[section] = dict(inner)
        values = values[section]
    values[last] = value
