"""The calls that a pool is answering: what each wants of its groups, and when it has enough.

No Ray here.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import count

from rollout_pool.config import PoolConfig
from rollout_pool.dispatch import Dispatcher
from rollout_pool.errors import QueueFullError
from rollout_pool.ledger import Job, Ledger, cancelled_group
from rollout_pool.routing import CallKey
from rollout_pool.terms import Terms
from rollout_pool.types import ResolvedRequest, RolloutGroup, Sample


class Call:
    """One caller's call, from its groups' start until all that is wanted of them is handed over.

    present_version: of the pool's weights, now. window: how many finished groups may wait to be taken before
    no more of this call's groups go out; None when all are taken at once.
    """

    def __init__(
        self,
        key: CallKey,
        number: int,
        terms: Terms,
        dispatcher: Dispatcher,
        ledger: Ledger,
        present_version: Callable[[], int],
        window: int | None,
    ) -> None:
        self.key, self.number, self.terms = key, number, terms
        self.jobs: list[Job] = []
        self.has_left = False
        self._dispatcher, self._ledger = dispatcher, ledger
        self._present_version = present_version
        self._window = window
        self._finished: deque[Job] = deque()
        self._done: set[int] = set()
        """Tickets of what came back and was not sent out again."""
        self._event = asyncio.Event()

    def submit(self, requests: list[ResolvedRequest]) -> None:
        """Start all groups, unless the caller has left meanwhile."""
        if not self.has_left:
            requests = [self._without_old_samples(request) for request in requests]
            self.jobs = self._dispatcher.submit(requests, self.key, self._on_finished)

    async def groups(self) -> AsyncIterator[RolloutGroup]:
        """Each group when it finishes, until there are enough."""
        taken, is_cut = 0, False
        while (job := await self._next()) is not None and not self.has_left:
            if self._is_too_old(job) and self._renew(job, is_wanted=not is_cut):
                continue
            group = self._ledger.hand_over(job)
            taken += self.terms.worth(group)
            if not is_cut and self._is_enough(taken):  # before the caller takes it, who may be slow
                is_cut = True
                self._cut([])
            yield group
            if is_cut and self.terms.rest == "cancel":
                return

    async def all(self) -> list[RolloutGroup]:
        """One group per prompt, in input order; those after the cut are cancelled or partial.

        Nothing is handed over before the last has come, so that all are judged by the same weights.
        """
        held: list[Job] = []
        taken, is_cut = 0, False
        while True:
            job = await self._next()
            if job is not None:
                held.append(job)
                taken += self._worth(job)
                if is_cut or not self._is_enough(taken):
                    continue
            renewed = {one.ticket for one in held if self._is_too_old(one) and self._renew(one)}
            held = [one for one in held if one.ticket not in renewed]
            taken = sum(map(self._worth, held)) if renewed else taken
            if job is None and not renewed:
                return [self._ledger.hand_over(one) for one in self.jobs]
            if not is_cut and self._is_enough(taken):
                is_cut = True
                self._cut(held)

    def cancel(self, request_id: str | int | None) -> int:
        """Recall the groups that their caller named so, or all. Returns how many were not finished."""
        found = [
            job
            for job in self.jobs
            if self._ledger.is_unfinished(job) and (request_id is None or _is_named(job, request_id))
        ]
        self._dispatcher.recall(found)
        return len(found)

    def leave(self) -> None:
        """Nobody waits for this call any more: cancel what is open."""
        self.has_left = True
        self._dispatcher.abandon(self.jobs)
        self._dispatcher.release(self.key)
        self._event.set()

    async def _next(self) -> Job | None:
        """The next that has finished. None: there is no more to come."""
        while not self._finished:
            if len(self._done) == len(self.jobs) or self.has_left:
                return None
            self._event.clear()
            await self._event.wait()
        job = self._finished.popleft()
        if self._window is not None and len(self._finished) == self._window - 1:
            self._dispatcher.release(self.key)
        return job

    def _on_finished(self, job: Job) -> None:
        if job.ticket not in self._done:
            self._done.add(job.ticket)
            self._finished.append(job)
            if self._window is not None and len(self._finished) == self._window:
                self._dispatcher.hold(self.key)
        self._event.set()

    def _cut(self, kept: list[Job]) -> None:
        """Stop what is still open, but for these."""
        tickets = {job.ticket for job in kept}
        rest = [job for job in self.jobs if self._ledger.is_open(job) and job.ticket not in tickets]
        if self.terms.rest == "partial":
            self._dispatcher.recall(rest)
        else:
            self._dispatcher.abandon(rest)

    def _is_enough(self, taken: int) -> bool:
        return self.terms.take is not None and taken >= self.terms.take

    def _worth(self, job: Job) -> int:
        return 0 if job.group is None else self.terms.worth(job.group)

    # How old the tokens are

    def _is_too_old(self, job: Job) -> bool:
        """Whether what is to be handed over was drawn, in part, by weights that are too old."""
        limit = self.terms.max_staleness
        if limit is None or job.group is None or not self._ledger.is_open(job):
            return False
        return _is_older(job.group.samples, self._present_version() - limit)

    def _renew(self, job: Job, is_wanted: bool = True) -> bool:
        """Have it drawn anew, with nothing kept. False: it is over as it is, but without its samples."""
        limit, group = self.terms.max_staleness, job.group
        assert limit is not None
        assert group is not None
        if job.is_recalled or not is_wanted:
            job.group = cancelled_group(job.request)
            return False
        if group.error is not None:
            job.group = group.replace(samples=[])
            return False
        self._done.discard(job.ticket)
        job.request = self._without_old_samples(job.request)
        self._dispatcher.restart(job, limit)
        return True

    def _without_old_samples(self, request: ResolvedRequest) -> ResolvedRequest:
        """Samples to go on with that are too old already start anew."""
        limit = self.terms.max_staleness
        if limit is None:
            return request
        oldest = self._present_version() - limit
        kept = tuple(sample for sample in request.resume if not _is_older([sample], oldest))
        return dataclasses.replace(request, resume=kept)


class Calls:
    """All calls that a pool is answering, numbered from ``first``."""

    def __init__(
        self,
        config: PoolConfig,
        dispatcher: Dispatcher,
        ledger: Ledger,
        present_version: Callable[[], int],
        first: int = 0,
    ) -> None:
        self._config = config
        self._dispatcher, self._ledger = dispatcher, ledger
        self._present_version = present_version
        self._open: dict[int, Call] = {}
        self._numbers = count(first)

    def open(self, terms: Terms, caller: str, *, is_stream: bool) -> Call:
        """Take a call in. It is to be closed."""
        number = next(self._numbers)
        if terms.max_staleness is None:
            terms = dataclasses.replace(terms, max_staleness=self._config.max_staleness)
        key = CallKey(caller, number if terms.call_id is None else terms.call_id)
        window = self._config.stream_window if is_stream else None
        call = Call(key, number, terms, self._dispatcher, self._ledger, self._present_version, window)
        self._open[number] = call
        return call

    def submit(self, call: Call, requests: list[ResolvedRequest]) -> None:
        """Start the groups of a call. Raises :class:`QueueFullError` when they would be too many."""
        call.terms.require_enough(requests)
        waiting, limit = self._dispatcher.num_queued, self._config.max_queued_groups
        if waiting + len(requests) > limit:
            raise QueueFullError(
                f"{len(requests)} groups do not go into the queue: {waiting} wait, and max_queued_groups is "
                f"{limit}; send them in parts (stream_prompts does), wait, or raise max_queued_groups"
            )
        call.submit(requests)

    def close(self, call: Call) -> None:
        """The caller has got everything, or has left."""
        call.leave()
        self._open.pop(call.number, None)

    def cancel(self, request_id: str | int | None, call_id: str | None, caller: str | None) -> int:
        """Recall groups by the name of the request, of the call, or both. None as caller: of all."""
        calls = [
            call
            for call in self._open.values()
            if caller in (None, call.key.caller) and call_id in (None, call.terms.call_id)
        ]
        return sum(call.cancel(request_id) for call in calls)


def _is_named(job: Job, request_id: str | int) -> bool:
    return job.request.identity.startswith("name:") and job.request.request_id == request_id


def _is_older(samples: Iterable[Sample], oldest: int) -> bool:
    """Whether a token is from weights before version ``oldest``."""
    return any(sample.token_versions.size and sample.token_versions.min() < oldest for sample in samples)
