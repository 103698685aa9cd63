"""What several files of tests share."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest


@pytest.fixture(scope="session")
def at_step() -> Callable[[Any, int, Callable[[], object]], None]:
    """Have something done in an actor's process, once, before the step of this number from now.

    A test that did it from outside might come too late, when all work is done.
    """

    def at_step(actor: Any, number: int, do: Callable[[], object]) -> None:
        def watch(engine: Any) -> None:
            step, steps = engine.step, count(1)

            def counted() -> object:
                if next(steps) == number:
                    do()
                return step()

            engine.step = counted

        import ray

        ray.get(actor.__ray_call__.remote(lambda self: self._engine.call(watch) and None), timeout=60)

    return at_step
