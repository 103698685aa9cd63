"""Groups on their way from the queue to an actor with room, and back.

Whole groups go out, one by one, each to the least loaded actor that has the present weights. One whose actor
is lost returns to the queue with its old place in it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

from ray.exceptions import RayError, RayTaskError

from rollout_pool.background import TaskSet
from rollout_pool.ledger import Job, Ledger
from rollout_pool.recovery import Member, one_line
from rollout_pool.routing import WorkQueue, next_actor
from rollout_pool.types import ResolvedRequest, RolloutGroup
from rollout_pool.weight_sync.session import Policy

ABORT_INTERVAL_S = 0.2
"""Between two tries to abort groups that are in the way of new weights."""


class Dispatcher:
    """What a pool has to do, and who does it.

    ``present_version`` tells which weights an actor must have to be given anything; ``lose`` is called
    with an actor that failed.
    """

    def __init__(
        self,
        ledger: Ledger,
        tasks: TaskSet,
        members: Mapping[str, Member],
        lose: Callable[[Member, str], None],
        present_version: Callable[[], int],
    ) -> None:
        self._ledger = ledger
        self._tasks = tasks
        self._members = members
        self._lose = lose
        self._present_version = present_version
        self._queue = WorkQueue()
        self._running: dict[int, tuple[Job, Member]] = {}
        """Groups that an actor has, by ticket."""
        self._pause: Policy | None = None
        self._is_idle = asyncio.Event()

    @property
    def num_queued(self) -> int:
        """Groups that no actor has yet."""
        return len(self._queue)

    def submit(self, requests: Iterable[ResolvedRequest]) -> list[Job]:
        """Open an account for every group, and send out what there is room for."""
        jobs = [self._ledger.open(request) for request in requests]
        for job in jobs:
            self._queue.push(job.work)
        self.dispatch()
        return jobs

    def dispatch(self) -> None:
        """Send waiting groups out for as long as an actor has room, and the present weights."""
        version = self._present_version()
        while len(self._queue) and self._pause is None:
            current = (member for member in self._members.values() if member.weight_version == version)
            name = next_actor(member.load for member in current)
            if name is None:
                return
            job = self._ledger.open_jobs[self._queue.pop().ticket]
            member = self._members[name]
            member.load = member.load.on_submitted(job.work)
            self._running[job.ticket] = (job, member)
            self._tasks.start(self._run(job, member))

    def abandon(self, jobs: Iterable[Job]) -> None:
        """Cancel what a caller who left had still open. Does nothing after a complete call."""
        for job in jobs:
            if not self._ledger.is_open(job):
                continue
            self._ledger.cancel(job)
            self._queue.discard(job.ticket)
            if (member := self._members.get(job.actor or "")) is not None:
                member.handle.abort.remote(job.ticket)

    def clear(self) -> None:
        """Nothing that waits goes out any more."""
        self._queue = WorkQueue()

    @asynccontextmanager
    async def stopped(self, policy: Policy) -> AsyncIterator[None]:
        """Within it no actor runs anything, unless the policy is to go on. See ``sync_weights``."""
        if policy == "in_flight":
            yield
            return
        self._pause = policy
        try:
            while self._running:
                self._is_idle.clear()
                if policy == "abort":  # again and again: what was just sent may arrive after its abortion
                    for job, member in self._running.values():
                        member.handle.abort.remote(job.ticket)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_idle.wait(), ABORT_INTERVAL_S)
            yield
        finally:
            self._pause = None
            self.dispatch()

    async def _run(self, job: Job, member: Member) -> None:
        """One group on one actor: delivered, or back in the queue when the actor is lost."""
        job.actor = member.name
        try:
            group = await member.handle.run.remote(job.for_engine())
            if self._pause == "abort" and self._ledger.is_open(job) and not _has_begun(group):
                self._queue.push(job.work)
            else:
                self._ledger.deliver(job, group)
        except RayTaskError as error:  # the actor lives, and refused
            self._ledger.fail(job, f"{member.name}: {one_line(error.cause)}")
        except RayError as error:
            self._lose(member, one_line(error))
            if self._ledger.may_replay(job, one_line(error)):
                self._queue.push(job.work)
        del self._running[job.ticket]
        if not self._running:
            self._is_idle.set()
        member.load = member.load.on_completed(job.work)
        self.dispatch()


def _has_begun(group: RolloutGroup) -> bool:
    """Whether there is anything in it to deliver."""
    return group.error is not None or any(sample.token_ids.size for sample in group.samples)
