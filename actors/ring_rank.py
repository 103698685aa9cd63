"""One rank of a ring that is only tried: it meets the others and sums with them.

Nothing here imports Ray: the doctor makes a Ray actor of :class:`RingRank`.
"""

from __future__ import annotations

import importlib.metadata
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout_pool.actors.rollout_actor import RankInfo, keep_checkout_off_path

if TYPE_CHECKING:
    from rollout_pool.actors.rank_group import RankGroup

COMPARED = ("torch", "transformers", "ray", "rollout-pool")
MODULUS = 997
"""Of the summands: whole numbers whose sums float32 holds exactly, over thousands of ranks."""


@dataclass(frozen=True, slots=True)
class RingTimes:
    """What one rank measured."""

    rank: int
    is_exact: bool
    """Every sum was the right one, bit for bit."""
    num_bytes: int
    seconds: float
    """Of one all-reduce of ``num_bytes``."""
    small_seconds: float
    """Of one all-reduce of a few kilobytes, as a layer of a decode step makes."""


class RingRank:
    """Rank ``rank`` of ``size``."""

    def __init__(self, rank: int, size: int, *, threads: int, device: str, timeout_s: float) -> None:
        keep_checkout_off_path()
        self._rank = rank
        self._size = size
        self._threads = threads
        self._device = device
        self._timeout_s = timeout_s
        self._store: Any | None = None
        self._group: RankGroup | None = None

    def place(self) -> tuple[RankInfo, dict[str, str]]:
        """Where this process runs, and the versions of the packages that must agree."""
        versions = {name: importlib.metadata.version(name) for name in COMPARED}
        return RankInfo.here(self._rank, self._device), versions

    def open(self) -> str:
        """Where the others meet this one, which is rank 0."""
        from rollout_pool.actors.rank_group import open_store

        self._store, address = open_store()
        return address

    def join(self, address: str) -> None:
        """Meet the others."""
        import torch

        from rollout_pool.actors.rank_group import RankGroup

        torch.set_num_threads(self._threads)
        self._group = RankGroup.join(
            address, self._rank, self._size, self._device, store=self._store, timeout_s=self._timeout_s
        )

    def all_reduce(self, num_values: int, small: int, repeats: int) -> RingTimes:
        """Sum float32 tensors of ``num_values`` and of ``small`` values; all ranks call this together."""
        assert self._group is not None
        is_right, seconds = self._sum(num_values, repeats)
        is_small_right, small_seconds = self._sum(small, 10 * repeats)
        return RingTimes(self._rank, is_right and is_small_right, 4 * num_values, seconds, small_seconds)

    def leave(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()

    def _sum(self, num_values: int, repeats: int) -> tuple[bool, float]:
        import torch
        import torch.distributed as dist

        assert self._group is not None
        device, size = self._group.device, self._size
        pattern = torch.arange(num_values, device=device) % MODULUS
        values = (pattern + self._rank).to(torch.float32)
        dist.all_reduce(values)
        is_right = torch.equal(values, (pattern * size + size * (size - 1) // 2).to(torch.float32))
        values.zero_()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return is_right, (time.perf_counter() - start) / repeats
