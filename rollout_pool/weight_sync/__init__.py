"""From a trainer's weights to those of every rollout actor, all at one version.

``ship`` puts what a trainer holds into Ray's object store, in buckets of bounded size; ``WeightSource`` does
it from inside a trainer that is a Ray actor. ``pool.sync_weights`` takes either, and brings every rank
of every actor to the new version, or none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_pool.weight_sync.shipment import Shipment as Shipment
    from rollout_pool.weight_sync.shipment import ship as ship
    from rollout_pool.weight_sync.trainer import WeightSource as WeightSource
    from rollout_pool.weight_sync.transport import TensorTransportSource as TensorTransportSource

_HOME = {
    "Shipment": "rollout_pool.weight_sync.shipment",
    "ship": "rollout_pool.weight_sync.shipment",
    "WeightSource": "rollout_pool.weight_sync.trainer",
    "TensorTransportSource": "rollout_pool.weight_sync.transport",
}

__all__ = ["Shipment", "TensorTransportSource", "WeightSource", "ship"]


def __getattr__(name: str) -> Any:
    """Imported when first used: the pool's own process needs no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'rollout_pool.weight_sync' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
