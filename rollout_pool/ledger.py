"""The account of every group in a pool: each is opened once and settled once.

No Ray here, and no policy: who runs a group is decided elsewhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from rollout_pool.length_estimates import LengthEstimates
from rollout_pool.parts import with_samples
from rollout_pool.requests import failed_group
from rollout_pool.routing import CallKey, GroupWork
from rollout_pool.types import CANCELLED, ResolvedRequest, RolloutGroup, Sample

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Job:
    """One group on its way through the pool."""

    work: GroupWork
    request: ResolvedRequest
    on_finished: Callable[[Job], None]
    """Called whenever ``group`` is there, or the job was settled by others than its call."""
    group: RolloutGroup | None = None
    """What has come of it, under the caller's own names, for as long as nobody asks for more."""
    attempt: int = 0
    """Counts what was sent out, so that an answer to an earlier one is known as such."""
    is_recalled: bool = False
    """Whether it is to come back with what it has."""
    num_losses: int = 0
    num_restarts: int = 0
    kept: tuple[Sample, ...] = ()
    """What parts of it made whose sibling's actor was lost."""
    kept_version: int = 0
    """Of the weights that it was made with."""

    @property
    def ticket(self) -> int:
        """The arrival number in this pool."""
        return self.work.ticket

    @property
    def fields(self) -> dict[str, object]:
        """What a log says it is about."""
        return {"request_id": self.request.request_id, "group": self.ticket, "attempt": self.attempt}

    def for_engine(self, version: int) -> ResolvedRequest:
        """What goes to actors with weights of ``version``: named by the ticket, because two calls may use the
        same request id, and without metadata, which is the caller's and may need the caller's modules to
        unpickle."""
        request = dataclasses.replace(self.request, request_id=self.ticket, metadata=None)
        return with_samples(request, self.kept if version == self.kept_version else ())


class Ledger:
    """submitted = returned + failed + cancelled + in_flight, after every one of its methods.

    A group is in flight until it is handed to its caller, who may be slow to take it.
    """

    def __init__(self, max_replays: int) -> None:
        self._max_replays = max_replays
        self._tickets = itertools.count()
        self._lengths = LengthEstimates()
        self.open_jobs: dict[int, Job] = {}
        self.submitted = self.returned = self.failed = self.cancelled = 0
        self.replayed = self.restarted = self.dropped = 0

    @property
    def in_flight(self) -> int:
        """Groups whose caller still waits for them."""
        return len(self.open_jobs)

    def open(self, request: ResolvedRequest, key: CallKey, on_finished: Callable[[Job], None]) -> Job:
        """Take a group in."""
        sampling = request.sampling
        expected = self._lengths.expected(request)
        work = GroupWork(next(self._tickets), sampling.n, sampling.max_new_tokens, key, expected)
        job = Job(work, request, on_finished)
        self.open_jobs[job.ticket] = job
        self.submitted += 1
        return job

    def is_open(self, job: Job) -> bool:
        """Whether the job's caller still waits for it."""
        return job.ticket in self.open_jobs

    def is_unfinished(self, job: Job) -> bool:
        """Whether there is something to wait for."""
        return job.group is None and self.is_open(job)

    def send(self, job: Job) -> int:
        """An actor is given the job. Returns the number of the attempt, which :meth:`finish` asks for."""
        job.attempt += 1
        return job.attempt

    def finish(self, job: Job, attempt: int, group: RolloutGroup) -> bool:
        """A result has come. It is held for the caller under the caller's own names.

        False: it is dropped, because the job is settled, has a result, or is at another attempt.
        """
        if attempt != job.attempt or not self.is_unfinished(job):
            self.dropped += 1
            return False
        self._lengths.learn(job.request, group)
        self._hold(job, group)
        return True

    def fail(self, job: Job, reason: str) -> None:
        """Let a job end without samples."""
        if self.is_unfinished(job):
            self._hold(job, failed_group(job.request, reason))

    def end_cancelled(self, job: Job) -> None:
        """Let a job end without samples because it was cancelled."""
        if self.is_unfinished(job):
            self._hold(job, cancelled_group(job.request))

    def hand_over(self, job: Job) -> RolloutGroup:
        """The caller takes what has come of a job, now. It is settled by what is in it, once."""
        assert job.group is not None
        self._settle(job)
        return job.group

    def cancel(self, job: Job) -> None:
        """Settle a job that its caller does not want any more, whatever there is of it."""
        if self.open_jobs.pop(job.ticket, None) is not None:
            self.cancelled += 1
            job.group = cancelled_group(job.request)
            job.on_finished(job)

    def cancel_all(self, reason: str) -> None:
        """Settle everything. What has come is handed over; the rest says why it has no samples."""
        for job in list(self.open_jobs.values()):
            if job.group is None:
                del self.open_jobs[job.ticket]
                self.cancelled += 1
                job.group = failed_group(job.request, reason)
            self._settle(job)
            job.on_finished(job)

    def may_replay(self, job: Job, cause: str) -> bool:
        """Count the loss of the job's actor. False: no replay is left, or none is wanted."""
        if not self.is_unfinished(job):
            return False
        if job.is_recalled:
            self.end_cancelled(job)
            return False
        job.num_losses += 1
        if job.num_losses > self._max_replays:
            self.fail(
                job,
                f"its rollout actor was lost {_times(job.num_losses)}, and max_replays is "
                f"{self._max_replays}; the last loss: {cause}",
            )
            return False
        self.replayed += 1
        logger.info("a group runs again, for its actor was lost", extra=job.fields)
        return True

    def may_restart(self, job: Job, max_staleness: int) -> bool:
        """Take a result that is too old back, to be drawn anew. False: it failed, after too many times."""
        assert self.is_open(job)
        job.group = None
        if job.num_restarts >= self._max_replays:
            self.fail(
                job,
                f"its tokens were more than max_staleness ({max_staleness}) versions old when it was done, "
                f"{_times(job.num_restarts + 1)}, and max_replays is {self._max_replays}; "
                "allow more versions, or sync less often",
            )
            return False
        job.num_restarts += 1
        self.restarted += 1
        logger.info("a group is drawn anew, for it was too old", extra=job.fields)
        return True

    def _hold(self, job: Job, group: RolloutGroup) -> None:
        request = job.request
        job.group = group.replace(
            request_id=request.request_id, index=request.index, metadata=request.metadata
        )
        job.on_finished(job)

    def _settle(self, job: Job) -> None:
        if self.open_jobs.pop(job.ticket, None) is None:
            return
        assert job.group is not None
        if job.group.error is None:
            self.returned += 1
        elif job.group.is_cancelled:
            self.cancelled += 1
        else:
            self.failed += 1
            logger.info("a group failed; its caller knows why", extra=job.fields)


def cancelled_group(request: ResolvedRequest) -> RolloutGroup:
    """The group of a request that was cancelled before there was anything of it."""
    return failed_group(request, CANCELLED).replace(error=CANCELLED)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
