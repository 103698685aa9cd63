"""What the trace of a run tells, ready to be drawn: who sat where, and the counters over time.

Times are seconds since the pool was ready. A run that was resumed goes on where its earlier part
stopped; the pause in between is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rollout_pool.trace import Event

MAX_POINTS = 2_000
MAX_INCIDENTS = 500


@dataclass
class Session:
    """One part of a run, from a start to its end or to where it was stopped."""

    run: Event
    actors: list[Event] = field(default_factory=list)
    groups: list[Event] = field(default_factory=list)
    stats: list[Event] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    ready_at: float = 0.0
    last_at: float = 0.0
    is_over: bool = False


@dataclass
class Timeline:
    """All parts of a run on one axis."""

    num_prompts: int | None = None
    """Of the whole run; None without a trace."""
    tokenizer: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    is_over: bool = True
    load_s: float = 0.0
    seconds: float = 0.0
    actors: list[dict[str, Any]] = field(default_factory=list)
    """``name``, ``device``, ``num_slots``."""
    stays: list[list[float]] = field(default_factory=list)
    """Actor, group, sample, slot; then start, ready and end."""
    points: list[list[float]] = field(default_factory=list)
    """Time, rows in use, slots, tokens per second since the point before."""
    incidents: list[tuple[float, str, str]] = field(default_factory=list)
    """Time, kind and what happened."""
    totals: dict[str, float] = field(default_factory=dict)
    """The engines' counters, added up over all parts."""
    prefill_tokens: dict[int, int] = field(default_factory=dict)
    """By group."""


def timeline_of(events: Iterable[Event]) -> Timeline:
    """Put the events of a trace on one axis."""
    sessions = _sessions(events)
    timeline = Timeline()
    if not sessions:
        return timeline
    last = sessions[-1]
    timeline.num_prompts, timeline.is_over = last.run["num_prompts"], last.is_over
    timeline.tokenizer, timeline.facts = last.run["tokenizer"], last.run
    timeline.load_s = last.ready_at - last.run["time"]
    numbers: dict[str, int] = {}
    for session in sessions:
        if timeline.seconds:
            timeline.incidents.append((timeline.seconds, "resumed", "the run was stopped and resumed"))
        _place(timeline, session, numbers)
        timeline.seconds += session.last_at - session.ready_at
    timeline.incidents = sorted(timeline.incidents)[:MAX_INCIDENTS]
    timeline.points = _thin(timeline.points)
    return timeline


def _sessions(events: Iterable[Event]) -> list[Session]:
    sessions: list[Session] = []
    for event in events:
        if event["event"] == "run":
            sessions.append(Session(event, ready_at=event["time"], last_at=event["time"]))
        if not sessions:
            continue
        session, kind = sessions[-1], event["event"]
        session.last_at = max(session.last_at, event["time"])
        if kind == "actors":
            if session.actors:  # those of a pool whose process had to be replaced
                session.restarts.append(event["time"])
            else:
                session.ready_at = event["time"]
            session.actors += event["actors"]
        elif kind == "group":
            session.groups.append(event)
        elif kind == "stats":
            session.stats.append(event)
        elif kind == "end":
            session.is_over = True
    return sessions


def _place(timeline: Timeline, session: Session, numbers: dict[str, int]) -> None:
    shift = timeline.seconds - session.ready_at
    num_slots = session.run["num_slots"]

    def number_of(actor: str, device: str = "") -> int:
        if actor not in numbers:
            numbers[actor] = len(numbers)
            timeline.actors.append({"name": actor, "device": device, "num_slots": num_slots})
        place = timeline.actors[numbers[actor]]
        place["num_slots"] = max(place["num_slots"], num_slots)
        return numbers[actor]

    for time in session.restarts:
        timeline.incidents.append((_at(time, shift), "lost", "the pool's process was lost; another goes on"))
    for actor in session.actors:
        number_of(actor["name"], actor["device"])
    for group in session.groups:
        if group["error"] is not None:
            text = f"prompt {group['index']}: {group['error']}"
            timeline.incidents.append((_at(group["time"], shift), "failed", text))
        timeline.prefill_tokens[group["index"]] = group["prefill_tokens"]
        for sample, slot, start, ready, end, *elsewhere in group["stays"]:
            actor = elsewhere[0] if elsewhere else group["actor"]
            times = [_at(time, shift) for time in (start, ready, end)]
            timeline.stays.append([number_of(actor), group["index"], sample, slot, *times])
    _count(timeline, session, shift)


def _count(timeline: Timeline, session: Session, shift: float) -> None:
    """Turn counters into rates and incidents."""
    before: Event = {"time": session.ready_at, "engines": {}}
    counted_at = session.ready_at
    uncounted: list[list[float]] = []
    for stats in session.stats:
        engines, time = stats["engines"], _at(stats["time"], shift)
        drawn = engines.get("new_tokens", 0) - before["engines"].get("new_tokens", 0)
        point = [time, engines.get("live_rows", 0), engines.get("num_slots", 0), 0.0]
        timeline.points.append(point)
        uncounted.append(point)
        if drawn:  # a step may take longer than a look: its tokens belong to all points since the last
            rate = max(0, drawn) / max(stats["time"] - counted_at, 1e-3)  # falls with a lost actor
            for point in uncounted:
                point[-1] = round(rate, 1)
            counted_at = stats["time"]
            uncounted.clear()
        timeline.incidents += [(time, kind, text) for kind, text in _incidents(before, stats)]
        before = stats
    for name, count in before["engines"].items():
        timeline.totals[name] = timeline.totals.get(name, 0) + count


def _incidents(before: Event, now: Event) -> Iterable[tuple[str, str]]:
    """What the counters say has happened between two looks."""

    def more(name: str, old: Event, new: Event) -> int:
        return int(new.get(name, 0) - old.get(name, 0))

    old, new = before.get("actors", []), now.get("actors", [])
    if (lost := more("actors_lost", before, now)) > 0:
        gone = ", ".join(name for name in old if name not in new)
        yield "lost", f"{gone or _count_of(lost, 'actor')} lost, to be replaced"
    if old and now.get("actors_lost") and (come := [name for name in new if name not in old]):
        yield "joined", f"{', '.join(come)} takes the place of a lost actor"
    if (replayed := more("replayed", before, now)) > 0:
        yield "replayed", f"{_count_of(replayed, 'group')} sent out again after the loss of an actor"
    if (restarted := more("restarted", before, now)) > 0:
        yield "restarted", f"{_count_of(restarted, 'group')} drawn anew with newer weights"
    if more("shortages", before["engines"], now["engines"]) > 0:
        slots = now["engines"].get("num_slots", 0)
        yield "memory", f"memory ran out in a step; on with {slots} slots in all"
    if more("weight_version", before, now) > 0:
        yield "weights", f"weight version {now['weight_version']}"


def _count_of(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _thin(points: list[list[float]]) -> list[list[float]]:
    """At most ``MAX_POINTS`` of them: means over as many neighbours as that takes."""
    size = -(-len(points) // MAX_POINTS)
    if size <= 1:
        return points
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [[round(sum(column) / len(part), 3) for column in zip(*part, strict=True)] for part in parts]


def _at(time: float, shift: float) -> float:
    return round(time + shift, 3)
