"""Rollout actors that die, with real engines in real processes."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from waiting import wait_until

from rollout_pool import (
    ActorStartError,
    ConfigError,
    EngineConfig,
    PoolConfig,
    RolloutGroup,
    RolloutPool,
    RolloutRequest,
    SamplingParams,
)

pytestmark = pytest.mark.usefixtures("cluster")

ENGINE = EngineConfig(num_slots=4, max_length=128, deterministic="strict")
SAMPLING = SamplingParams(n=2, max_new_tokens=100, ignore_eos=True, seed=7)
DEADLINES = {"heartbeat_timeout_s": 15.0, "step_timeout_s": 20.0}
"""Longer than a process may have to wait for a core."""
MIDDLE = 50
"""A step in the middle of the first samples of an actor: none of its groups is done then."""
PROMPTS = [RolloutRequest([5 + number], metadata=number) for number in range(12)]
AtStep = Callable[[Any, int, Callable[[], object]], None]


@pytest.fixture(scope="module")
def pool(tiny_model_dir: str, cluster: None):
    config = PoolConfig(model=tiny_model_dir, num_actors=2, cpus_per_actor=1, engine=ENGINE, **DEADLINES)
    handle = RolloutPool.remote(config)
    ray.get(handle.ready.remote(), timeout=180)
    yield handle
    ray.kill(handle)


def pids(pool) -> list[int]:
    return [info.pid for info in ray.get(pool.ready.remote(), timeout=60)]


def contents(groups: list[RolloutGroup]) -> list:
    return [
        (group.index, group.metadata, group.error, [s.token_ids.tolist() for s in group.samples])
        for group in groups
    ]


def balance(pool):
    stats = ray.get(pool.stats.remote(), timeout=60)
    assert stats.submitted == stats.returned + stats.failed + stats.cancelled + stats.in_flight
    return stats


def wait_for_actors(pool, count: int) -> None:
    wait_until(lambda: balance(pool).num_actors >= count, "the lost actor was not replaced")


def stream(pool) -> list[RolloutGroup]:
    """All groups of a call, and the account balances meanwhile."""
    groups = []
    for ref in pool.stream.remote(PROMPTS, SAMPLING):
        groups.append(ray.get(ref, timeout=180))
        balance(pool)
    return sorted(groups, key=lambda group: group.index)


def stream_and_kill(pool, at_step: AtStep) -> list[RolloutGroup]:
    """All groups of a call in the middle of which one actor is killed."""
    before = balance(pool).actors_lost
    at_step(members(pool)[0], MIDDLE, lambda: os.kill(os.getpid(), signal.SIGKILL))
    groups = stream(pool)
    assert balance(pool).actors_lost == before + 1
    return groups


def test_killed_actor_is_replaced_and_nothing_is_lost_or_different(pool, at_step: AtStep) -> None:
    undisturbed = ray.get(pool.rollout.remote(PROMPTS, SAMPLING), timeout=60)
    disturbed = stream_and_kill(pool, at_step)
    assert contents(disturbed) == contents(undisturbed)
    stats = balance(pool)
    assert (stats.returned, stats.in_flight, stats.actors_lost) == (24, 0, 1)
    assert 1 <= stats.replayed <= 3  # what one actor had, once each
    wait_for_actors(pool, 2)
    assert [info.name for info in ray.get(pool.ready.remote())] == ["actor-0.1", "actor-1"]
    assert {g.timing.actor for g in ray.get(pool.rollout.remote(PROMPTS, SAMPLING))} == {
        "actor-0.1",
        "actor-1",
    }


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def members(pool) -> list:
    """Handles of the rollout actors, in the order of their names."""
    return ray.get(
        pool.__ray_call__.remote(lambda self: [m.handle for _, m in sorted(self._crew.members.items())])
    )


@pytest.mark.slow
def test_stopped_process_and_hanging_engine_are_replaced_within_their_deadlines(
    pool, at_step: AtStep
) -> None:
    wait_for_actors(pool, 2)
    undisturbed = contents(ray.get(pool.rollout.remote(PROMPTS, SAMPLING), timeout=60))
    before, (stopped, hanging) = balance(pool), pids(pool)
    at_step(members(pool)[0], MIDDLE, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    at_step(members(pool)[1], MIDDLE, lambda: time.sleep(600))
    assert contents(stream(pool)) == undisturbed
    wait_until(lambda: balance(pool).actors_lost - before.actors_lost == 2, "nobody noticed")
    wait_until(lambda: is_gone(stopped), "a stopped process keeps its memory")
    wait_until(lambda: is_gone(hanging), "a hanging process keeps its memory")
    after = balance(pool)
    assert (after.actors_lost - before.actors_lost, after.in_flight, after.failed) == (2, 0, 0)
    wait_for_actors(pool, 2)


def test_actor_whose_engine_fails_exits_and_its_groups_run_elsewhere(pool) -> None:
    def break_engine(self) -> None:
        self._engine.call(lambda engine: setattr(engine, "step", None))

    wait_for_actors(pool, 2)
    before = balance(pool)
    victim = members(pool)[0]
    expected = contents(ray.get(pool.rollout.remote(PROMPTS, SAMPLING), timeout=60))
    ray.get(victim.__ray_call__.remote(break_engine))
    assert contents(ray.get(pool.rollout.remote(PROMPTS, SAMPLING), timeout=60)) == expected
    after = balance(pool)
    assert after.actors_lost - before.actors_lost == 1
    assert after.replayed > before.replayed
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(victim.stats.remote(), timeout=30)


@pytest.mark.slow
def test_groups_over_their_replays_fail_by_name_and_a_pool_that_cannot_recover_says_why(
    tiny_model_dir: str, tmp_path: Path, at_step: AtStep
) -> None:
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    config = PoolConfig(model=str(folder), cpus_per_actor=1, engine=ENGINE, max_replays=0)
    alone = RolloutPool.remote(config)
    ray.get(alone.ready.remote(), timeout=180)
    groups = stream_and_kill(alone, at_step)
    lost = [group for group in groups if group.error]
    assert 1 <= len(lost) <= 3  # a batch and the lookahead; the others waited for the new actor
    for group in lost:
        assert group.metadata == group.index
        assert group.error.startswith(
            f"prompt {group.index}: its rollout actor was lost once, and max_replays is 0; the last loss: "
        )
        assert "\n" not in group.error
    stats = balance(alone)
    assert (stats.returned, stats.failed, stats.in_flight) == (12 - len(lost), len(lost), 0)

    shutil.rmtree(folder)
    groups = stream_and_kill(alone, at_step)
    assert len(groups) == len(PROMPTS)
    assert sum(str(folder) in (group.error or "") for group in groups) >= 6  # those that still waited
    assert balance(alone).in_flight == 0
    with pytest.raises(ConfigError, match="cannot load model"):
        ray.get(alone.rollout.remote(PROMPTS), timeout=30)


def test_actor_that_finds_no_room_raises_within_its_deadline_and_names_the_resource(
    pool, tiny_model_dir: str
) -> None:
    wait_for_actors(pool, 2)
    started = time.monotonic()
    crowded = RolloutPool.remote(PoolConfig(model=tiny_model_dir, cpus_per_actor=3, start_timeout_s=2.0))
    with pytest.raises(ActorStartError) as caught:
        ray.get(crowded.ready.remote(), timeout=60)
    assert time.monotonic() - started < 60
    assert str(caught.value.cause) == (
        "actor-0: no process within start_timeout_s (2 s); it needs 3 CPU of which 2 of 4 are free: "
        "free some, or lower num_actors or what each actor asks for"
    )
