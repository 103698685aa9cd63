"""One thing that was looked at, and how looking at it is kept from ending everything."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rollout_pool.errors import CapacityError, RolloutPoolError, one_line

Status = Literal["ok", "warning", "failed", "skipped"]
T = TypeVar("T")
Checks = Generator["Check", None, T]
"""A check yields records and returns what later ones need to know."""


@dataclass(frozen=True, slots=True)
class Check:
    """What was found, and what to do."""

    name: str
    status: Status
    found: str
    """One line; of a skipped check, why."""
    remedy: str = ""
    """One line; empty when there is nothing to do."""


def ok(name: str, found: str) -> Check:
    """It is as it should be."""
    return Check(name, "ok", found)


def warning(name: str, found: str, remedy: str) -> Check:
    """It works, or works so far; but there is something to know."""
    return Check(name, "warning", found, remedy)


def failed(name: str, found: str, remedy: str) -> Check:
    """A pool would not run, or not as configured."""
    return Check(name, "failed", found, remedy)


def skipped(name: str, why: str) -> Check:
    """There is nothing to check, or something else must be put right first."""
    return Check(name, "skipped", why)


def of_error(name: str, error: RolloutPoolError, remedy: str = "") -> Check:
    """An error of ours, which names the input at fault and ends with the way out."""
    text = str(error)
    if not remedy:
        found, _, way_out = text.rpartition(
            ": " if isinstance(error, CapacityError) and "; " not in text else "; "
        )
        if found:
            return failed(name, found, way_out)
    return failed(name, text, remedy or "use another model, or change the configuration accordingly")


def guarded(name: str, check: Callable[..., Checks[T]], *arguments: Any) -> Checks[T | None]:
    """Run a check. An error is a failed record of this ``name``, never the end of the others."""
    try:
        return (yield from check(*arguments))
    except RolloutPoolError as error:
        yield of_error(name, error)
    except Exception as error:
        yield failed(
            name,
            f"the check broke off: {type(error).__name__}: {one_line(error, 300)}",
            "put right what the checks before it say; if they are all well, report this",
        )
    return None


def worst(checks: Iterator[Check] | list[Check]) -> Status:
    """The status of them all: failed, warning or ok."""
    found = {check.status for check in checks}
    return next((status for status in ("failed", "warning") if status in found), "ok")
