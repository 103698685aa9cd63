"""Pools of tensor-parallel groups, with real ranks: gloo on CPU cores."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray_logs import worker_logs
from safetensors.torch import load_file, save_file
from waiting import wait_until

from rollout_pool import (
    ActorStartError,
    CapacityError,
    ConfigError,
    Engine,
    EngineConfig,
    PoolConfig,
    RolloutGroup,
    RolloutPool,
    RolloutRequest,
    SamplingParams,
    UnsupportedModelError,
)
from rollout_pool.actors.placement import Bundle, rank_order

ENGINE = EngineConfig(num_slots=4, max_length=128, deterministic="strict")
SAMPLING = SamplingParams(n=2, max_new_tokens=40, ignore_eos=True, seed=7)
PROMPTS = [RolloutRequest([5 + number, 9], metadata=number) for number in range(32)]


def config(model: str, **keys) -> PoolConfig:
    return PoolConfig(
        **{"model": model, "tensor_parallel_size": 2, "cpus_per_actor": 1, "engine": ENGINE, **keys}
    )


def bundles() -> st.SearchStrategy[list[Bundle]]:
    places = st.tuples(st.sampled_from(["n1", "n2", "n3"]), st.integers(0, 15).map(str))
    return st.lists(places, max_size=12, unique=True).map(
        lambda found: [Bundle(index, *place) for index, place in enumerate(found)]
    )


@given(bundles())
def test_ranks_go_node_by_node_and_count_devices_upwards(found: list[Bundle]) -> None:
    order = rank_order(found)
    assert sorted(bundle.index for bundle in order) == list(range(len(found)))
    nodes = [bundle.node for bundle in order]
    assert nodes == sorted(nodes)  # so that each node's ranks are neighbours
    for node in set(nodes):
        devices = [int(bundle.device) for bundle in order if bundle.node == node]
        assert devices == sorted(devices)


def test_devices_may_be_named_by_uuid_and_cores_have_no_name() -> None:
    named = [Bundle(0, "n", "GPU-b"), Bundle(1, "n", "GPU-a")]
    assert [bundle.index for bundle in rank_order(named)] == [1, 0]
    assert [bundle.index for bundle in rank_order([Bundle(1, "n"), Bundle(0, "n")])] == [0, 1]


@pytest.fixture(scope="module")
def cluster():
    """Eight logical cores, whatever the machine has."""
    ray.init(address="local", num_cpus=8, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def pool(tiny_model_dir: str, cluster: None):
    handle = RolloutPool.remote(config(tiny_model_dir, num_actors=2, heartbeat_timeout_s=20.0))
    ray.get(handle.ready.remote(), timeout=180)
    yield handle
    ray.kill(handle)


def infos(pool) -> list:
    return ray.get(pool.ready.remote(), timeout=60)


def leaders(pool) -> list:
    """The handles of the groups' first ranks, in the order of :func:`infos`."""
    return ray.get(
        pool.__ray_call__.remote(lambda self: [m.handle for _, m in sorted(self._crew.members.items())])
    )


def balance(pool):
    stats = ray.get(pool.stats.remote(), timeout=60)
    assert stats.submitted == stats.returned + stats.failed + stats.cancelled + stats.in_flight
    return stats


def placement_groups(state: str = "CREATED") -> int:
    return sum(table["state"] == state for table in ray.util.placement_group_table().values())


def are_gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def contents(groups: list[RolloutGroup]) -> list:
    return [
        (group.index, group.metadata, group.error, [s.token_ids.tolist() for s in group.samples])
        for group in groups
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:deterministic='strict'")  # the engine here comes late to this process
def test_two_groups_of_two_ranks_give_what_one_engine_gives(pool, tiny_model_dir: str) -> None:
    found = infos(pool)
    assert [info.name for info in found] == ["actor-0", "actor-1"]
    assert [[rank.rank for rank in info.ranks] for info in found] == [[0, 1], [0, 1]]
    assert [info.pid for info in found] == [info.ranks[0].pid for info in found]
    assert len({rank.pid for info in found for rank in info.ranks}) == 4
    assert {rank.device for info in found for rank in info.ranks} == {"cpu"}
    assert placement_groups() == 2

    groups = ray.get(pool.rollout.remote(PROMPTS, SAMPLING), timeout=180)
    alone = Engine(tiny_model_dir, ENGINE).generate(PROMPTS, SAMPLING)
    assert contents(groups) == contents(alone)
    assert {group.timing.actor for group in groups} == {"actor-0", "actor-1"}
    for ours, theirs in zip(groups, alone, strict=True):
        for a, b in zip(ours.samples, theirs.samples, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
    stats = balance(pool)
    assert (stats.returned, stats.in_flight, stats.actors_lost) == (32, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "ended_by"),
    [([1], signal.SIGKILL), ([1, 0], signal.SIGSTOP)],
    ids=["a follower killed", "a follower and another group's leader stopped"],
)
def test_lost_rank_ends_its_group_and_nothing_is_lost_or_different(
    pool, ranks: list[int], ended_by: int, at_step: Callable[[Any, int, Callable[[], object]], None]
) -> None:
    wait_until(lambda: balance(pool).num_actors == 2, "the pool is not whole")
    expected = contents(ray.get(pool.rollout.remote(PROMPTS, SAMPLING), timeout=180))
    before, victims = balance(pool), []
    for info, leader, rank in zip(infos(pool), leaders(pool), ranks, strict=False):
        victims += [place.pid for place in info.ranks]
        at_step(leader, 60, partial(os.kill, info.ranks[rank].pid, ended_by))
    groups = []
    for ref in pool.stream.remote(PROMPTS, SAMPLING):
        groups.append(ray.get(ref, timeout=180))
        balance(pool)
    assert contents(sorted(groups, key=lambda group: group.index)) == expected
    after = balance(pool)
    assert (after.returned - before.returned, after.in_flight) == (32, 0)
    assert after.actors_lost - before.actors_lost == len(ranks)
    assert after.replayed > before.replayed
    wait_until(lambda: are_gone(victims), "a rank outlived its group")
    wait_until(lambda: balance(pool).num_actors == 2, "the lost group was not replaced")
    assert placement_groups() == 2
    assert not {place.pid for info in infos(pool) for place in info.ranks} & set(victims)
    served = ray.get(pool.rollout.remote(PROMPTS, SAMPLING), timeout=180)
    assert contents(served) == expected
    assert len({group.timing.actor for group in served}) == 2  # the new one, too


@pytest.mark.slow
def test_death_of_a_follower_is_noticed_while_its_group_is_idle(pool) -> None:
    wait_until(lambda: balance(pool).num_actors == 2, "the pool is not whole")
    before = balance(pool).actors_lost
    group = infos(pool)[1]
    os.kill(group.ranks[1].pid, signal.SIGKILL)
    wait_until(lambda: balance(pool).actors_lost == before + 1, "nobody noticed")
    lost = f"{group.name} was lost and is replaced: rank 1 (process {group.ranks[1].pid} on "
    assert any(lost in line for text in worker_logs().values() for line in text)
    wait_until(lambda: balance(pool).num_actors == 2, "the lost group was not replaced")


@pytest.mark.slow
def test_group_without_room_raises_within_its_deadline_and_says_what_is_missing(
    pool, tiny_model_dir: str
) -> None:
    wait_until(lambda: balance(pool).num_actors == 2, "the pool is not whole")
    started = time.monotonic()
    crowded = RolloutPool.remote(config(tiny_model_dir, cpus_per_actor=3, start_timeout_s=2.0))
    with pytest.raises(ActorStartError) as caught:
        ray.get(crowded.ready.remote(), timeout=60)
    assert time.monotonic() - started < 60
    assert str(caught.value.cause) == (
        "actor-0: no process within start_timeout_s (2 s); it needs 6 CPU of which 4 of 8 are free in 2 equal "
        "parts, all on one node: free some, or lower num_actors or what each actor asks for"
    )
    assert (placement_groups("PENDING"), placement_groups()) == (0, 2)


def test_what_cannot_be_is_refused_in_the_driver(cluster: None, tiny_model_dir: str) -> None:
    with pytest.raises(CapacityError) as refused:
        RolloutPool.remote(config(tiny_model_dir, num_actors=5))
    assert str(refused.value) == (
        "5 groups of 2 ranks with 1 CPU each (10 CPUs in all) were asked for; the cluster has 8 CPUs, and a "
        "group needs one node, room for 4: lower num_actors or tensor_parallel_size"
    )
    with pytest.raises(CapacityError, match="the cluster has 8 CPUs and 0 GPUs"):
        RolloutPool.remote(config(tiny_model_dir, gpus_per_actor=1))
    with pytest.raises(UnsupportedModelError, match="2 KV heads cannot be divided by tensor_parallel_size 4"):
        RolloutPool.remote(config(tiny_model_dir, tensor_parallel_size=4))


def starting_followers(pool) -> list:
    def handles(self) -> list:
        return [handle for ranks in self._crew._starting.values() for handle in ranks._handles[1:]]

    return ray.get(pool.__ray_call__.remote(handles), timeout=60)


def assert_nothing_is_left(created: int) -> None:
    wait_until(lambda: placement_groups() == created, "a placement group is left")
    wait_until(lambda: ray.available_resources().get("CPU") == 8 - 2 * created, "an actor is left")


@pytest.mark.slow
def test_rank_that_dies_while_it_loads_is_an_error_and_leaves_nothing(pool, tiny_model_dir: str) -> None:
    wait_until(lambda: balance(pool).num_actors == 2, "the pool is not whole")
    for _ in range(3):  # a rank may have loaded before it is killed
        starting = RolloutPool.remote(config(tiny_model_dir, start_timeout_s=100.0))
        ready, followers = starting.ready.remote(), []
        while not followers and not ray.wait([ready], timeout=0.1)[0]:
            followers = starting_followers(starting)
        for follower in followers:
            os.kill(ray.get(follower.place.remote(), timeout=60).pid, signal.SIGKILL)
        with contextlib.suppress(ActorStartError):
            ray.get(ready, timeout=60)
            ray.get(starting.shutdown.remote(), timeout=60)
            assert_nothing_is_left(2)
            continue
        break
    with pytest.raises(ActorStartError, match="actor-0 died while it started: "):
        ray.get(ready, timeout=60)
    assert_nothing_is_left(2)


@pytest.mark.slow
def test_ranks_that_cannot_load_are_an_error_and_leave_nothing(
    pool, tiny_model_dir: str, tmp_path: Path
) -> None:
    wait_until(lambda: balance(pool).num_actors == 2, "the pool is not whole")
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    broken = RolloutPool.remote(config(str(folder), start_timeout_s=100.0))
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        ray.get(broken.ready.remote(), timeout=90)
    assert_nothing_is_left(2)


@pytest.mark.slow
def test_ranks_end_with_their_pool_and_give_back_what_they_held(pool, tiny_model_dir: str) -> None:
    wait_until(lambda: balance(pool).num_actors == 2, "the pool is not whole")
    dropped = RolloutPool.remote(config(tiny_model_dir, cpus_per_actor=2))
    pids = [place.pid for place in infos(dropped)[0].ranks]
    del dropped
    wait_until(lambda: are_gone(pids), "a rank outlived its pool")
    if [int(part) for part in ray.__version__.split(".")[:2]] >= [2, 60]:  # older ones do not tell the pool
        assert_nothing_is_left(2)

    killed = RolloutPool.remote(config(tiny_model_dir, cpus_per_actor=2))
    pids = [place.pid for place in infos(killed)[0].ranks]
    ray.kill(killed)
    wait_until(lambda: are_gone(pids), "a rank outlived its pool")
    needs_its_room = RolloutPool.remote(config(tiny_model_dir, cpus_per_actor=2))
    assert len(infos(needs_its_room)) == 1
    assert placement_groups() == 3
    ray.get(needs_its_room.shutdown.remote())
    assert_nothing_is_left(2)
