"""Rows as people and programs read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rollout_pool.simulation.latency import Latency
from rollout_pool.simulation.study import Row
from rollout_pool.simulation.workload import Lengths

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("actors", "num_actors", "{}"),
    ("pools", "num_pools", "{}"),
    ("policy", "policy", "{}"),
    ("all back, s", "makespan_s", "{:.1f}"),
    ("95% back, s", "p95_s", "{:.1f}"),
    ("tail, s", "tail_s", "{:.1f}"),
    ("slots busy", "utilisation", "{:.0%}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("mean length", "mean_length", "{:.0f}"),
    ("thrown away", "wasted", "{:.0%}"),
    ("driver, µs/group", "driver_us_per_group", "{:.0f}"),
)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of a Markdown table."""
    cells = [[title for title, _, _ in COLUMNS]]
    cells += [[form.format(getattr(row, name)) for _, name, form in COLUMNS] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    cells.insert(1, ["-" * width for width in widths])
    for line in cells:
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"


def as_json(rows: Sequence[Row], latency: Latency, lengths: Lengths, seed: int) -> dict[str, Any]:
    """All figures, with what they were made from."""
    return {
        "seed": seed,
        "latency": dataclasses.asdict(latency),
        "lengths": dataclasses.asdict(lengths),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
