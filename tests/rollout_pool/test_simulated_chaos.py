"""The real pool under hundreds of failures in virtual time; see rollout_pool/simulation/chaos.py."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_pool.ledger import Ledger
from rollout_pool.recovery import Crew
from rollout_pool.simulation.chaos import Outcome, play
from rollout_pool.simulation.clock import run_virtually
from rollout_pool.simulation.events import KINDS, Event, schedule


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of lines about lost actors say nothing here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def undisturbed(outcome: Outcome) -> dict[tuple[str, int], tuple[bytes, str]]:
    """What the same calls give when nothing happens."""
    return run_virtually(play([], num_callers=3, num_calls=outcome.num_calls)).results


@pytest.mark.parametrize("seed", range(20))
def test_every_group_comes_back_once_and_as_if_nothing_had_happened(seed: int) -> None:
    events = schedule(seed, 300)
    outcome = run_virtually(play(events))
    assert outcome.faults == []
    assert outcome.ended_by is None
    assert outcome.played.total() == 300
    assert len(outcome.played) >= 14
    assert outcome.stats.actors_lost > 30
    assert outcome.stats.in_flight == 0
    assert outcome.results == undisturbed(outcome)
    assert min(outcome.num_calls) >= 1  # whatever happens, calls get through
    assert len(outcome.detected_after_s) > 5


def test_the_same_seed_is_the_same_run() -> None:
    first, second = (run_virtually(play(schedule(7, 120))) for _ in "ab")
    counters = ("submitted", "returned", "failed", "cancelled", "replayed", "actors_lost", "weight_version")
    for name in counters:
        assert getattr(first.stats, name) == getattr(second.stats, name)
    assert dataclasses.replace(first, stats=None) == dataclasses.replace(second, stats=None)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.builds(Event, st.sampled_from(sorted(KINDS)), st.floats(0, 3), st.integers(0, 40)), max_size=25
    ),
    st.booleans(),
)
def test_any_order_of_events_leaves_the_accounts_right(events: list[Event], ends_by_shutdown: bool) -> None:
    outcome = run_virtually(play(events, num_actors=2, num_callers=2, ends_by_shutdown=ends_by_shutdown))
    assert outcome.faults == []
    if outcome.ended_by is not None and not ends_by_shutdown:
        # The one other end of a pool: no actor is left, and for none of them is there room in time.
        assert "no process within start_timeout_s" in outcome.ended_by
        assert outcome.played["start finds no room"] >= 2


@pytest.mark.parametrize("seed", range(8))
def test_a_shutdown_in_the_middle_settles_every_account(seed: int) -> None:
    outcome = run_virtually(play(schedule(seed, 10 + 5 * seed), ends_by_shutdown=True))
    assert outcome.faults == []
    assert outcome.ended_by is not None
    assert "shut down" in outcome.ended_by
    assert outcome.stats.in_flight == 0
    assert outcome.stats.cancelled > 0


def test_a_group_that_is_forgotten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "may_replay", lambda self, job, cause: False)
    outcome = run_virtually(play(schedule(0, 40), limit_s=200))
    assert any("not over within" in fault for fault in outcome.faults)


def test_a_loss_that_nobody_acts_on_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Crew, "lose", lambda self, member, cause: None)
    outcome = run_virtually(play([Event("wedge", 1.0, 0), Event("silence", 1.0, 1)], limit_s=100))
    assert sorted(fault.split(" since")[0] for fault in outcome.faults if "since" in fault) == [
        "actor-0 was stuck", "actor-1 was silent",
    ]  # fmt: skip
