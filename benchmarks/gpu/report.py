"""The table that is printed last, the JSON file, and the exit code."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from gpu.supervision import Outcome

OK, FAILED, INCOMPLETE = 0, 1, 3
DRY = "dry run: figures mean nothing"
_MARKS = {True: "yes", False: "NO", None: ""}


def exit_code(outcomes: list[Outcome]) -> int:
    """1: a claim did not hold, or a step broke. 3: none did, but a deciding part was not run to its end."""
    if any(outcome.broken or (outcome.part.decides and outcome.false_claims) for outcome in outcomes):
        return FAILED
    if any(outcome.part.decides and outcome.skipped for outcome in outcomes):
        return INCOMPLETE
    return OK


def verdict(outcome: Outcome) -> str:
    claims = sum(row["holds"] is not None for row in outcome.rows)
    parts = []
    if claims:
        parts.append(f"{claims - len(outcome.false_claims)} of {claims} claims hold")
    if outcome.broken:
        parts.append(f"{len(outcome.broken)} steps broke")
    if outcome.skipped:
        parts.append(f"{len(outcome.skipped)} steps not run")
    return ", ".join(parts) or "measured"


def ratios(outcome: Outcome) -> Iterator[tuple[str, str, str]]:
    """Ours over every other way, per model, over all numbers of rows that both have."""
    rates: dict[tuple[str, str], dict[int, float]] = {}
    for row in outcome.rows:
        if "tokens_per_second" in (figures := row["figures"]):
            key = (figures["model"], figures["way"])
            rates.setdefault(key, {})[figures["rows"]] = figures["tokens_per_second"]
    for (model, way), theirs in rates.items():
        ours = rates.get((model, "ours, graphs"), {})
        both = sorted(set(ours) & set(theirs))
        if way != "ours, graphs" and both:
            seen = ", ".join(f"{ours[rows] / theirs[rows]:.2f}x at {rows}" for rows in both)
            yield (outcome.part.letter, f"{model}: ours with graphs over {way}", f"{seen} rows")


def table(outcomes: list[Outcome], is_dry: bool) -> str:
    """Markdown: one line per row, then one per part."""
    lines = [
        f"| part | what | seen{f' ({DRY})' if is_dry else ''} | holds |",
        "| --- | --- | --- | --- |",
    ]
    for outcome in outcomes:
        letter = outcome.part.letter
        broken = set(outcome.broken)
        for row in outcome.rows:
            mark = "BROKE" if row["what"] in broken and row["holds"] is None else _MARKS[row["holds"]]
            lines.append(f"| {letter} | {_cell(row['what'])} | {_cell(row['seen'])} | {mark} |")
        lines += [f"| {part} | {what} | {seen} | |" for part, what, seen in ratios(outcome)]
    for outcome in outcomes:
        spent = f"{outcome.seconds:.0f} of {outcome.budget:.0f} s"
        lines.append(f"| {outcome.part.letter} | **{outcome.part.title}** | {verdict(outcome)}; {spent} | |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def heading(outcomes: list[Outcome], seed: int, is_dry: bool) -> str:
    about = next((outcome.about for outcome in outcomes if outcome.about), {})
    lines = [f"{name}: {value}" for name, value in about.items()]
    lines.append(f"seed: {seed}")
    return "\n".join([*([DRY] if is_dry else []), *lines])


def as_json(outcomes: list[Outcome], seed: int, is_dry: bool, code: int) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "dry_run": is_dry,
        "note": DRY if is_dry else "",
        "seed": seed,
        "about": next((outcome.about for outcome in outcomes if outcome.about), {}),
        "exit_code": code,
        "parts": {
            outcome.part.letter: {
                "title": outcome.part.title, "seconds": outcome.seconds, "budget_seconds": outcome.budget,
                "rows": outcome.rows, "skipped": outcome.skipped, "broken": outcome.broken,
                "false_claims": outcome.false_claims,
            }
            for outcome in outcomes
        },
    }  # fmt: skip
