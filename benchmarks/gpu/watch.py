"""What a run did besides its result: its warnings, and how often it replayed a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Watch:
    """Fills while a run is watched, and afterwards."""

    replays: int = 0
    warnings: list[str] = field(default_factory=list)
    """RuntimeWarnings, one line each: that steps could not be recorded, say."""

    def text(self) -> str:
        """For the end of a table's cell; empty when there is nothing to say."""
        replayed = f"; {self.replays} graph replays" if self.replays else ""
        return replayed + (f"; warned: {self.warnings[0]}" if self.warnings else "")


@contextmanager
def watched() -> Iterator[Watch]:
    """Graph replays are counted where PyTorch does them, so that no engine has to be believed."""
    watch, replay = Watch(), torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        watch.replays += 1
        replay(graph)

    torch.cuda.CUDAGraph.replay = counted
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RuntimeWarning)
            yield watch
    finally:
        torch.cuda.CUDAGraph.replay = replay
    watch.warnings = list(
        dict.fromkeys(
            " ".join(str(one.message).split())[:200]
            for one in caught
            if issubclass(one.category, RuntimeWarning)
        )
    )
