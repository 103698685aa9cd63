"""What happened when in a run, as JSON lines next to its output; ``rollout-pool report`` draws it.

    {"event": "run", "time", "model", "tokenizer", "layout", "num_slots", "num_prompts", "num_kept", ...}
    {"event": "actors", "time", "actors": [{"name", "device", "threads"}, ...]}
    {"event": "group", "time", "index", "actor", "error", "queue_s", "prefill_tokens",
     "stays": [[sample_index, slot, start, ready, end], ...]}; with a sixth, "actor", where it is another
    {"event": "stats", "time", "returned", "failed", "replayed", ..., "actors": [name, ...],
     "engines": {"new_tokens", ...}}
    {"event": "end", "time"}

Times are seconds since the epoch. The file is a by-product: a run goes on when it cannot be written,
its results are complete without it, and a line that was cut off is passed over.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollout_pool.errors import OutputFileError
from rollout_pool.run_config import RunConfig
from rollout_pool.types import PoolStats, RolloutGroup, Stay

Event = dict[str, Any]


def trace_path(output: str | Path) -> Path:
    """Where the trace of a run with this output is: ``results.trace.jsonl`` for ``results.jsonl``."""
    return Path(output).with_suffix(".trace.jsonl")


class TraceFile:
    """Writes the trace of one run. A context manager; leaving it closes the file.

    ``resume``: append to what an earlier part of the run has left. Raises :class:`OutputFileError` when
    the file is something else than a trace, or cannot be opened. ``fault`` says why writing ended early.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        self.fault: str | None = None
        has_content = self.path.exists() and self.path.stat().st_size > 0
        if has_content and next(read_trace(self.path), {}).get("event") != "run":
            raise OutputFileError(f"{self.path} is not the trace of a run; remove it, or use --no-trace")
        try:
            self._file = self.path.open("ab" if resume else "wb", buffering=0)
            if self._file.tell():
                self._file.write(b"\n")  # after a line that may have been cut off
        except OSError as error:
            raise OutputFileError(f"cannot write {self.path}: {error.strerror}; or use --no-trace") from None

    def begin(self, config: RunConfig, num_prompts: int, num_kept: int = 0) -> None:
        """A run, or its continuation, starts. ``num_kept`` of its groups are there already."""
        engine = config.engine
        self._write(
            "run",
            model=config.model,
            tokenizer=config.tokenizer or config.model,
            layout=engine.layout,
            num_slots=engine.num_slots,
            num_actors=config.num_actors,
            tensor_parallel_size=config.tensor_parallel_size,
            num_prompts=num_prompts,
            num_kept=num_kept,
        )

    def add_actors(self, actors: Iterable[Any]) -> None:
        """The actors are up: their ``ActorInfo``, from ``pool.ready``."""
        facts = [{"name": one.name, "device": one.device, "threads": one.threads} for one in actors]
        self._write("actors", actors=facts)

    def add_group(self, group: RolloutGroup) -> None:
        """A group has come."""
        timing = group.timing
        self._write(
            "group",
            index=group.index,
            actor=timing.actor,
            error=group.error,
            queue_s=round(timing.queue_s, 4),
            prefill_tokens=timing.prefill_tokens,
            stays=[_row(stay, timing.actor) for stay in timing.stays],
        )

    def add_stats(self, stats: PoolStats) -> None:
        """The counters of the pool now; those of its engines are added up, and left out where zero."""
        engines: Counter[str] = Counter()
        for actor in stats.actors:
            engines.update(dataclasses.asdict(actor))
        counts = {
            field.name: getattr(stats, field.name)
            for field in dataclasses.fields(stats)
            if isinstance(getattr(stats, field.name), int)
        }
        names = list(stats.actor_names)
        self._write(
            "stats", **counts, actors=names, engines={name: count for name, count in engines.items() if count}
        )

    def end(self) -> None:
        """All groups have come."""
        self._write("end")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _write(self, event: str, **facts: Any) -> None:
        if self.fault is not None:
            return
        line = {"event": event, "time": round(time.time(), 4), **facts}
        data = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        try:
            if self._file.write(data) != len(data):
                raise OSError(0, "no room for a whole line")
        except OSError as error:
            self.fault = f"{self.path} ends early: {error.strerror}"


def read_trace(path: str | Path) -> Iterator[Event]:
    """The events of a file, in its order; lines that are none are passed over."""
    with Path(path).open("rb") as lines:
        for raw in lines:
            try:
                event = json.loads(raw)
            except ValueError:
                continue
            if isinstance(event, dict) and "event" in event:
                yield event


def _row(stay: Stay, actor: str) -> list[Any]:
    """A stay as it is written; with its actor where that is not the group's."""
    times = [round(at, 4) for at in (stay.start, stay.ready, stay.end)]
    elsewhere = [stay.actor] if stay.actor not in ("", actor) else []
    return [stay.sample_index, stay.slot, *times, *elsewhere]
