"""The nouns of the check: a part is a list of steps, a step gives rows of the table."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Row:
    """One line of the table. ``holds``: whether a claim was seen to be true; None for a figure."""

    what: str
    seen: str
    holds: bool | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    """The same in numbers, for the JSON file."""


@dataclass(frozen=True)
class Step:
    """A piece of a part that runs, fails and is skipped by itself."""

    name: str
    run: Callable[[], list[Row]]


@dataclass(frozen=True)
class Setting:
    """Where and how the steps run."""

    device: torch.device
    is_dry: bool
    """On the CPU, with tiny sizes, kernels in Triton's interpreter: to run the flow, not to measure."""
    seed: int

    def seed_of(self, name: str) -> int:
        """A seed of this name's own, so that a step draws the same whatever ran before it."""
        digest = hashlib.blake2b(f"{self.seed}|{name}".encode(), digest_size=6).digest()
        return int.from_bytes(digest, "little")

    def random(self, name: str) -> random.Random:
        return random.Random(self.seed_of(name))


@dataclass(frozen=True)
class Part:
    """One of the parts a to e. A failed claim of a deciding part is a failure of the whole check."""

    letter: str
    title: str
    module: str
    """Its ``steps(setting)`` lists the steps."""
    seconds: float
    """The share of the time that the part may take, with the start of its process."""
    packages: tuple[str, ...]
    decides: bool = False

    def steps(self, setting: Setting) -> list[Step]:
        steps: list[Step] = import_module(self.module).steps(setting)
        return steps


_KERNELS = ("torch", "triton", "numpy")
_ENGINE = (*_KERNELS, "transformers", "pydantic", "psutil")
PARTS = {
    part.letter: part
    for part in (
        Part("a", "kernels against their references", "gpu.kernel_checks", 135, _KERNELS, decides=True),
        Part("b", "token-exactness of the engine", "gpu.exactness", 80, _ENGINE, decides=True),
        Part("c", "bandwidth of the kernels", "gpu.bandwidth", 35, _KERNELS),
        Part("d", "decode speed", "gpu.decoding", 145, _ENGINE),
        Part("e", "shared against expanded prefill", "gpu.sharing", 70, _ENGINE),
    )
}
TOTAL_SECONDS = sum(part.seconds for part in PARTS.values())
