"""What can happen to a pool, and a seeded schedule of it."""

from __future__ import annotations

import random
from dataclasses import dataclass

KINDS = {
    "kill": 6,
    "node": 2,
    "wedge": 3,
    "silence": 2,
    "slow": 4,
    "late": 3,
    "start dies": 1,
    "start hangs": 1,
    "start finds no room": 1,
    "out of memory": 4,
    "killed for memory": 1,
    "sync": 3,
    "sync of wrong weights": 2,
    "sync that is late": 1,
    "sync that is not written": 1,
    "cancel": 3,
}
"""How often each kind of event comes, relative to the others."""


@dataclass(frozen=True, slots=True)
class Event:
    """``kind`` happens ``after_s`` later than the event before it. ``pick`` chooses among what is there."""

    kind: str
    after_s: float
    pick: int


def schedule(seed: int, num_events: int, gap_s: float = 0.4) -> list[Event]:
    """Events with exponential gaps; the same for the same seed."""
    draw = random.Random(seed)
    kinds = draw.choices(list(KINDS), weights=list(KINDS.values()), k=num_events)
    return [Event(kind, draw.expovariate(1 / gap_s), draw.randrange(2**16)) for kind in kinds]
