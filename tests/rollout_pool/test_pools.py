"""Several pools behind one call: the same groups as from one, and weights that reach all or stop everything."""

from __future__ import annotations

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from rollout_pool import (
    ConfigError,
    EngineConfig,
    PoolConfig,
    RolloutRequest,
    SamplingParams,
    WeightSyncError,
)
from rollout_pool.launch import RolloutPool
from rollout_pool.pools import RolloutPools, deal, sizes
from rollout_pool.requests import resolve_requests
from rollout_pool.types import RolloutGroup


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 500)), max_size=60),
    st.integers(1, 5),
    st.integers(5, 40),
)
def test_requests_are_dealt_out_once_and_evenly(
    plan: list[tuple[int, int]], num_pools: int, num_actors: int
) -> None:
    prompts = [RolloutRequest([1], SamplingParams(n=n, max_new_tokens=most)) for n, most in plan]
    requests = resolve_requests(prompts, None, seed=0)
    each = sizes(num_actors, num_pools)
    parts = deal(requests, each)
    assert sum(each) == num_actors
    assert max(each) - min(each) <= 1
    assert sorted(one.index for part in parts for one in part) == list(range(len(plan)))
    assert [one for part in parts for one in resolve_requests(part, None, seed=9)] == [
        one for part in parts for one in part
    ]
    loads = [
        sum(one.sampling.n * one.sampling.max_new_tokens for one in part) / num
        for part, num in zip(parts, each, strict=True)
    ]
    largest = max((n * most for n, most in plan), default=0)
    assert max(loads) - min(loads) <= largest / min(each)


@pytest.mark.parametrize(
    ("num_pools", "message"), [(0, "from 1 to num_actors"), (3, "from 1"), ("2", "an integer")]
)
def test_a_wrong_number_of_pools_is_refused(num_pools: int, message: str, tiny_model_dir: str) -> None:
    with pytest.raises(ConfigError, match=f"num_pools: must be .*{message}"):
        RolloutPools(PoolConfig(model=tiny_model_dir, num_actors=2), num_pools)


def tokens(groups: list[RolloutGroup]) -> list[tuple[int, str | int, list[list[int]]]]:
    return [(one.index, one.request_id, [s.token_ids.tolist() for s in one.samples]) for one in groups]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_two_pools_give_what_one_gives_and_go_on_with_one_set_of_weights(tiny_model_dir: str) -> None:
    engine = EngineConfig(num_slots=4, max_length=64, deterministic="strict")
    config = PoolConfig(model=tiny_model_dir, num_actors=2, engine=engine, seed=3)
    prompts = ["the cat", [7, 8], RolloutRequest([9], request_id="mine", metadata={"a": 1}), "", [5, 6, 7]]
    sampling = SamplingParams(n=2, max_new_tokens=10)
    single = RolloutPool.remote(config)
    expected = [ray.get(single.rollout.remote(prompts, sampling)) for _ in range(2)]
    ray.get(single.shutdown.remote())

    pools = RolloutPools(config, 2)
    assert [len(infos) for infos in pools.ready()] == [1, 1]
    groups = pools.rollout(prompts, sampling)
    assert tokens(groups) == tokens(expected[0])
    assert (groups[2].metadata, groups[3].error) == ({"a": 1}, expected[0][3].error)
    streamed = sorted(pools.stream(prompts, sampling), key=lambda group: group.index)
    assert tokens(streamed) == tokens(expected[1])
    assert [stats.submitted for stats in pools.stats()] == [6, 4]

    assert {receipt.version for receipt in pools.sync_weights(tiny_model_dir)} == {1}
    assert {s.weight_version for group in pools.rollout(["x", "y"], sampling) for s in group.samples} == {1}
    ray.get(pools.handles[1].shutdown.remote())
    with pytest.raises(
        WeightSyncError, match="not all pools have the weights of version 2: pool 1: .*shut down"
    ):
        pools.sync_weights(tiny_model_dir)
    with pytest.raises(WeightSyncError, match="sync again"):
        pools.rollout(["x"], sampling)
    pools.shutdown()
