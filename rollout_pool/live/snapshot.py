"""One look at a pool, as plain data. No Ray here, and no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from rollout_pool.types import EngineStats, PoolStats


@dataclass(frozen=True, slots=True)
class ActorView:
    """One rollout actor, or tensor-parallel group of them."""

    name: str
    host: str
    device: str
    num_ranks: int
    weight_version: int
    tokens_per_s: float
    stats: EngineStats | None
    """None when it did not answer in time."""

    @property
    def times_lost(self) -> int:
        """How often the actor at this place was lost before: ``actor-0.2`` is the third one there."""
        return int(self.name.partition(".")[2] or 0)


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """A pool at one moment; rates are of the last seconds."""

    pool: str
    """The name of the pool's Ray actor."""
    model: str
    up_s: float
    num_actors: int
    """That the pool is to have; ``stats.num_actors`` are there."""
    stats: PoolStats
    actors: tuple[ActorView, ...] = ()
    tokens_per_s: float = 0.0
    groups_per_s: float = 0.0
    warnings: tuple[str, ...] = field(default=())
    """The last that the pool logged, oldest first: losses, failed starts."""

    @property
    def eta_s(self) -> float | None:
        """Seconds until what is in flight is done, at the rate of the last minute; None when unknown."""
        if not self.stats.in_flight or self.groups_per_s <= 0:
            return None
        return self.stats.in_flight / self.groups_per_s

    def as_json(self) -> dict[str, Any]:
        """All of it, with the actors' counters under ``actors`` only."""
        values = dataclasses.asdict(self)
        del values["stats"]["actors"], values["stats"]["actor_names"]
        for actor, view in zip(values["actors"], self.actors, strict=True):
            actor["times_lost"] = view.times_lost
        return {**values, "eta_s": self.eta_s}
