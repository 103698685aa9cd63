"""Waiting for what other processes do, however long a busy machine takes over it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray

PATIENCE_S = 180.0


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Look until it holds; ``what`` is wrong when it never does."""
    deadline, is_late = time.monotonic() + PATIENCE_S, False
    while not condition():
        assert not is_late, what
        time.sleep(0.1)
        is_late = time.monotonic() > deadline  # and then it is looked at once more


def stats_of_all(pool: Any) -> Any:
    """The pool's account, with the counters of all its actors: one that is slow to answer is left out."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = ray.get(pool.stats.remote(), timeout=60)
        assert found.is_balanced
        if len(found.actors) == found.num_actors:
            return found
        assert time.monotonic() < deadline, "an actor does not answer"
