"""The part of the pool actor that looks at the pool, every few seconds, for metrics and rates.

One look asks each actor once for its counters. Nothing that goes wrong here reaches the pool.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import ray

from rollout_pool.config import PoolConfig
from rollout_pool.live.metrics import Metrics
from rollout_pool.live.rates import Rate
from rollout_pool.live.snapshot import ActorView, PoolSnapshot
from rollout_pool.logs import set_up_logs
from rollout_pool.types import EngineStats, PoolStats

if TYPE_CHECKING:
    from rollout_pool.recovery import Crew

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0
"""Between two looks; longer where there are so many actors that ``LOOKS_PER_S`` would be passed."""
LOOKS_PER_S = 100.0
GROUP_WINDOW_S = 60.0
NUM_WARNINGS = 20


class Monitor:
    """Watches ``crew``. ``count`` makes the pool's counters of those of its actors."""

    def __init__(
        self, config: PoolConfig, crew: Crew, count: Callable[[Mapping[str, EngineStats]], PoolStats]
    ) -> None:
        self._config = config
        self._crew = crew
        self._count = count
        self._started_at = time.monotonic()
        self._tokens: dict[str, Rate] = {}
        self._groups = Rate(GROUP_WINDOW_S)
        self._warnings = _Warnings()
        if (name := pool_name()) is not None:
            set_up_logs(pool=name)

    async def run(self) -> None:
        """Look and publish until cancelled, and once more then."""
        if (name := pool_name()) is None:
            return  # no Ray actor, so there is nobody to publish to
        logging.getLogger("rollout_pool").addHandler(self._warnings)
        try:
            await self._watch(Metrics(name))
        except Exception:
            logger.warning("there are no more metrics of this pool", exc_info=True)

    async def snapshot(self) -> PoolSnapshot:
        """The pool now, by counters just asked for."""
        stats = self._count(await self._crew.stats())
        rates = {name: self._tokens[name].per_second for name in self._crew.members if name in self._tokens}
        return PoolSnapshot(
            pool=pool_name() or "",
            model=self._config.model,
            up_s=time.monotonic() - self._started_at,
            num_actors=self._config.num_actors,
            stats=stats,
            actors=tuple(self._views(stats, rates)),
            tokens_per_s=sum(rates.values()),
            groups_per_s=self._groups.per_second,
            warnings=tuple(self._warnings.lines),
        )

    async def _watch(self, metrics: Metrics) -> None:
        members = self._crew.members
        try:
            while True:
                metrics.publish(await self._look(), members)
                await asyncio.sleep(max(INTERVAL_S, len(members) / LOOKS_PER_S))
        except asyncio.CancelledError:
            metrics.publish(self._count({}), members)
            raise

    async def _look(self) -> PoolStats:
        stats = self._count(await self._crew.stats())
        now = time.monotonic()
        self._groups.add(stats.submitted - stats.in_flight, now)
        for name in self._tokens.keys() - self._crew.members.keys():
            del self._tokens[name]
        for name, actor in zip(stats.actor_names, stats.actors, strict=True):
            self._tokens.setdefault(name, Rate()).add(actor.new_tokens, now)
        return stats

    def _views(self, stats: PoolStats, rates: Mapping[str, float]) -> Iterable[ActorView]:
        counters = dict(zip(stats.actor_names, stats.actors, strict=True))
        for name, member in sorted(self._crew.members.items(), key=lambda item: _place(item[0])):
            first = member.info.ranks[0] if member.info.ranks else None
            yield ActorView(
                name=name,
                host=first.host if first else "",
                device=member.info.device,
                num_ranks=len(member.info.ranks) or 1,
                weight_version=member.weight_version,
                tokens_per_s=rates.get(name, 0.0),
                stats=counters.get(name),
            )


def _place(name: str) -> list[int]:
    """``actor-2`` before ``actor-10``."""
    return [int(number) for number in re.findall(r"\d+", name)]


def pool_name() -> str | None:
    """The name of the Ray actor that this process is. None when it is none, or has no name."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    if context.worker.mode != ray.WORKER_MODE:
        return None
    name: str | None = context.get_actor_name()
    return name or None


class _Warnings(logging.Handler):
    """Keeps the last lines that the pool's process logged as warnings, or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        self.lines: deque[str] = deque(maxlen=NUM_WARNINGS)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record).partition("\n")[0])
        others = [*logging.getLogger("rollout_pool").handlers, *logging.getLogger().handlers]
        if others == [self] and logging.lastResort is not None:
            logging.lastResort.handle(record)  # which Python does by itself where there is no handler
