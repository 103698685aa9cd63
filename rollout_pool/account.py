"""What a pool tells of itself, put together from its parts. No Ray here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollout_pool.types import EngineStats, PoolStats

if TYPE_CHECKING:
    from rollout_pool.dispatch import Dispatcher
    from rollout_pool.ledger import Ledger
    from rollout_pool.recovery import Crew
    from rollout_pool.weight_sync.session import WeightSync


def pool_stats(
    ledger: Ledger, dispatcher: Dispatcher, crew: Crew, sync: WeightSync, actors: Mapping[str, EngineStats]
) -> PoolStats:
    """The account as it is now, with the counters of those actors that answered."""
    return PoolStats(
        submitted=ledger.submitted,
        returned=ledger.returned,
        failed=ledger.failed,
        cancelled=ledger.cancelled,
        in_flight=ledger.in_flight,
        replayed=ledger.replayed,
        restarted=ledger.restarted,
        dropped=ledger.dropped,
        queued=dispatcher.num_queued,
        actors_lost=crew.num_lost,
        num_actors=len(crew.members),
        weight_version=sync.version,
        weight_syncs=sync.num_syncs,
        weight_sync_s=sync.seconds,
        actors=tuple(actors.values()),
        actor_names=tuple(actors),
    )
