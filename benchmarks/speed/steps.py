"""Results of `benchmarks/breakdown.py` as tables."""

from __future__ import annotations

from typing import Any

from speed.machine import machine_line

PARTS = (
    "matrix products",
    "attention",
    "KV written",
    "other in the forward",
    "sampling",
    "cache moves",
    "results to the host",
    "scheduling",
)
"""Of a decode step; prompts are counted apart."""


def step_tables(results: dict[str, Any]) -> str:
    """Where the time goes, at each number of rows; then the limits it is held against."""
    steps = results["steps"]
    lines = [
        machine_line(results["machine"]) + " Milliseconds per decode step, and percent of the step.",
        "",
        "| part | " + " | ".join(f"{step['rows']} rows" for step in steps) + " |",
        "| --- |" + " --- |" * len(steps),
    ]
    for part in PARTS:
        cells = [_share(step["parts"][part], step["step_ms"]) for step in steps]
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    lines.append("| **step** | " + " | ".join(f"**{step['step_ms']:.1f}**" for step in steps) + " |")
    ray = [f"{step['ray_ms']:+.1f}" if step["ray_ms"] is not None else "" for step in steps]
    lines.append("| Ray: the same through a pool of one | " + " | ".join(ray) + " |")
    return "\n".join([*lines, "", *_limits(steps)])


def _limits(steps: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| limit | " + " | ".join(f"{step['rows']} rows" for step in steps) + " |",
        "| --- |" + " --- |" * len(steps),
    ]
    for layout in ("native", "transposed", "prepacked for oneDNN", "prepacked for MKL", "best"):
        cells = [f"{step['limits'][layout]:.1f} ms" if step["limits"].get(layout) else "-" for step in steps]
        lines.append(f"| all products of a step, weights {layout} | " + " | ".join(cells) + " |")
    for title, above, below in (
        ("products at best / products as they ran", "best", "matrix products"),
        ("products at best / step", "best", "step"),
        ("reading KV at copying speed / attention as it ran", "kv", "attention"),
    ):
        cells = []
        for step in steps:
            ran = step["step_ms"] if below == "step" else step["parts"][below]
            cells.append(f"**{step['limits'][above] / ran:.0%}**" if ran else "-")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    rates = [f"{step['limits']['copy_gb_s']:.1f} GB/s" for step in steps]
    lines.append("| memory copied, read and written bytes together | " + " | ".join(rates) + " |")
    return lines


def _share(part: float, whole: float) -> str:
    return f"{part:.1f} ({part / whole:.0%})"
