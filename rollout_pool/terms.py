"""What the caller of ``rollout`` or ``stream`` wants besides the groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollout_pool.errors import RequestError
from rollout_pool.types import ResolvedRequest, RolloutGroup

Unit = Literal["groups", "samples"]
Rest = Literal["cancel", "partial"]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a caller wants besides the groups. Raises :class:`RequestError` for what makes no sense."""

    take: int | None = None
    unit: Unit = "groups"
    rest: Rest = "cancel"
    max_staleness: int | None = None
    call_id: str | None = None

    def __post_init__(self) -> None:
        for name, low in (("take", 1), ("max_staleness", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise RequestError(f"{name} must be an integer of at least {low}, or None, got {value!r}")
        for name, choices in (("unit", ("groups", "samples")), ("rest", ("cancel", "partial"))):
            value = getattr(self, name)
            if value not in choices:
                raise RequestError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if self.call_id is not None and not isinstance(self.call_id, str):
            raise RequestError(f"call_id must be a str or None, got {self.call_id!r}")

    def require_enough(self, requests: list[ResolvedRequest]) -> None:
        """Refuse to take more than the call can give."""
        most = sum(1 if self.unit == "groups" else request.sampling.n for request in requests)
        if self.take is not None and self.take > most:
            raise RequestError(
                f"take must be at most what the prompts give, {most} {self.unit}, got {self.take}"
            )

    def worth(self, group: RolloutGroup) -> int:
        """What a group counts for. One that failed or was cut counts for nothing."""
        if group.error is not None:
            return 0
        return 1 if self.unit == "groups" else len(group.samples)
