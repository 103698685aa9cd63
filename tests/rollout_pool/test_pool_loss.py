"""Pools that lose their driver, their own process, or a node. Real processes; tensor-parallel where it matters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from waiting import wait_until

from rollout_pool import (
    Engine,
    EngineConfig,
    PoolConfig,
    RolloutPool,
    RolloutRequest,
    SamplingParams,
    WeightsLostError,
    WeightSyncError,
)

pytestmark = pytest.mark.slow

ENGINE = EngineConfig(num_slots=4, max_length=64, deterministic="strict")
SEEDED = SamplingParams(n=2, max_new_tokens=20, ignore_eos=True, seed=7)
PROMPTS = [RolloutRequest([5 + number, 9], metadata=number) for number in range(6)]


def tokens(groups) -> list:
    assert [group.error for group in groups] == [None] * len(groups)
    return [[sample.token_ids.tolist() for sample in group.samples] for group in groups]


def rollout(pool, sampling: SamplingParams = SEEDED) -> list:
    return tokens(ray.get(pool.rollout.remote(PROMPTS, sampling), timeout=120))


def pids(pool) -> list[int]:
    infos = ray.get(pool.ready.remote(), timeout=180)
    return [rank.pid for info in infos for rank in info.ranks]


def are_gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def placement_groups() -> int:
    return sum(table["state"] == "CREATED" for table in ray.util.placement_group_table().values())


def is_back(pool) -> bool:
    try:
        return bool(pids(pool))
    except ray.exceptions.ActorUnavailableError:
        return False


@pytest.fixture
def nodes():
    """A cluster with a node of two cores, which holds the drivers, and what a test adds."""
    head = {"num_cpus": 2, "resources": {"head": 1}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, namespace="other")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_a_pool_whose_process_is_killed_starts_anew_and_serves_no_older_weights_in_silence(
    nodes: Cluster, tiny_model_dir: str
) -> None:
    config = PoolConfig(model=tiny_model_dir, tensor_parallel_size=2, cpus_per_actor=1, engine=ENGINE)
    pool = RolloutPool.options(max_restarts=1).remote(config)
    ranks = pids(pool)
    unseeded = SEEDED.model_copy(update={"seed": None})
    first, expected = rollout(pool, unseeded), rollout(pool)
    ray.get(pool.sync_weights.remote(tiny_model_dir, version=3), timeout=60)

    os.kill(ray.get(pool.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    wait_until(lambda: is_back(pool), "the pool was not started again")
    wait_until(lambda: are_gone(ranks), "ranks are left in the way of new ones")  # their room was needed
    assert placement_groups() == 1
    with pytest.raises(WeightsLostError, match="the weights of version 3 are lost: call sync_weights"):
        rollout(pool)
    with pytest.raises(WeightSyncError, match="not above 3, which the pool had before it was started again"):
        ray.get(pool.sync_weights.remote(tiny_model_dir, version=3), timeout=60)
    receipts = ray.get(pool.sync_weights.remote(tiny_model_dir), timeout=60)
    assert {receipt.version for receipt in receipts} == {4}
    assert rollout(pool) == expected
    assert rollout(pool, unseeded) != first  # other seeds than those that were used
    ray.kill(pool)


@pytest.mark.filterwarnings("ignore:deterministic='strict'")  # the engine here comes late to this process
def test_a_detached_pool_survives_its_driver_and_so_do_its_weights(
    nodes: Cluster, tiny_model_dir: str, tmp_path: Path
) -> None:
    program = f"""
        import ray, torch
        from transformers import AutoModelForCausalLM
        from rollout_pool import EngineConfig, PoolConfig, RolloutPool
        from rollout_pool.weight_sync import ship

        ray.init(address={nodes.address!r}, namespace="team")
        engine = EngineConfig(**{ENGINE.model_dump()!r})
        config = PoolConfig(model={tiny_model_dir!r}, tensor_parallel_size=2, cpus_per_actor=1, engine=engine)
        pool = RolloutPool.options(name="pool", lifetime="detached").remote(config)
        model = AutoModelForCausalLM.from_pretrained({tiny_model_dir!r})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        model.save_pretrained({str(tmp_path)!r})
        ray.get(pool.sync_weights.remote(ship(model)), timeout=180)
    """
    subprocess.run([sys.executable, "-P", "-c", textwrap.dedent(program)], check=True, timeout=240)
    pool = ray.get_actor("pool", namespace="team")
    expected = tokens(Engine(str(tmp_path), ENGINE, tokenizer=tiny_model_dir).generate(PROMPTS, SEEDED))
    assert rollout(pool) == expected
    assert ray.get(pool.stats.remote()).weight_version == 1

    ranks = pids(pool)
    os.kill(ranks[1], signal.SIGKILL)
    wait_until(lambda: is_back(pool) and are_gone(ranks), "the lost ranks were not replaced")
    assert rollout(pool) == expected  # by actors that got the weights without the driver that had sent them

    ranks = pids(pool)
    ray.kill(pool)
    wait_until(lambda: are_gone(ranks) and placement_groups() == 0, "something outlived its pool")


def test_a_pool_goes_on_without_a_lost_node_and_grows_back_with_a_new_one(
    nodes: Cluster, tiny_model_dir: str
) -> None:
    lost = nodes.add_node(num_cpus=2)
    config = PoolConfig(model=tiny_model_dir, num_actors=2, cpus_per_actor=2, engine=ENGINE)
    pool = RolloutPool.options(resources={"head": 0.1}).remote(
        config
    )  # a new node does not know the others yet
    assert len(pids(pool)) == 2
    expected = rollout(pool)
    streamed = pool.stream.remote(PROMPTS, SEEDED)
    groups = [ray.get(next(streamed), timeout=60)]
    nodes.remove_node(lost, allow_graceful=False)
    groups += [ray.get(ref, timeout=60) for ref in streamed]
    assert tokens(sorted(groups, key=lambda group: group.index)) == expected
    wait_until(lambda: ray.get(pool.num_actors.remote()) == 1, "the loss was not noticed")
    assert rollout(pool) == expected
    nodes.add_node(num_cpus=2)
    wait_until(lambda: ray.get(pool.num_actors.remote()) == 2, "the pool did not grow back")
    assert rollout(pool) == expected
    stats = ray.get(pool.stats.remote())
    assert (stats.actors_lost, stats.in_flight, stats.failed) == (1, 0, 0)
    ray.kill(pool)
