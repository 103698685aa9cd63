"""The account of groups: every one is settled once, whatever the order of events."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout_pool.ledger import Job, Ledger
from rollout_pool.requests import failed_group, resolve_requests
from rollout_pool.types import ResolvedRequest, RolloutGroup, RolloutRequest

EVENTS = ["open", "deliver", "deliver_failed", "fail", "cancel", "caller_leaves", "lose"]


def request(prompt: RolloutRequest | list[int]) -> ResolvedRequest:
    return resolve_requests([prompt], None, seed=1)[0]


def served(job: Job) -> RolloutGroup:
    """What an engine returns for a job: under the ticket, without metadata."""
    asked = job.for_engine()
    return RolloutGroup(asked.request_id, asked.index, np.array([1]), [], None, asked.metadata)


def assert_balanced(ledger: Ledger) -> None:
    assert ledger.submitted == ledger.returned + ledger.failed + ledger.cancelled + ledger.in_flight


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 9)), max_size=60))
def test_accounts_balance_after_every_event_and_each_job_settles_once(events: list[tuple[str, int]]) -> None:
    async def run() -> None:
        ledger = Ledger(max_replays=1)
        jobs: list[Job] = []
        for event, number in events:
            job = jobs[number % len(jobs)] if jobs else None
            if event == "open" or job is None:
                jobs.append(ledger.open(request([1, 2])))
            elif event == "deliver":
                ledger.deliver(job, served(job))
            elif event == "deliver_failed":
                ledger.deliver(job, failed_group(job.for_engine(), "bad"))
            elif event == "fail":
                ledger.fail(job, "bad")
            elif event == "cancel":
                ledger.cancel(job)
            elif event == "caller_leaves":
                job.done.cancel()  # what asyncio does to the futures of a cancelled gather
            elif event == "lose":
                ledger.may_replay(job, "killed")
            assert_balanced(ledger)
        ledger.cancel_all("closed")
        assert_balanced(ledger)
        assert ledger.in_flight == 0
        assert all(job.done.done() for job in jobs)

    asyncio.run(run())


def test_group_comes_back_under_the_callers_names_with_the_callers_metadata() -> None:
    async def run() -> None:
        metadata = {"answer": 42}
        ledger = Ledger(max_replays=0)
        ledger.open(request([1]))
        job = ledger.open(request(RolloutRequest([1], request_id="mine", metadata=metadata)))
        asked = job.for_engine()
        assert (asked.request_id, asked.metadata, asked.identity) == (1, None, "name:mine")
        ledger.deliver(job, served(job))
        group = job.done.result()
        assert (group.request_id, group.index) == ("mine", 0)
        assert group.metadata is metadata

    asyncio.run(run())


def test_group_is_replayed_up_to_the_limit_and_then_fails_by_name() -> None:
    async def run() -> None:
        ledger = Ledger(max_replays=2)
        job = ledger.open(request([1]))
        assert [ledger.may_replay(job, "killed by signal 9") for _ in range(3)] == [True, True, False]
        assert (ledger.replayed, ledger.failed) == (2, 1)
        error = job.done.result().error
        assert error == (
            "prompt 0: its rollout actor was lost 3 times, and max_replays is 2; "
            "the last loss: killed by signal 9"
        )

    asyncio.run(run())
