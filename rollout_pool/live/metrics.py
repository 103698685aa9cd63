"""A pool's counters on Ray's metrics endpoint, and under which names.

Every name here is exported with Ray's prefix, as ``ray_rollout_pool_new_tokens_total``, with the label
``pool`` and, for what an actor counts, ``actor``. Names and meanings are stable.

All are gauges to Ray, those that only grow (``_total``) as well: Ray's counters stay on a node's endpoint for
as long as the node is up, those of every pool that ever was, while its gauges go when their pool does. PromQL
does not tell the two apart; ``rate`` and ``increase`` work on both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ray.util.metrics import Gauge

from rollout_pool.types import PoolStats

PREFIX = "rollout_pool_"


@dataclass(frozen=True, slots=True)
class Metric:
    """``source`` is the field of PoolStats, or of EngineStats, that it shows."""

    source: str
    suffix: str
    description: str

    @property
    def name(self) -> str:
        return PREFIX + self.suffix

    @property
    def is_total(self) -> bool:
        """Whether it only grows."""
        return self.suffix.endswith("_total")


OF_POOL = (
    Metric("submitted", "groups_submitted_total", "Groups that callers asked for."),
    Metric("returned", "groups_returned_total", "Groups that their callers got."),
    Metric("failed", "groups_failed_total", "Groups that came back with an error."),
    Metric("cancelled", "groups_cancelled_total", "Groups that their callers did not wait for."),
    Metric("replayed", "groups_replayed_total", "Groups that went to another actor after a loss."),
    Metric("restarted", "groups_restarted_total", "Groups drawn anew because their tokens were too old."),
    Metric("in_flight", "groups_in_flight", "Groups whose callers wait for them."),
    Metric("queued", "groups_queued", "Groups in flight that no actor has yet."),
    Metric("num_actors", "actors", "Rollout actors that serve."),
    Metric("actors_lost", "actors_lost_total", "Rollout actors that died or hung."),
    Metric("weight_version", "weight_version", "Version of the weights that actors which take work have."),
    Metric("weight_syncs", "weight_syncs_total", "Weight syncs that went through."),
    Metric("weight_sync_s", "weight_sync_seconds_total", "Seconds that those weight syncs took."),
)
OF_ACTOR = (
    Metric("num_slots", "slots", "Samples that the engine can decode at once."),
    Metric("live_rows", "live_rows", "Samples that it is decoding."),
    Metric("waiting_samples", "waiting_samples", "Samples that it has and that have no slot yet."),
    Metric("kv_bytes", "kv_bytes", "Bytes of its KV cache."),
    Metric("new_tokens", "new_tokens_total", "Tokens drawn."),
    Metric("samples_finished", "samples_finished_total", "Samples that ended."),
    Metric("prefill_tokens", "prefill_tokens_total", "Prompt tokens computed."),
    Metric(
        "prefill_tokens_saved",
        "prefill_tokens_saved_total",
        "Prompt tokens that sharing a prefill among samples saved.",
    ),
    Metric("prefill_tokens_reused", "prefill_tokens_reused_total", "Prompt tokens whose KV was still there."),
    Metric("decode_steps", "decode_steps_total", "Decode steps."),
    Metric("rows_decoded", "rows_decoded_total", "Live rows, summed over decode steps."),
    Metric("rows_computed", "rows_computed_total", "Rows computed, idle ones too, summed over decode steps."),
    Metric("compactions", "compactions_total", "Times that rows moved together for a smaller batch."),
    Metric("shortages", "shortages_total", "Times that memory ran out in a step."),
)


class Metrics:
    """The metrics of one pool. They go with the process that made them, which is the pool's actor."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._of_pool = [(metric, _gauge(metric, ("pool",))) for metric in OF_POOL]
        self._of_actor = [(metric, _gauge(metric, ("pool", "actor"))) for metric in OF_ACTOR]
        self._shown: set[str] = set()

    def publish(self, stats: PoolStats, members: Collection[str]) -> None:
        """Show ``stats``. ``members`` are the actors that there are, whether they answered or not."""
        pool = {"pool": self._pool}
        for metric, gauge in self._of_pool:
            gauge.set(getattr(stats, metric.source), pool)
        for name, actor in zip(stats.actor_names, stats.actors, strict=True):
            tags = {**pool, "actor": name}
            for metric, gauge in self._of_actor:
                gauge.set(getattr(actor, metric.source), tags)
            self._shown.add(name)
        for name in self._shown.difference(members):
            self._end(name)

    def _end(self, actor: str) -> None:
        """An actor is gone and holds nothing, until Ray forgets it (later versions do after 20 s)."""
        for metric, gauge in self._of_actor:
            if not metric.is_total:
                gauge.set(0, {"pool": self._pool, "actor": actor})
        self._shown.discard(actor)


def _gauge(metric: Metric, tags: tuple[str, ...]) -> Gauge:
    return Gauge(metric.name, metric.description, tags)
