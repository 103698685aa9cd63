"""Which actors may be sent another group, kept up to date load by load. No Ray here."""

from __future__ import annotations

import heapq

from rollout_pool.routing import ActorLoad


class Room:
    """The actors with room, least loaded first by remaining tokens.

    It is told of each load that changes. To look at every actor for every group and every heartbeat would
    cost a pool of a thousand actors more than all else that it does.
    """

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, int, str]] = {}
        """Where an actor with room stands; what the heap holds beside these is outdated."""
        self._heap: list[tuple[int, int, str]] = []

    def update(self, load: ActorLoad) -> None:
        """An actor's load is this now."""
        if not load.has_room:
            self.remove(load.actor)
            return
        place = (load.remaining_tokens, load.outstanding_samples, load.actor)
        if self._places.get(load.actor) == place:
            return
        self._places[load.actor] = place
        heapq.heappush(self._heap, place)
        if len(self._heap) > 2 * len(self._places) + 64:
            self._heap = sorted(self._places.values())

    def remove(self, actor: str) -> None:
        """Nothing more goes there, until its next update."""
        self._places.pop(actor, None)

    def idle(self) -> list[str]:
        """The actors that have nothing to do. Looks at all of them."""
        return [actor for _, outstanding, actor in self._places.values() if not outstanding]

    def least_loaded(self) -> str | None:
        """The actor that gets the next group. None: all are full."""
        while self._heap and self._places.get(self._heap[0][2]) != self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None
