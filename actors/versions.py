"""Which weights drew which token."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from rollout_pool.types import TokenIds


class VersionLog:
    """The versions of an engine's weights and the decode steps between which they came."""

    def __init__(self) -> None:
        self._steps = [-1]
        self._versions = [0]

    @property
    def current(self) -> int:
        return self._versions[-1]

    def change(self, version: int, step: int) -> None:
        """The weights are now of this version; decode step ``step`` was the last one before it."""
        self._steps.append(step)
        self._versions.append(version)

    def of_steps(self, first: int, count: int) -> TokenIds:
        """The version of ``count`` decode steps from ``first`` on: int64 ``[count]``."""
        steps = range(first, first + count)
        found = [self._versions[max(0, bisect_left(self._steps, step) - 1)] for step in steps]
        return np.array(found, dtype=np.int64)
