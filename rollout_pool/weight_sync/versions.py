"""Which version a sync may have, and what a pool that was started again has lost."""

from __future__ import annotations

import dataclasses

from rollout_pool.actors.weight_records import Manifest
from rollout_pool.errors import ConfigError, WeightsLostError, WeightSyncError
from rollout_pool.pool_memory import PoolPast


def require_present(version: int, past: PoolPast) -> None:
    """Raise :class:`WeightsLostError` when the pool once had newer weights than ``version``."""
    if version < past.weight_version:
        raise WeightsLostError(
            f"the pool was started again and has the checkpoint only; the weights of version "
            f"{past.weight_version} are lost: call sync_weights"
        )


def next_version(asked: int | None, version: int, past: PoolPast) -> int:
    """The version of a sync: what was asked for, or one more than the pool has or ever had.

    Raises :class:`WeightSyncError` when it is not above that.
    """
    last = max(version, past.weight_version)
    if asked is None:
        return last + 1
    if isinstance(asked, bool) or not isinstance(asked, int):
        raise ConfigError(f"version: must be an integer, got {asked!r}")
    if asked <= last:
        had = "has" if last == version else "had before it was started again"
        raise WeightSyncError(
            f"version {asked} is not above {last}, which the pool {had}; nothing was changed"
        )
    return asked


def past_after(manifest: Manifest, wanted: int, version: int, past: PoolPast) -> PoolPast:
    """What is to be remembered once the update of version ``wanted`` is decided.

    Raises :class:`WeightSyncError` when it holds adapters of weights that are lost.
    """
    if version < past.weight_version and past.is_full and not manifest.is_full:
        raise WeightSyncError(
            f"version {wanted} holds adapters only, and what they belong to was lost when the pool was "
            "started again; sync all weights first"
        )
    return dataclasses.replace(past, weight_version=wanted, is_full=past.is_full or manifest.is_full)
