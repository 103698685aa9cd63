"""What was found as lines for a terminal or a log, and as JSON.

Needs no package: it must work when one is broken.
"""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import rollout_pool
from rollout_pool.doctor.check import Check, Status, worst

NAME_WIDTH = 18
STATUS_WIDTH = 9
LEAST_WIDTH = 60
COLOURS: dict[Status, str] = {"ok": "32", "warning": "33", "failed": "31;1", "skipped": "2"}


def lines(check: Check, *, is_terminal: bool) -> Iterator[str]:
    """Status, name and what was found; then what to do, if anything. A log gets each in one line."""
    indent = " " * (2 + STATUS_WIDTH + NAME_WIDTH + 1)
    width = max(LEAST_WIDTH, shutil.get_terminal_size().columns) if is_terminal else 1_000_000
    head = f"  {check.status:<{STATUS_WIDTH}}{check.name:<{NAME_WIDTH}} "
    options: dict[str, Any] = {"subsequent_indent": indent, "width": width, "break_on_hyphens": False}
    found = textwrap.wrap(check.found, initial_indent=head, **options) or [head.rstrip()]
    if is_terminal:
        coloured = f"\x1b[{COLOURS[check.status]}m{check.status:<{STATUS_WIDTH}}\x1b[0m"
        found[0] = f"  {coloured}{found[0][2 + STATUS_WIDTH :]}"
    yield from found
    if check.remedy:
        options["subsequent_indent"] = f"{indent}   "
        yield from textwrap.wrap(check.remedy, initial_indent=f"{indent}-> ", **options)


def summary(checks: Sequence[Check]) -> str:
    """How many of which status, the worst first."""
    count = Counter(check.status for check in checks)
    order: tuple[Status, ...] = ("failed", "warning", "ok", "skipped")
    return ", ".join(f"{count[status]} {status}" for status in order if count[status])


def as_json(checks: Sequence[tuple[str, Check]]) -> dict[str, Any]:
    """All records, in their order."""
    return {
        "rollout_pool": rollout_pool.__version__,
        "status": worst([check for _, check in checks]),
        "checks": [{"subject": subject, **dataclasses.asdict(check)} for subject, check in checks],
    }
