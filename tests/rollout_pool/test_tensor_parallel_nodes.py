"""Tensor-parallel groups on a cluster of two nodes: raylets of this machine, with GPUs that are numbers."""

from __future__ import annotations

import asyncio
import os

import pytest
import ray
from ray.cluster_utils import Cluster

from rollout_pool import CapacityError, EngineConfig, PoolConfig, RolloutPool, SamplingParams
from rollout_pool.actors.tensor_parallel import RankActors

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nodes():
    """Two nodes of one core and two GPUs each. They are the host's GPUs 1 and 3, so far as Ray knows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 2})
        cluster.add_node(num_cpus=1, num_gpus=2)
    ray.init(address=cluster.address)
    yield
    ray.shutdown()
    cluster.shutdown()


def config(model: str, **keys) -> PoolConfig:
    return PoolConfig(
        model=model, tensor_parallel_size=2, engine=EngineConfig(num_slots=4, max_length=64), **keys
    )


def test_ranks_stand_node_by_node_in_the_order_of_their_devices(nodes: None) -> None:
    pack = PoolConfig(model="m", tensor_parallel_size=4, tensor_parallel_placement="pack")
    ranks = RankActors(pack, "actor-0", {"GPU": 1.0}, threads=1, device="cuda")

    async def reserve() -> list:
        async with asyncio.timeout(60):
            return await ranks.reserve()

    order = asyncio.run(reserve())
    assert [bundle.device for bundle in order] == ["1", "3", "1", "3"]
    assert order[0].node == order[1].node != order[2].node == order[3].node
    look = ray.remote(lambda: (ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]))
    seen = [
        ray.get(look.options(num_cpus=0, num_gpus=1, scheduling_strategy=ranks.on(bundle.index)).remote())
        for bundle in order
    ]
    assert seen == [(bundle.node, bundle.device) for bundle in order]  # what a rank will find
    ranks.kill()


def test_group_spans_nodes_only_when_asked_to_and_then_warns_and_serves(
    nodes: None, tiny_model_dir: str
) -> None:
    with pytest.raises(CapacityError, match="or set tensor_parallel_placement to 'pack'"):
        RolloutPool.remote(config(tiny_model_dir, gpus_per_actor=0))
    with pytest.warns(UserWarning, match="1 of 1 group of 2 ranks will span nodes"):
        pool = RolloutPool.remote(config(tiny_model_dir, gpus_per_actor=0, tensor_parallel_placement="pack"))
    (info,) = ray.get(pool.ready.remote(), timeout=180)
    assert len(info.ranks) == 2
    table = next(t for t in ray.util.placement_group_table().values() if t["state"] == "CREATED")
    assert len(set(table["bundles_to_node_id"].values())) == 2
    groups = ray.get(pool.rollout.remote([[5], [6]], SamplingParams(max_new_tokens=4)), timeout=60)
    assert [group.error for group in groups] == [None, None]
    ray.kill(pool)
