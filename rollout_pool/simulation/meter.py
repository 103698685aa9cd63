"""CPU time of this thread, told apart from that of others that run in it."""

from __future__ import annotations

import time


class Meter:
    """CPU seconds spent within its contexts; one inside another counts once."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._depth = 0
        self._began = 0

    def __enter__(self) -> None:
        if not self._depth:
            self._began = time.thread_time_ns()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.cpu_s += (time.thread_time_ns() - self._began) / 1e9
