"""The account of every group in a pool: each is opened once and settled once.

No Ray here, and no policy: who runs a group is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from dataclasses import dataclass

from rollout_pool.requests import failed_group
from rollout_pool.routing import GroupWork
from rollout_pool.types import ResolvedRequest, RolloutGroup


@dataclass(eq=False, slots=True)
class Job:
    """One group on its way through the pool."""

    work: GroupWork
    request: ResolvedRequest
    done: asyncio.Future[RolloutGroup]
    """Never holds an exception: what goes wrong with a group is in its ``error``."""
    actor: str | None = None
    num_losses: int = 0

    @property
    def ticket(self) -> int:
        """The arrival number in this pool."""
        return self.work.ticket

    def for_engine(self) -> ResolvedRequest:
        """What goes to an actor: named by the ticket, because two calls may use the same request id,
        and without metadata, which is the caller's and may need the caller's modules to unpickle."""
        return dataclasses.replace(self.request, request_id=self.ticket, metadata=None)


class Ledger:
    """submitted = returned + failed + cancelled + in_flight, after every one of its methods."""

    def __init__(self, max_replays: int) -> None:
        self._max_replays = max_replays
        self._tickets = itertools.count()
        self.open_jobs: dict[int, Job] = {}
        self.submitted = self.returned = self.failed = self.cancelled = self.replayed = 0

    @property
    def in_flight(self) -> int:
        """Groups whose caller still waits for them."""
        return len(self.open_jobs)

    def open(self, request: ResolvedRequest) -> Job:
        """Take a group in."""
        sampling = request.sampling
        work = GroupWork(next(self._tickets), sampling.n, sampling.max_new_tokens)
        job = Job(work, request, asyncio.get_running_loop().create_future())
        self.open_jobs[job.ticket] = job
        self.submitted += 1
        return job

    def is_open(self, job: Job) -> bool:
        """Whether the job's caller still waits for it."""
        return job.ticket in self.open_jobs

    def deliver(self, job: Job, group: RolloutGroup) -> None:
        """Hand a group to its caller under the caller's own names. One with an error counts as failed."""
        if job.done.cancelled():  # by its caller, whose own clean-up is still to come
            self.cancel(job)
        if not self._close(job):
            return
        if group.error is None:
            self.returned += 1
        else:
            self.failed += 1
        request = job.request
        job.done.set_result(
            group.replace(request_id=request.request_id, index=request.index, metadata=request.metadata)
        )

    def fail(self, job: Job, reason: str) -> None:
        """Deliver a group without samples."""
        self.deliver(job, failed_group(job.request, reason))

    def cancel(self, job: Job) -> None:
        """Settle a job that nobody waits for any more."""
        if self._close(job):
            self.cancelled += 1
            job.done.cancel()

    def cancel_all(self, reason: str) -> None:
        """Settle everything, for callers who still wait: their groups say why they have no samples."""
        for job in list(self.open_jobs.values()):
            self._close(job)
            self.cancelled += 1
            if not job.done.cancelled():
                job.done.set_result(failed_group(job.request, reason))

    def may_replay(self, job: Job, cause: str) -> bool:
        """Count the loss of the job's actor. False: no replay is left, or none is wanted."""
        if not self.is_open(job):
            return False
        job.num_losses += 1
        if job.num_losses > self._max_replays:
            times = "once" if job.num_losses == 1 else f"{job.num_losses} times"
            self.fail(
                job,
                f"its rollout actor was lost {times}, and max_replays is {self._max_replays}; "
                f"the last loss: {cause}",
            )
            return False
        self.replayed += 1
        return True

    def _close(self, job: Job) -> bool:
        return self.open_jobs.pop(job.ticket, None) is not None
