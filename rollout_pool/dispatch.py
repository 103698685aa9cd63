"""Groups on their way from the queue to an actor with room, and back.

Groups go out one by one, each to the least loaded actor that has the present weights; in parts to several
when more actors are idle than groups wait. One that has lost an actor returns to the queue with its old place
in it, and with what its other parts made.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ray.exceptions import RayError, RayTaskError

from rollout_pool.background import TaskSet
from rollout_pool.fair_queue import WorkQueue
from rollout_pool.ledger import Job, Ledger
from rollout_pool.parts import join, num_parts, split
from rollout_pool.ray_errors import one_line
from rollout_pool.recovery import Member
from rollout_pool.room import Room
from rollout_pool.routing import CallKey, GroupWork
from rollout_pool.types import CANCELLED, ResolvedRequest, RolloutGroup
from rollout_pool.weight_sync.session import Policy

ABORT_INTERVAL_S = 0.2
"""Between two tries to abort groups: an abortion may arrive before what it is meant for."""


@dataclass(frozen=True, slots=True)
class Part:
    """Samples of a group, all of them or some, and the actor that draws them."""

    request: ResolvedRequest
    work: GroupWork
    member: Member


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an actor has no samples. One that is not lost refused."""

    reason: str
    is_lost: bool


class Dispatcher:
    """What a pool has to do, and who does it.

    ``present_version`` tells which weights an actor must have to be given anything; ``lose`` is called
    with an actor that failed; for ``min_part_samples`` see :class:`~rollout_pool.config.PoolConfig`.
    """

    def __init__(
        self,
        ledger: Ledger,
        tasks: TaskSet,
        members: Mapping[str, Member],
        lose: Callable[[Member, str], None],
        present_version: Callable[[], int],
        min_part_samples: int | None = None,
    ) -> None:
        self._ledger = ledger
        self._tasks = tasks
        self._members = members
        self._lose = lose
        self._present_version = present_version
        self._min_part_samples = min_part_samples
        self._queue = WorkQueue()
        self._room = Room()
        self._running: dict[int, Sequence[Part]] = {}
        """Groups that actors have, by ticket."""
        self._pause: Policy | None = None
        self._is_idle = asyncio.Event()

    @property
    def num_queued(self) -> int:
        """Groups that no actor has yet."""
        return len(self._queue)

    def submit(
        self, requests: Iterable[ResolvedRequest], key: CallKey, on_finished: Callable[[Job], None]
    ) -> list[Job]:
        """Open an account for every group, and send out what there is room for."""
        jobs = [self._ledger.open(request, key, on_finished) for request in requests]
        for job in jobs:
            self._queue.push(job.work)
        self.dispatch()
        return jobs

    def offer(self, member: Member) -> None:
        """The load or the weights of this actor have changed."""
        if self._members.get(member.name) is member:
            self._room.update(member.load)
        self.dispatch()

    def dispatch(self) -> None:
        """Send waiting groups out for as long as an actor has room, and the present weights."""
        while self._queue.is_ready and self._pause is None and (member := self._least_loaded()) is not None:
            job = self._ledger.open_jobs[self._queue.pop().ticket]
            parts = self._parts(job, [member, *self._idle_beside(member, job)])
            for part in parts:
                part.member.load = part.member.load.on_submitted(part.work)
                self._room.update(part.member.load)
            self._running[job.ticket] = parts
            self._tasks.start(self._run(job, parts, self._ledger.send(job)))

    def hold(self, key: CallKey) -> None:
        """Send nothing more of this call out: its caller does not take what there is."""
        self._queue.hold(key)

    def release(self, key: CallKey) -> None:
        """Its caller does again."""
        self._queue.release(key)
        self.dispatch()

    def restart(self, job: Job, max_staleness: int) -> None:
        """Have a group drawn anew that is older than its caller wants."""
        if self._ledger.may_restart(job, max_staleness):
            self._queue.push(job.work)
            self.dispatch()

    def recall(self, jobs: Iterable[Job]) -> None:
        """Let what is unfinished come back with what it has: at once, or when its actor has let it go."""
        for job in jobs:
            if self._ledger.is_unfinished(job):
                job.is_recalled = True
                if self._queue.discard(job.ticket):
                    self._ledger.end_cancelled(job)
        self._call_back(jobs)

    def abandon(self, jobs: Iterable[Job]) -> None:
        """Cancel what a caller who left had still open. Does nothing after a complete call."""
        for job in jobs:
            if self._ledger.is_open(job):
                self._ledger.cancel(job)
                self._queue.discard(job.ticket)
        self._call_back(jobs)

    def clear(self) -> None:
        """Nothing that waits goes out any more."""
        self._queue = WorkQueue()

    @asynccontextmanager
    async def stopped(self, policy: Policy) -> AsyncIterator[None]:
        """Within it no actor runs anything, unless the policy is to go on. See ``sync_weights``."""
        if policy != "in_flight":
            self._pause = policy
        try:
            while self._running and policy != "in_flight":
                self._is_idle.clear()
                if policy == "abort":
                    self._abort(self._running)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_idle.wait(), ABORT_INTERVAL_S)
            yield
        finally:
            self._pause = None
            for member in self._members.values():
                self._room.update(member.load)
            self.dispatch()

    def _least_loaded(self) -> Member | None:
        """The actor that gets the next group. None: none has room."""
        while (name := self._room.least_loaded()) is not None:
            member = self._members.get(name)
            if member is not None and member.weight_version == self._present_version():
                return member
            self._room.remove(name)
        return None

    def _idle_beside(self, member: Member, job: Job) -> list[Member]:
        """Who takes samples of this group off the actor that it goes to."""
        least, samples = self._min_part_samples, job.work.num_samples
        if least is None or samples < 2 * least or len(self._queue) + 1 >= len(self._members):
            return []
        found = [self._members.get(name) for name in self._room.idle()]
        idle = [one for one in found if one is not None and one.weight_version == self._present_version()]
        if member not in idle:
            return []
        count = num_parts(samples, least, len(idle), len(self._queue))
        return [one for one in idle if one is not member][: count - 1]

    def _parts(self, job: Job, members: Sequence[Member]) -> Sequence[Part]:
        requests = split(job.for_engine(self._present_version()), len(members))
        return [
            Part(request, dataclasses.replace(job.work, num_samples=request.sampling.n), member)
            for request, member in zip(requests, members, strict=True)
        ]

    async def _run(self, job: Job, parts: Sequence[Part], attempt: int) -> None:
        """One group on its actors: its result, or back in the queue when one of them is lost."""
        version = self._present_version()
        outcomes = await asyncio.gather(*(self._run_part(part) for part in parts))
        groups = [outcome for outcome in outcomes if isinstance(outcome, RolloutGroup)]
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        del self._running[job.ticket]
        if not self._running:
            self._is_idle.set()
        refused = next((failure for failure in failures if not failure.is_lost), None)
        if refused is not None:
            self._ledger.fail(job, refused.reason)
        elif not failures:
            self._finish(job, attempt, join(job.request, groups))
        elif job.is_recalled and groups:
            self._ledger.finish(job, attempt, join(job.request, groups).replace(error=CANCELLED))
        elif self._ledger.may_replay(job, failures[0].reason):
            job.kept = tuple(sample for group in groups for sample in group.samples)
            job.kept_version = version
            self._queue.push(job.work)
        self.dispatch()

    async def _run_part(self, part: Part) -> RolloutGroup | Failure:
        member = part.member
        try:
            outcome: RolloutGroup | Failure = await member.handle.run.remote(part.request)
        except RayTaskError as error:  # the actor lives, and refused
            outcome = Failure(f"{member.name}: {one_line(error.cause)}", is_lost=False)
        except RayError as error:
            outcome = Failure(one_line(error), is_lost=True)
            self._lose(member, outcome.reason)
        member.load = member.load.on_completed(part.work)
        self.offer(member)
        return outcome

    def _finish(self, job: Job, attempt: int, group: RolloutGroup) -> None:
        if self._is_to_begin_anew(job, group):
            self._queue.push(job.work)
        else:
            self._ledger.finish(job, attempt, group)

    def _is_to_begin_anew(self, job: Job, group: RolloutGroup) -> bool:
        """Whether new weights were in the way of a group that its caller wants, and it had not begun."""
        has_begun = any(sample.token_ids.size for sample in group.samples)
        wanted = self._ledger.is_unfinished(job) and not job.is_recalled
        return wanted and group.is_cancelled and not has_begun

    def _call_back(self, jobs: Iterable[Job]) -> None:
        tickets = [job.ticket for job in jobs if job.ticket in self._running]
        if tickets:
            self._tasks.start(self._abort_until_gone(tickets))

    async def _abort_until_gone(self, tickets: list[int]) -> None:
        while tickets := [ticket for ticket in tickets if ticket in self._running]:
            self._abort(tickets)
            await asyncio.sleep(ABORT_INTERVAL_S)

    def _abort(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            for part in self._running[ticket]:
                part.member.handle.abort.remote(ticket)
