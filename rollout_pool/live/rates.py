"""How fast a counter grows, and how long that takes."""

from __future__ import annotations

import time
from collections import deque


class Rate:
    """Growth per second over the last ``window_s`` seconds. A counter that falls (a restart) begins anew."""

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, float]] = deque()

    def add(self, count: float, now: float | None = None) -> None:
        """The counter stands at ``count``, at ``now`` on the monotonic clock."""
        now = time.monotonic() if now is None else now
        if self._points and count < self._points[-1][1]:
            self._points.clear()
        self._points.append((now, count))
        while len(self._points) > 2 and now - self._points[1][0] >= self._window_s:
            self._points.popleft()

    @property
    def span_s(self) -> float:
        """Seconds that the rate is of."""
        return self._points[-1][0] - self._points[0][0] if self._points else 0.0

    @property
    def per_second(self) -> float:
        """0 until there are two points."""
        if len(self._points) < 2:
            return 0.0
        (start, low), (end, high) = self._points[0], self._points[-1]
        return (high - low) / max(end - start, 1e-9)


def duration(seconds: float) -> str:
    """Short, as ``42 s``, ``7 min``, ``3 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
