"""A snapshot of a pool as it looks in a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollout_pool.live.rates import duration
from rollout_pool.live.snapshot import ActorView, PoolSnapshot

NUM_WARNINGS_SHOWN = 5
COLUMNS = ("actor", "where", "slots", "waiting", "tokens/s", "tokens", "prompt tokens", "weights", "faults")


def render(snapshot: PoolSnapshot) -> RenderableType:
    """Totals, a line per actor, and the last warnings."""
    lines: list[RenderableType] = [Text(line) for line in _totals(snapshot)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("actor", "where", "faults") else "right")
    for actor in snapshot.actors:
        table.add_row(*map(Text, _cells(actor)))
    lines.append(table)
    warnings = snapshot.warnings[-NUM_WARNINGS_SHOWN:]
    return Group(*lines, *(Text(line, no_wrap=True, overflow="ellipsis") for line in warnings))


def _totals(snapshot: PoolSnapshot) -> list[str]:
    stats = snapshot.stats
    live = sum(actor.live_rows for actor in stats.actors)
    slots = sum(actor.num_slots for actor in stats.actors)
    missing = f" of {snapshot.num_actors}" if stats.num_actors != snapshot.num_actors else ""
    faults = [f"{stats.actors_lost} actors lost"] if stats.actors_lost else []
    faults += [f"{stats.replayed} groups replayed"] if stats.replayed else []
    eta = f", done in about {duration(snapshot.eta_s)}" if snapshot.eta_s is not None else ""
    return [
        f"{snapshot.pool}: {snapshot.model}, up {duration(snapshot.up_s)}, weights {stats.weight_version}",
        ", ".join(
            [
                f"{stats.num_actors}{missing} actors",
                f"{live}/{slots} slots in use",
                f"{snapshot.tokens_per_s:.0f} tokens/s",
                f"{snapshot.groups_per_s:.2f} groups/s",
                *faults,
            ]
        ),
        f"groups: {stats.submitted} submitted, {stats.returned} returned, {stats.failed} failed, "
        f"{stats.cancelled} cancelled, {stats.in_flight} in flight ({stats.queued} queued){eta}",
    ]


def _cells(actor: ActorView) -> list[str]:
    where = f"{actor.host} {actor.device}".strip()
    where += f" x {actor.num_ranks}" if actor.num_ranks > 1 else ""
    lost = [f"lost {actor.times_lost} times"] if actor.times_lost else []
    stats = actor.stats
    if stats is None:
        return [actor.name, where, *[""] * 5, str(actor.weight_version), ", ".join([*lost, "no answer"])]
    faults = lost + ([f"short of memory {stats.shortages} times"] if stats.shortages else [])
    return [
        actor.name,
        where,
        f"{stats.live_rows}/{stats.num_slots}",
        str(stats.waiting_samples),
        f"{actor.tokens_per_s:.0f}",
        str(stats.new_tokens),
        f"{stats.prefill_tokens} + {stats.prefill_tokens_saved} saved",
        str(actor.weight_version),
        ", ".join(faults),
    ]
