"""What one rank tells of itself when a tensor-parallel setting is validated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollout_pool.types import RolloutGroup

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of one tensor, beside the checkpoint's."""

    name: str
    layout: str
    """"replicated", or which dimension is split; "unknown" when the shape fits no split."""
    elements: int
    full_elements: int
    """0 when the checkpoint has no such tensor."""
    num_wrong: int
    """Elements whose bits are not those of the checkpoint, cast to the rank's dtype."""
    largest_error: float
    total: float
    """Sum of the elements, in float64."""
    full_total: float
    checksum: str
    expected: str
    """The checksum that the right part of the checkpoint has; empty when there is none."""

    @property
    def is_split(self) -> bool:
        """Whether other ranks hold other parts of it."""
        return self.layout.startswith("split")


@dataclass(frozen=True, slots=True)
class Checked:
    """Checksums of what must be the same bits on every rank, by name."""

    checksums: dict[str, str]


@dataclass(frozen=True, slots=True)
class States:
    """A prompt's forward pass at its last positions, in float32."""

    hidden: dict[str, Floats]
    """``[positions, hidden]`` after each quarter of the layers, by a name for it."""
    logits: Floats
    """``[positions, vocab]``"""


@dataclass(frozen=True, slots=True)
class TopTwo:
    """The two largest logits at every token of a completion, largest first."""

    token_ids: npt.NDArray[np.int64]
    """``[tokens, 2]``"""
    logits: Floats
    """``[tokens, 2]``"""


@dataclass(frozen=True, slots=True)
class RollPlan:
    """What an engine is asked to roll out."""

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    num_samples: int
    seed: int


@dataclass(frozen=True, slots=True)
class Rolled:
    """What an engine gave; one group per prompt in each list."""

    greedy: list[RolloutGroup]
    shared: list[RolloutGroup]
    """Samples whose prompt was computed once."""
    apart: list[RolloutGroup]
    """The same samples, each with a computation of the prompt of its own."""
    new_tokens: int
    """Of the shared samples, drawn in ``seconds``."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory of one rank in bytes."""

    weights: int
    kv: int
    peak: int
    """Of the device on a GPU, else of the whole process."""
