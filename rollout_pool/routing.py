"""Which group runs next, and where: plain records and pure functions, without Ray.

The policy is for throughput. Groups of a call go out longest expected first, so that the last ones
to start are short; each goes to the actor with the fewest tokens left, and only while that
actor has less than a batch of samples plus a small lookahead, so that what waits stays free to
go elsewhere. Between callers, and between the calls of one, the next group comes from whoever has
been given the fewest tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

LOOKAHEAD_FRACTION = 4
"""An actor may have ``num_slots / 4`` samples more than slots: enough to refill the slots that
free up between two reports, few enough to leave the tail to whoever is idle."""


@dataclass(frozen=True, slots=True)
class CallKey:
    """Whose turn it is: who called, and which of that caller's calls it was."""

    caller: str = ""
    call: str | int = 0


@dataclass(frozen=True, slots=True)
class GroupWork:
    """One group as routing sees it. ``ticket`` is its arrival number, unique in a pool."""

    ticket: int
    num_samples: int
    max_new_tokens: int
    key: CallKey = CallKey()
    expected_new_tokens: int | None = None
    """Of one sample; None: all that it may have."""

    @property
    def tokens(self) -> int:
        """New tokens that this group is expected to take."""
        return self.num_samples * (self.expected_new_tokens or self.max_new_tokens)


@dataclass(frozen=True, slots=True)
class ActorLoad:
    """What one actor was given and has done, as counts since it started.

    Counts that only grow cannot drift: a late report is simply overtaken. ``reported_samples``
    is the actor's own count of samples that ended, which runs ahead of ``completed_samples``
    (all samples of completed groups) while a group has stragglers.
    """

    actor: str
    num_slots: int
    submitted_samples: int = 0
    submitted_tokens: int = 0
    completed_samples: int = 0
    completed_tokens: int = 0
    reported_samples: int = 0

    @property
    def outstanding_samples(self) -> int:
        """Samples that still need a slot or hold one."""
        return self.submitted_samples - max(self.completed_samples, self.reported_samples)

    @property
    def remaining_tokens(self) -> int:
        """Tokens expected to come; a group's finished samples no longer count."""
        of_open_groups = self.submitted_samples - self.completed_samples
        budget = self.submitted_tokens - self.completed_tokens
        return budget * self.outstanding_samples // of_open_groups if of_open_groups else 0

    @property
    def has_room(self) -> bool:
        """Whether another group, of any size, may be sent here now.

        Asked of what is outstanding without the new group: an actor then never runs dry because
        the next group is large, and a group with more samples than slots goes out whole.
        """
        lookahead = max(1, self.num_slots // LOOKAHEAD_FRACTION)
        return self.outstanding_samples < self.num_slots + lookahead

    def on_submitted(self, work: GroupWork) -> Self:
        """The load after ``work`` was sent to this actor."""
        samples, tokens = self.submitted_samples + work.num_samples, self.submitted_tokens + work.tokens
        return replace(self, submitted_samples=samples, submitted_tokens=tokens)

    def on_completed(self, work: GroupWork) -> Self:
        """The load after the group came back, whole or failed."""
        samples, tokens = self.completed_samples + work.num_samples, self.completed_tokens + work.tokens
        return replace(self, completed_samples=samples, completed_tokens=tokens)

    def on_progress(self, samples_ended: int) -> Self:
        """The load after the actor reported how many samples ended since it started."""
        return replace(self, reported_samples=max(self.reported_samples, samples_ended))
