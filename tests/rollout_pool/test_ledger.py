"""The account of groups: every one is settled once, whatever the order of events."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout_pool.ledger import Job, Ledger
from rollout_pool.requests import failed_group, resolve_requests
from rollout_pool.routing import CallKey
from rollout_pool.types import ResolvedRequest, RolloutGroup, RolloutRequest

EVENTS = [
    "open",
    "send",
    "finish",
    "finish_failed",
    "fail",
    "end_cancelled",
    "hand_over",
    "restart",
    "cancel",
    "lose",
]


def request(prompt: RolloutRequest | list[int]) -> ResolvedRequest:
    return resolve_requests([prompt], None, seed=1)[0]


def open_one(ledger: Ledger, prompt: RolloutRequest | list[int]) -> Job:
    return ledger.open(request(prompt), CallKey(), lambda job: None)


def served(job: Job) -> RolloutGroup:
    """What an engine returns for a job: under the ticket, without metadata."""
    asked = job.for_engine(version=0)
    return RolloutGroup(asked.request_id, asked.index, np.array([1]), [], None, asked.metadata)


def assert_balanced(ledger: Ledger) -> None:
    assert ledger.submitted == ledger.returned + ledger.failed + ledger.cancelled + ledger.in_flight


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 9)), max_size=60))
def test_accounts_balance_after_every_event_and_each_job_settles_once(events: list[tuple[str, int]]) -> None:
    ledger = Ledger(max_replays=1)
    jobs: list[Job] = []
    for event, number in events:
        job = jobs[number % len(jobs)] if jobs else None
        if event == "open" or job is None:
            jobs.append(open_one(ledger, [1, 2]))
        elif event == "send":
            ledger.send(job)
        elif event in ("finish", "finish_failed"):
            group = served(job) if event == "finish" else failed_group(job.for_engine(version=0), "bad")
            is_asked = ledger.is_open(job) and job.group is None
            assert ledger.finish(job, job.attempt, group) == is_asked
        elif event == "fail":
            ledger.fail(job, "bad")
        elif event == "end_cancelled":
            ledger.end_cancelled(job)
        elif event == "hand_over" and job.group is not None:
            ledger.hand_over(job)
        elif event == "restart" and ledger.is_open(job) and job.group is not None:
            ledger.may_restart(job, 0)
        elif event == "cancel":
            ledger.cancel(job)
        elif event == "lose":
            ledger.may_replay(job, "killed")
        assert_balanced(ledger)
    ledger.cancel_all("closed")
    assert_balanced(ledger)
    assert ledger.in_flight == 0
    assert all(job.group is not None for job in jobs)


def test_group_comes_back_under_the_callers_names_with_the_callers_metadata() -> None:
    metadata = {"answer": 42}
    ledger = Ledger(max_replays=0)
    open_one(ledger, [1])
    job = open_one(ledger, RolloutRequest([1], request_id="mine", metadata=metadata))
    asked = job.for_engine(version=0)
    assert (asked.request_id, asked.metadata, asked.identity) == (1, None, "name:mine")
    assert ledger.finish(job, ledger.send(job), served(job))
    assert (ledger.returned, ledger.in_flight) == (0, 2)  # its caller has not got it yet
    group = ledger.hand_over(job)
    assert (ledger.returned, ledger.in_flight) == (1, 1)
    assert (group.request_id, group.index) == ("mine", 0)
    assert group.metadata is metadata


def test_group_is_replayed_up_to_the_limit_and_then_fails_by_name() -> None:
    ledger = Ledger(max_replays=2)
    job = open_one(ledger, [1])
    assert [ledger.may_replay(job, "killed by signal 9") for _ in range(3)] == [True, True, False]
    assert ledger.hand_over(job).error == (
        "prompt 0: its rollout actor was lost 3 times, and max_replays is 2; "
        "the last loss: killed by signal 9"
    )
    assert (ledger.replayed, ledger.failed) == (2, 1)


def test_what_has_come_when_the_pool_ends_is_handed_over_and_the_rest_says_why_not() -> None:
    ledger = Ledger(max_replays=0)
    come, waiting = open_one(ledger, [1]), open_one(ledger, [2])
    ledger.finish(come, ledger.send(come), served(come))
    ledger.cancel_all("the pool was shut down")
    assert [ledger.hand_over(job).error for job in (come, waiting)] == [
        None,
        "prompt 0: the pool was shut down",
    ]
    assert (ledger.returned, ledger.cancelled, ledger.in_flight) == (1, 1, 0)
