"""Calls of a pool on actors that only pretend: cut, cancelled, aged, fair, and always accounted for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import RayError

from rollout_pool import PoolConfig, QueueFullError, RequestError, RolloutRequest, SamplingParams
from rollout_pool.background import TaskSet
from rollout_pool.calls import Call, Calls
from rollout_pool.dispatch import Dispatcher
from rollout_pool.ledger import Ledger
from rollout_pool.requests import resolve_requests
from rollout_pool.routing import ActorLoad
from rollout_pool.terms import Terms
from rollout_pool.types import ResolvedRequest, RolloutGroup, Sample


class Handle:
    """A rollout actor as the dispatcher sees it; groups end when a test says so."""

    def __init__(self, versions: list[int]) -> None:
        self._versions = versions
        self.running: dict[int, tuple[ResolvedRequest, asyncio.Future[RolloutGroup]]] = {}
        self.begun: dict[int, int] = {}
        self.run = SimpleNamespace(remote=self._run)
        self.abort = SimpleNamespace(remote=self._abort)

    def _run(self, request: ResolvedRequest) -> Awaitable[RolloutGroup]:
        future: asyncio.Future[RolloutGroup] = asyncio.get_running_loop().create_future()
        self.running[request.request_id] = request, future
        return future

    def begin(self, ticket: int) -> None:
        """Its first token is drawn now."""
        self.begun.setdefault(ticket, self._versions[-1])

    def end(self, ticket: int, reason: str = "length", error: str | None = None) -> None:
        self.begin(ticket)
        self._finish(ticket, reason, error)

    def lose(self) -> None:
        for _, future in self.running.values():
            future.set_exception(RayError("the actor died"))
        self.running.clear()
        self.begun.clear()

    def _abort(self, ticket: int) -> None:
        if ticket in self.running:
            self._finish(ticket, "aborted", "cancelled")

    def _finish(self, ticket: int, reason: str, error: str | None) -> None:
        request, future = self.running.pop(ticket)
        first = self.begun.pop(ticket, None)
        old = [int(sample.token_versions.min()) for sample in request.resume]
        if first is not None:
            first = min([first, *old])
        count, offset = 0 if first is None else request.sampling.n, request.sample_offset
        kept = {one.sample_index: one for one in request.resume if one.finish_reason != "aborted"}
        samples = [
            kept.get(number) or sample(number, first, self._versions[-1], reason)
            for number in range(offset, offset + count)
        ]
        future.set_result(
            RolloutGroup(
                request.request_id, request.index, np.array([1]), samples, error, sampling=request.sampling
            )
        )


def sample(index: int, first: int, last: int, reason: str = "length") -> Sample:
    ids, logprobs = np.array([5, 6]), np.zeros(2, np.float32)
    return Sample(ids, "", logprobs, logprobs, reason, None, last, np.array([first, last]), 0, index)  # type: ignore[arg-type]


class Bench:
    """The parts of a pool that answer calls, with ``num_actors`` pretended actors."""

    def __init__(self, num_actors: int = 1, num_slots: int = 4, **config: Any) -> None:
        self.errors: list[BaseException] = []
        self.versions = [0]
        self.ledger = Ledger(max_replays=2)
        self.tasks = TaskSet(self.errors.append)
        self.members: dict[str, Any] = {}
        self.num_slots = num_slots
        present, settings = lambda: self.versions[-1], PoolConfig(model="none", **config)
        self.dispatcher = Dispatcher(
            self.ledger, self.tasks, self.members, self.lose, present, settings.min_part_samples
        )
        self.calls = Calls(settings, self.dispatcher, self.ledger, present)
        self.names = iter(range(1000))
        for _ in range(num_actors):
            self.add()

    def add(self) -> None:
        name = f"actor-{next(self.names)}"
        member = SimpleNamespace(
            name=name,
            handle=Handle(self.versions),
            load=ActorLoad(name, self.num_slots),
            weight_version=self.versions[-1],
        )
        self.members[name] = member
        self.dispatcher.offer(member)  # type: ignore[arg-type]

    def lose(self, member: Any, cause: str) -> None:
        if self.members.pop(member.name, None) is not None:
            self.add()

    def open(self, caller: str = "", is_stream: bool = False, **terms: Any) -> Call:
        return self.calls.open(Terms(**terms), caller, is_stream=is_stream)

    async def submit(self, call: Call, prompts: list[Any], **sampling: Any) -> None:
        self.calls.submit(call, resolve_requests(prompts, SamplingParams(**sampling), seed=1))
        await self.settled()

    def sync(self) -> None:
        """New weights, in flight."""
        self.versions.append(self.versions[-1] + 1)
        for member in self.members.values():
            member.weight_version = self.versions[-1]
            self.dispatcher.offer(member)

    @property
    def running(self) -> dict[int, Handle]:
        return {t: m.handle for m in self.members.values() for t in m.handle.running}

    def begin(self, *tickets: int) -> None:
        for ticket in tickets:
            self.running[ticket].begin(ticket)

    async def end(self, *tickets: int, **how: Any) -> None:
        for ticket in tickets:
            self.running[ticket].end(ticket, **how)
            await self.settled()

    async def settled(self) -> None:
        """All that can happen without the next event has happened."""
        for _ in range(8):
            await asyncio.sleep(0)
        assert not self.errors
        assert self.counts[0] == sum(self.counts[1:])

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        """submitted, returned, failed, cancelled, in flight"""
        ledger = self.ledger
        return ledger.submitted, ledger.returned, ledger.failed, ledger.cancelled, ledger.in_flight


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


async def collect(call: Call) -> list[RolloutGroup]:
    return [group async for group in call.groups()]


def oldest(group: RolloutGroup) -> int | None:
    return min((int(s.token_versions.min()) for s in group.samples), default=None)


PROMPTS = [[1], [2], [3], [4], [5]]


def test_a_stream_ends_with_the_first_k_groups_and_a_failed_one_does_not_count() -> None:
    async def test() -> None:
        bench = Bench(num_slots=8)
        call = bench.open(is_stream=True, take=2)
        await bench.submit(call, PROMPTS)
        groups = asyncio.ensure_future(collect(call))
        await bench.end(3)
        await bench.end(1, error="the logits are not finite")
        assert not groups.done()
        await bench.end(4)
        assert [(g.index, g.error) for g in await groups] == [
            (3, None),
            (1, "the logits are not finite"),
            (4, None),
        ]
        await bench.settled()
        assert bench.counts == (5, 2, 1, 2, 0)
        assert not bench.running  # what ran was aborted on its actor

    run(test)


def test_the_rest_of_a_stream_comes_as_it_is_whole_partial_or_without_samples() -> None:
    async def test() -> None:
        bench = Bench(num_slots=4)
        call = bench.open(is_stream=True, take=3, unit="samples", rest="partial")
        await bench.submit(call, PROMPTS, n=2)  # three fit: two and the lookahead
        bench.begin(0)
        groups = asyncio.ensure_future(collect(call))
        await bench.end(2)
        bench.begin(3)
        await bench.end(3)
        found = {g.index: (g.error, [s.finish_reason for s in g.samples]) for g in await groups}
        assert found == {
            2: (None, ["length"] * 2),
            3: (None, ["length"] * 2),
            0: ("cancelled", ["aborted"] * 2),
            1: ("cancelled", []),
            4: ("cancelled", []),
        }
        assert bench.counts == (5, 2, 0, 3, 0)

    run(test)


@pytest.mark.parametrize("rest", ["cancel", "partial"])
def test_a_rollout_that_takes_k_still_has_one_group_for_every_prompt(rest: Any) -> None:
    async def test() -> None:
        bench = Bench(num_slots=4)
        call = bench.open(take=2, rest=rest)
        await bench.submit(call, PROMPTS)
        groups = asyncio.ensure_future(call.all())
        bench.begin(1)
        await bench.end(3, 0)
        samples = ["aborted"] if rest == "partial" else []
        assert [(g.error, [s.finish_reason for s in g.samples]) for g in await groups] == [
            (None, ["length"]),
            ("cancelled", samples),
            ("cancelled", []),
            (None, ["length"]),
            ("cancelled", []),
        ]
        assert [g.index for g in await groups] == list(range(5))
        assert bench.counts == (5, 2, 0, 3, 0)

    run(test)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"take": 0}, "take must be an integer of at least 1, or None, got 0"),
        ({"take": True}, "take must be an integer"),
        ({"take": 3}, "take must be at most what the prompts give, 2 groups, got 3"),
        ({"take": 9, "unit": "samples"}, "take must be at most what the prompts give, 8 samples, got 9"),
        ({"unit": "tokens"}, "unit must be one of groups, samples, got 'tokens'"),
        ({"rest": "keep"}, "rest must be one of cancel, partial, got 'keep'"),
        ({"max_staleness": -1}, "max_staleness must be an integer of at least 0, or None, got -1"),
        ({"call_id": 7}, "call_id must be a str or None, got 7"),
    ],
)
def test_terms_that_make_no_sense_are_refused_by_name(terms: dict[str, Any], message: str) -> None:
    async def test() -> None:
        bench = Bench()
        with pytest.raises(RequestError, match=message):
            await bench.submit(bench.open(**terms), [[1], [2]], n=4)
        assert bench.counts == (0, 0, 0, 0, 0)

    run(test)


def test_one_request_is_cancelled_by_its_name_and_comes_back_with_what_it_has() -> None:
    async def test() -> None:
        bench = Bench(num_slots=4)
        prompts = [
            RolloutRequest([1], request_id="mine", metadata="m"),
            [2],
            RolloutRequest([3], request_id="mine"),
        ]
        mine, others = bench.open("me"), bench.open("other", call_id="theirs")
        await bench.submit(mine, prompts)
        await bench.submit(others, [RolloutRequest([1], request_id="mine"), [2], [3], [4]])
        bench.begin(0)
        groups = asyncio.ensure_future(mine.all())
        assert bench.calls.cancel("mine", None, "me") == 2
        assert bench.calls.cancel(1, None, "me") == 0  # a place in a call is no name
        await bench.settled()
        assert bench.calls.cancel("mine", None, "me") == 0
        await bench.end(1)
        assert [(g.error, len(g.samples), g.request_id, g.metadata) for g in await groups] == [
            ("cancelled", 1, "mine", "m"),
            (None, 1, 1, None),
            ("cancelled", 0, "mine", None),
        ]
        assert bench.calls.cancel(None, "theirs", None) == 4
        assert [g.error for g in await others.all()] == ["cancelled"] * 4
        assert bench.counts == (7, 1, 0, 6, 0)

    run(test)


def test_a_group_that_is_too_old_when_it_is_handed_over_is_drawn_anew() -> None:
    async def test() -> None:
        bench = Bench(num_slots=8)
        call = bench.open(max_staleness=1)
        await bench.submit(call, [[1], [2], [3]])
        groups = asyncio.ensure_future(call.all())
        await bench.end(0)
        bench.begin(1)
        bench.sync()
        await bench.end(1)  # tokens of versions 0 and 1
        bench.sync()
        assert bench.ledger.restarted == 0  # nothing is handed over yet
        await bench.end(2)
        assert bench.ledger.restarted == 2
        assert sorted(bench.running) == [0, 1]
        await bench.end(0, 1)
        assert [oldest(g) for g in await groups] == [2, 2, 2]
        assert bench.counts == (3, 3, 0, 0, 0)

    run(test)


def test_a_stream_judges_age_when_it_yields_and_gives_up_after_so_many_times() -> None:
    async def test() -> None:
        bench = Bench(num_slots=8, max_staleness=0)
        call = bench.open(is_stream=True)
        await bench.submit(call, [[1], [2]])
        stream = call.groups()
        await bench.end(0, 1)
        assert oldest(await anext(stream)) == 0
        bench.sync()
        rest = asyncio.ensure_future(anext(stream))
        for _ in range(2):  # max_replays
            await bench.settled()
            bench.begin(1)
            bench.sync()
            await bench.end(1)
        assert (await rest).error == (
            "prompt 1: its tokens were more than max_staleness (0) versions old when it was done, 3 times, "
            "and max_replays is 2; allow more versions, or sync less often"
        )
        assert (bench.counts, bench.ledger.restarted) == ((2, 1, 1, 0, 0), 2)

    run(test)


def test_samples_to_go_on_with_that_are_too_old_start_anew() -> None:
    async def test() -> None:
        bench = Bench(num_slots=8)
        for _ in range(3):
            bench.sync()
        resume = [sample(0, 1, 2, "aborted"), sample(1, 2, 2, "aborted")]
        call = bench.open(max_staleness=1)
        await bench.submit(call, [RolloutRequest([1], resume=resume)], n=2)
        assert [s.sample_index for s in call.jobs[0].request.resume] == [1]
        groups = asyncio.ensure_future(call.all())
        bench.sync()
        await bench.end(0)  # the other one is too old by now
        assert call.jobs[0].request.resume == ()
        await bench.end(0)
        assert [oldest(g) for g in await groups] == [4]
        assert bench.ledger.restarted == 1

    run(test)


def test_partial_groups_that_are_too_old_come_without_samples() -> None:
    async def test() -> None:
        bench = Bench(num_slots=8)
        call = bench.open(is_stream=True, take=1, rest="partial", max_staleness=0)
        await bench.submit(call, [[1], [2]])
        bench.begin(0)
        bench.sync()
        groups = asyncio.ensure_future(collect(call))
        await bench.end(1)
        assert [(g.index, g.error, len(g.samples)) for g in await groups] == [
            (1, None, 1),
            (0, "cancelled", 0),
        ]

    run(test)


def test_a_slow_consumer_stops_its_own_stream_and_no_other() -> None:
    async def test() -> None:
        bench = Bench(num_slots=2, stream_window=3)
        slow = bench.open(is_stream=True)
        await bench.submit(slow, [[number] for number in range(30)])
        stream = slow.groups()
        await anext_when(bench, stream)
        while bench.running:
            await bench.end(*list(bench.running)[:1])
        waiting = len(slow._finished)
        assert 3 <= waiting <= 3 + 3  # the window, and what its actor had
        other = bench.open(is_stream=True)
        await bench.submit(other, [[1]])
        await bench.end(30)
        assert len([g async for g in other.groups()]) == 1
        for _ in range(waiting - 2):
            await anext(stream)
        await bench.settled()
        assert bench.running  # it goes on as soon as there is room in the window

    run(test)


async def anext_when(bench: Bench, stream: Any) -> RolloutGroup:
    waiting = asyncio.ensure_future(anext(stream))
    await bench.settled()
    await bench.end(*list(bench.running)[:1])
    group: RolloutGroup = await waiting
    return group


def test_a_queue_that_is_full_refuses_a_call_as_a_whole() -> None:
    async def test() -> None:
        bench = Bench(num_slots=2, max_queued_groups=5)
        await bench.submit(bench.open(), PROMPTS)  # three go out
        with pytest.raises(
            QueueFullError, match="4 groups do not go into the queue: 2 wait, and max_queued_groups is 5"
        ):
            await bench.submit(bench.open(), PROMPTS[:4])
        assert bench.counts == (5, 0, 0, 0, 5)
        await bench.submit(bench.open(), PROMPTS[:3])

    run(test)


def test_what_new_weights_are_in_the_way_of_runs_again_unless_it_has_begun_or_is_not_wanted() -> None:
    async def test() -> None:
        bench = Bench(num_slots=8)
        call = bench.open()
        await bench.submit(call, [[1], [2], RolloutRequest([3], request_id="unwanted")])
        groups = asyncio.ensure_future(call.all())
        bench.begin(0)
        async with bench.dispatcher.stopped("abort"):
            bench.calls.cancel("unwanted", None, "")
            await bench.settled()
            assert not bench.running
        await bench.settled()
        assert list(bench.running) == [1]
        await bench.end(1)
        assert [(g.error, len(g.samples)) for g in await groups] == [
            ("cancelled", 1),
            (None, 1),
            ("cancelled", 0),
        ]

    run(test)


def indexes(request: ResolvedRequest) -> list[int]:
    return list(range(request.sample_offset, request.sample_offset + request.sampling.n))


def test_a_group_that_nothing_waits_behind_goes_to_all_who_are_idle() -> None:
    async def test() -> None:
        bench = Bench(num_actors=3, num_slots=8, min_part_samples=2)
        call = bench.open()
        groups = asyncio.ensure_future(call.all())
        await bench.submit(call, [RolloutRequest([1])], n=6)
        handles = [member.handle for member in bench.members.values()]
        assert sorted(indexes(handle.running[0][0]) for handle in handles) == [[0, 1], [2, 3], [4, 5]]
        for handle in handles:
            assert not groups.done()
            handle.end(0)
            await bench.settled()
        (group,) = await groups
        assert [one.sample_index for one in group.samples] == list(range(6))
        assert bench.counts == (1, 1, 0, 0, 0)
        assert all(member.load.outstanding_samples == 0 for member in bench.members.values())

        two = bench.open()
        await bench.submit(two, [RolloutRequest([1]), RolloutRequest([2])], n=6)
        sizes = [[len(indexes(one)) for one, _ in handle.running.values()] for handle in handles]
        assert sorted(sizes) == [[3], [3], [6]]  # an actor for each, and the one that is left for the last

    run(test)


def test_of_a_group_that_lost_a_part_the_others_are_kept_while_the_weights_are_the_same() -> None:
    async def lose_one_of_two(bench: Bench) -> list[list[int]]:
        """The samples that are drawn before the loss of their actor's sibling, and those drawn after."""
        call = bench.open()
        await bench.submit(call, [RolloutRequest([1])], n=4)
        ticket = call.jobs[0].ticket
        first, second = (member.handle for member in bench.members.values() if member.handle.running)
        kept = indexes(first.running[ticket][0])
        first.end(ticket)
        second.lose()
        await bench.settled()
        (resumed,) = [
            [one.sample_index for one in handle.running[ticket][0].resume]
            for handle in {id(m.handle): m.handle for m in bench.members.values()}.values()
            if ticket in handle.running and handle.running[ticket][0].resume
        ] or [[]]
        bench.calls.close(call)
        await bench.settled()
        return [kept, resumed]

    async def test() -> None:
        kept, resumed = await lose_one_of_two(Bench(num_actors=2, min_part_samples=2))
        assert kept == resumed
        assert len(kept) == 2

    run(test)


def test_kept_parts_are_dropped_with_the_weights_that_drew_them() -> None:
    async def test() -> None:
        bench = Bench(num_actors=2, min_part_samples=2)
        call = bench.open()
        await bench.submit(call, [RolloutRequest([1])], n=4)
        first, second = (member.handle for member in bench.members.values())
        first.end(0)
        bench.sync()
        second.lose()
        await bench.settled()
        running = [handle.running[0][0] for handle in (m.handle for m in bench.members.values())]
        assert [request.resume for request in running] == [(), ()]
        bench.calls.close(call)

    run(test)


def test_both_parts_of_a_cancelled_group_come_back_with_what_they_have() -> None:
    async def test() -> None:
        bench = Bench(num_actors=2, min_part_samples=2)
        call = bench.open()
        groups = asyncio.ensure_future(call.all())
        await bench.submit(call, [RolloutRequest([1], request_id="name")], n=4)
        for member in bench.members.values():
            member.handle.begin(0)
        assert bench.calls.cancel("name", None, None) == 1
        (group,) = await groups
        assert group.is_cancelled
        assert [(one.sample_index, one.finish_reason) for one in group.samples] == [
            (number, "aborted") for number in range(4)
        ]
        assert bench.counts == (1, 0, 0, 1, 0)

    run(test)


EVENTS = [
    "open",
    "open",
    "begin",
    "end",
    "end",
    "fail",
    "lose",
    "sync",
    "take",
    "take",
    "cancel",
    "leave",
    "again",
]
KINDS: list[dict[str, Any]] = [
    {},
    {"take": 2},
    {"take": 2, "rest": "partial"},
    {"max_staleness": 0},
    {"max_staleness": 1, "take": 3, "unit": "samples", "rest": "partial"},
]


class Consumer:
    """One caller with one call, who takes what comes when it is told to."""

    def __init__(self, bench: Bench, number: int) -> None:
        self.terms = KINDS[number % len(KINDS)]
        self.is_stream = number % 2 == 0
        self.bench = bench
        self.call = bench.open(f"caller {number % 3}", self.is_stream, **self.terms)
        self.got: list[RolloutGroup] = []
        self.has_gone = False
        self.permits = asyncio.Semaphore(0)
        self.task = asyncio.ensure_future(self.consume())

    async def consume(self) -> None:
        await self.bench.submit(self.call, [RolloutRequest([1], request_id=n) for n in range(3)], n=2)
        try:
            if self.is_stream:
                async for group in self.call.groups():
                    self.take(group)
                    await self.permits.acquire()
            else:
                for group in await self.call.all():
                    self.take(group)
        finally:
            self.bench.calls.close(self.call)

    def take(self, group: RolloutGroup) -> None:
        limit, first = self.terms.get("max_staleness"), oldest(group)
        assert limit is None or first is None or first >= self.bench.versions[-1] - limit
        assert group.error is not None or [one.sample_index for one in group.samples] == [0, 1]
        self.got.append(group)

    def check(self) -> None:
        places = [group.index for group in self.got]
        assert len(set(places)) == len(places)  # no result comes twice
        if not self.is_stream:
            assert len(places) in (0, 3)
        elif (
            self.task.done()
            and not self.has_gone
            and (self.terms.get("rest") == "partial" or "take" not in self.terms)
        ):
            assert len(places) == 3


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 99)), max_size=60), st.sampled_from([None, 1])
)
def test_every_group_is_accounted_for_after_every_event_and_comes_once(
    events: list[tuple[str, int]], least: int | None
) -> None:
    async def test() -> None:
        bench = Bench(num_actors=2, num_slots=2, stream_window=2, min_part_samples=least)
        callers: list[Consumer] = []
        for event, number in events:
            running = sorted(bench.running)
            ticket = running[number % len(running)] if running else None
            caller = callers[number % len(callers)] if callers else None
            if event == "open":
                callers.append(Consumer(bench, number))
            elif event in ("begin", "end", "fail") and ticket is not None:
                if event == "begin":
                    bench.begin(ticket)
                else:
                    await bench.end(ticket, error="bad" if event == "fail" else None)
            elif event == "lose":
                list(bench.members.values())[number % 2].handle.lose()
            elif event == "sync":
                bench.sync()
            elif event == "take" and caller is not None:
                caller.permits.release()
            elif event == "cancel":
                bench.calls.cancel(number % 3, None, f"caller {number % 2}")
            elif event == "leave" and caller is not None:
                caller.has_gone = True
                caller.call.leave()
            elif event == "again" and caller is not None:
                give_again(bench, caller.call, number)
            await bench.settled()
            for one in callers:
                one.check()
        for _ in range(40):  # all of it comes to an end
            for caller in callers:
                caller.permits.release()
            for ticket in list(bench.running):
                if ticket in bench.running:
                    await bench.end(ticket)
            await bench.settled()
        assert all(caller.task.done() and caller.task.exception() is None for caller in callers)
        submitted, returned, failed, cancelled, in_flight = bench.counts
        assert (submitted, in_flight, len(bench.dispatcher._queue)) == (3 * len(callers), 0, 0)
        kinds = Counter(
            "returned" if g.error is None else "cancelled" if g.is_cancelled else "failed"
            for caller in callers
            for g in caller.got
        )
        assert (kinds["returned"], kinds["failed"]) == (returned, failed)
        assert kinds["cancelled"] <= cancelled
        assert all(member.load.outstanding_samples == 0 for member in bench.members.values())

    run(test)


def give_again(bench: Bench, call: Call, number: int) -> None:
    """A result that comes once more, or late: of a job that has one, or is settled, or is at another attempt."""
    if call.jobs:
        job = call.jobs[number % len(call.jobs)]
        before, dropped = bench.counts, bench.ledger.dropped
        late = job.attempt - 1 if bench.ledger.is_unfinished(job) else job.attempt
        group = RolloutGroup(job.ticket, 0, np.array([1]), [sample(0, 0, 0)])
        assert not bench.ledger.finish(job, late, group)
        assert (bench.counts, bench.ledger.dropped) == (before, dropped + 1)
