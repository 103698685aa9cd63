"""The verdict as a table for a person, as lines for a log, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollout_pool.actors.rank_records import RollPlan
from rollout_pool.tp_validation.findings import Finding
from rollout_pool.tp_validation.measured import Outcome

MAX_DETAILS = 5
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One size in one dtype."""

    outcome: Outcome
    findings: list[Finding]


@dataclass(frozen=True)
class Report:
    """Everything that was found."""

    model: str
    backend: str
    plan: RollPlan
    rows: list[Row]

    @property
    def passed(self) -> bool:
        """Whether every stated tolerance holds."""
        return all(finding.passed for row in self.rows for finding in row.findings)

    def violations(self) -> Iterator[str]:
        """One line per violation: size, dtype, check, figure, tolerance; then what it was, where known."""
        for row in self.rows:
            for finding in row.findings:
                if not finding.passed:
                    where = f"size {finding.size}, {finding.dtype}, {finding.check}"
                    yield f"FAILED {where}: {finding.figure} (tolerance: {finding.tolerance})"
                    yield from (f"  {detail}" for detail in finding.details[:MAX_DETAILS])
                    if len(finding.details) > MAX_DETAILS:
                        yield f"  ... and {len(finding.details) - MAX_DETAILS} more"

    def notes(self) -> Iterator[str]:
        """What passed and is worth a look: tokens that part at a tie."""
        for row in self.rows:
            for finding in row.findings:
                if finding.passed:
                    for detail in finding.details[:MAX_DETAILS]:
                        yield f"note: size {finding.size}, {finding.dtype}, {finding.check}: {detail}"

    def verdict(self) -> str:
        """The last line."""
        checks = [finding for row in self.rows for finding in row.findings if finding.tolerance]
        failed = sum(not finding.passed for finding in checks)
        if failed:
            return f"{failed} of {len(checks)} checks FAILED"
        return f"all {len(checks)} checks passed"

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "model": self.model,
            "backend": self.backend,
            "plan": {
                "prompts": len(self.plan.prompts),
                "prompt_tokens": sum(map(len, self.plan.prompts)),
                "new_tokens": self.plan.new_tokens,
                "samples": self.plan.num_samples,
                "seed": self.plan.seed,
            },
            "passed": self.passed,
            "sizes": [_row_as_json(row) for row in self.rows],
            "violations": list(self.violations()),
        }

    def tables(self) -> Iterator[Any]:
        """For rich: the checks, and the ranks."""
        yield _checks_table(self.rows)
        if any(row.outcome.measured is not None for row in self.rows):
            yield _ranks_table(self.rows)


def _row_as_json(row: Row) -> dict[str, Any]:
    outcome = row.outcome
    status = "refused" if outcome.refused else "failed" if outcome.failed else "measured"
    found: dict[str, Any] = {
        "size": outcome.size,
        "dtype": outcome.dtype,
        "status": status,
        "reason": outcome.refused or outcome.failed,
        "findings": [
            {**dataclasses.asdict(finding), "values": _json_values(finding)} for finding in row.findings
        ],
    }
    if outcome.measured is not None:
        measured = outcome.measured
        found["tokens_per_second"] = measured.rolled.new_tokens / max(measured.rolled.seconds, 1e-9)
        found["ranks"] = [
            {
                "rank": place.rank,
                "host": place.host,
                "device": place.device,
                "elements": sum(share.elements for share in shares),
                "weight_bytes": usage.weights,
                "kv_bytes": usage.kv,
                "peak_bytes": usage.peak,
            }
            for place, shares, usage in _by_rank(outcome)
        ]
    return found


def _json_values(finding: Finding) -> dict[str, float | str]:
    """JSON has no number for inf and nan: they are text."""
    values = finding.values or {}
    return {name: value if math.isfinite(value) else str(value) for name, value in values.items()}


def _by_rank(outcome: Outcome) -> Iterator[tuple[Any, Any, Any]]:
    measured = outcome.measured
    if measured is not None:
        yield from zip(measured.places, measured.shares, measured.usage, strict=True)


def _checks_table(rows: list[Row]) -> Any:
    from rich.box import ASCII2
    from rich.table import Table

    table = Table(box=ASCII2, title="Checks", title_justify="left")
    for name in ("size", "dtype", "check", "figure", "tolerance", ""):
        table.add_column(name, overflow="fold")
    for row in rows:
        for finding in row.findings:
            verdict = "" if not finding.tolerance else "ok" if finding.passed else "FAILED"
            cells = (finding.check, finding.figure, finding.tolerance, verdict)
            table.add_row(str(finding.size), finding.dtype, *map(_plain, cells))
        table.add_section()
    return table


def _ranks_table(rows: list[Row]) -> Any:
    from rich.box import ASCII2
    from rich.table import Table

    table = Table(box=ASCII2, title="Ranks", title_justify="left")
    for name in ("size", "dtype", "rank", "host", "device"):
        table.add_column(name, overflow="fold")
    for name in ("elements", "weights MiB", "KV MiB", "peak MiB", "tokens/s"):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        outcome = row.outcome
        for place, shares, usage in _by_rank(outcome):
            assert outcome.measured is not None
            rolled = outcome.measured.rolled
            rate = f"{rolled.new_tokens / max(rolled.seconds, 1e-9):.1f}" if place.rank == 0 else ""
            memory = (f"{size / MIB:,.1f}" for size in (usage.weights, usage.kv, usage.peak))
            elements = f"{sum(share.elements for share in shares):,}"
            where = (str(outcome.size), outcome.dtype, str(place.rank), _plain(place.host), place.device)
            table.add_row(*where, elements, *memory, rate)
        table.add_section()
    return table


def _plain(text: str) -> str:
    """Brackets are markup to rich."""
    return text.replace("[", r"\[")
