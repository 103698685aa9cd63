"""The pool with real engines: what callers get, in every form of call."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from waiting import stats_of_all, wait_until

import rollout_pool
from rollout_pool import (
    ActorStartError,
    CapacityError,
    ConfigError,
    Engine,
    EngineConfig,
    PoolClosedError,
    PoolConfig,
    RequestError,
    RolloutGroup,
    RolloutPool,
    RolloutRequest,
    SamplingParams,
    UnsupportedModelError,
)

pytestmark = pytest.mark.usefixtures("cluster")

ENGINE = EngineConfig(num_slots=4, max_length=128, deterministic="strict")
PROMPTS = [
    "the cat sat on the mat",
    [7, 8, 9],
    np.array([40, 41], dtype=np.int32),
    [{"role": "user", "content": "what is it?"}],
    RolloutRequest(
        "named", SamplingParams(n=3, max_new_tokens=12, seed=9), request_id="mine", metadata={"answer": 42}
    ),
    RolloutRequest([5], seed=11, sample_offset=2),
    "x",
    ["a"],
    "",
    None,
    [5, 128],
    [1] * 120,
]
FAULTS = {
    7: "prompt 7: item 0 of the prompt is a str",
    8: "prompt 8: the prompt is empty",
    9: "prompt 9: a prompt must be a str",
    10: "prompt 10: token id 128 in the prompt is outside the vocabulary",
    11: "prompt 11: prompt of 120 tokens + max_new_tokens 16 = 136 exceeds engine.max_length 128",
}
SAMPLING = SamplingParams(n=2, max_new_tokens=16)
ENDLESS = SamplingParams(n=1000, max_new_tokens=120, ignore_eos=True)
"""Goes on until it is cancelled, however late that is."""


@pytest.fixture(scope="module")
def pool(tiny_model_dir: str, cluster: None):
    config = PoolConfig(model=tiny_model_dir, num_actors=2, cpus_per_actor=1, engine=ENGINE, seed=3)
    handle = RolloutPool.remote(config)
    infos = ray.get(handle.ready.remote(), timeout=180)
    assert [(info.name, info.device, info.threads) for info in infos] == [
        ("actor-0", "cpu", 1),
        ("actor-1", "cpu", 1),
    ]
    assert ray.get(handle.num_actors.remote()) == 2
    yield handle
    ray.kill(handle)


def rollout(pool, prompts=PROMPTS, sampling=SAMPLING) -> list[RolloutGroup]:
    return ray.get(pool.rollout.remote(prompts, sampling), timeout=60)


def tokens(groups: list[RolloutGroup]) -> list[list[list[int]]]:
    return [[sample.token_ids.tolist() for sample in group.samples] for group in groups]


def actors(pool) -> list:
    """Handles of the rollout actors."""
    return ray.get(pool.__ray_call__.remote(lambda self: [m.handle for m in self._crew.members.values()]))


async def none_in_flight(pool) -> None:
    async with asyncio.timeout(60):
        while stats_of_all(pool).in_flight or any(stats.live_rows for stats in stats_of_all(pool).actors):
            await asyncio.sleep(0.05)


def test_every_form_of_prompt_gives_its_group_in_input_order_and_a_bad_one_fails_alone(pool) -> None:
    before = stats_of_all(pool)
    groups = rollout(pool)
    assert [group.index for group in groups] == list(range(len(PROMPTS)))
    assert {group.index: group.error for group in groups if group.error}.keys() == FAULTS.keys()
    for index, fault in FAULTS.items():
        assert groups[index].error.startswith(fault)
        assert groups[index].samples == []
    assert [group.request_id for group in groups] == [0, 1, 2, 3, "mine", *range(5, 12)]
    assert groups[4].metadata == {"answer": 42}
    assert [len(group.samples) for group in groups[:7]] == [2, 2, 2, 2, 3, 2, 2]
    assert [sample.sample_index for sample in groups[5].samples] == [2, 3]
    assert {group.timing.actor for group in groups} == {"actor-0", "actor-1"}
    after = stats_of_all(pool)
    assert (after.returned - before.returned, after.failed - before.failed) == (7, len(FAULTS))
    assert after.in_flight == after.queued == 0
    assert sum(stats.submitted for stats in after.actors) == after.submitted


@pytest.mark.filterwarnings("ignore:deterministic='strict'")  # the engine here comes late to this process
def test_results_equal_the_engines_and_do_not_depend_on_the_number_of_actors(pool, tiny_model_dir) -> None:
    config = PoolConfig(model=tiny_model_dir, num_actors=1, cpus_per_actor=2, engine=ENGINE, seed=3)
    alone = RolloutPool.remote(config)
    ray.get(alone.ready.remote(), timeout=180)
    explicit = SAMPLING.model_copy(update={"seed": 5})
    first = rollout(alone)  # a call without a seed of its own draws from the pool's
    two, one = rollout(pool, sampling=explicit), rollout(alone, sampling=explicit)
    assert tokens(one) == tokens(two)
    for a, b in zip(one, two, strict=True):
        for x, y in zip(a.samples, b.samples, strict=True):
            assert np.array_equal(x.logprobs, y.logprobs)  # bit for bit: decoding is strict
    engine = Engine(tiny_model_dir, ENGINE, seed=3)
    assert tokens(engine.generate(PROMPTS, SAMPLING)) == tokens(first)
    repeated = engine.generate(PROMPTS, explicit)
    assert tokens(repeated) == tokens(two)
    assert [group.error for group in repeated] == [group.error for group in two]
    assert tokens(rollout(alone)) != tokens(first)  # the next call is another draw
    assert ray.get(alone.ready.remote())[0].threads == 2
    shut_down_in_flight(alone)


def num_finished(pool) -> int:
    """Groups that have come back from their actors and wait for the others of their call."""
    return ray.get(
        pool.__ray_call__.remote(
            lambda self: sum(job.group is not None for job in self._ledger.open_jobs.values())
        ),
        timeout=60,
    )


def shut_down_in_flight(pool) -> None:
    pid = ray.get(pool.ready.remote())[0].pid
    largest = RolloutRequest("", SamplingParams(n=2000, max_new_tokens=120))  # so it goes out first
    waiting = pool.rollout.remote(["a", "b", "c", largest], ENDLESS)
    wait_until(lambda: num_finished(pool) > 0, "nothing ends")
    ray.get(pool.shutdown.remote(), timeout=30)
    groups = ray.get(waiting, timeout=30)
    assert [group.error for group in groups[:3]] == [
        f"prompt {index}: the pool was shut down" for index in range(3)
    ]
    assert groups[3].error.startswith("prompt 3: the prompt is empty")
    stats = stats_of_all(pool)
    assert (stats.in_flight, stats.cancelled, stats.num_actors) == (0, 3, 0)
    for call in (pool.rollout.remote(["a"]), pool.ready.remote(), next(pool.stream.remote(["a"]))):
        with pytest.raises(PoolClosedError) as caught:
            ray.get(call, timeout=30)
        assert str(caught.value.cause) == "the pool was shut down"
    ray.get(pool.shutdown.remote(), timeout=30)  # a second one changes nothing
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=60)


def test_stream_yields_every_group_once_as_it_finishes(pool) -> None:
    shorter = [
        RolloutRequest("x", SamplingParams(max_new_tokens=budget, ignore_eos=True))
        for budget in (1, 40, 1, 20, 1)
    ]
    endless = RolloutRequest("x", ENDLESS, request_id="endless")
    stream = pool.stream.remote(["", endless, *shorter])
    order = [ray.get(next(stream), timeout=60).index for _ in range(6)]
    assert sorted(order) == [0, 2, 3, 4, 5, 6]
    assert ray.get(pool.cancel.remote("endless")) == 1
    assert [ray.get(ref, timeout=60).index for ref in stream] == [1]
    explicit = SAMPLING.model_copy(update={"seed": 5})
    streamed = sorted((ray.get(ref) for ref in pool.stream.remote(PROMPTS, explicit)), key=lambda g: g.index)
    assert tokens(streamed) == tokens(rollout(pool, sampling=explicit))


def test_callers_at_once_each_get_their_own_groups_while_the_accounts_balance(pool) -> None:
    named = [RolloutRequest("same name", request_id=0, metadata=caller) for caller in range(2)]
    calls = [
        pool.rollout.remote(
            [named[caller], "x", [caller + 10]] * 4, SamplingParams(max_new_tokens=60, seed=caller)
        )
        for caller in range(2)
    ]
    pending = calls
    while pending:
        assert stats_of_all(pool).in_flight <= 24
        _, pending = ray.wait(pending, num_returns=len(pending), timeout=0.02)
    for caller, groups in enumerate(ray.get(calls)):
        assert [group.index for group in groups] == list(range(12))
        assert {group.metadata for group in groups[::3]} == {caller}
        assert groups[2].prompt_token_ids.tolist() == [caller + 10]


def test_cancelled_call_frees_its_slots_and_is_accounted(pool) -> None:
    before = stats_of_all(pool)
    call = pool.rollout.remote(["a", "b", "c", "d", "e", "f", "g", "h"], ENDLESS)
    stream = pool.stream.remote(["a", "b"], ENDLESS)
    wait_until(lambda: stats_of_all(pool).in_flight - before.in_flight == 10, "not all has arrived")
    ray.cancel(call)
    ray.cancel(stream)
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(call, timeout=30)
    asyncio.run(none_in_flight(pool))
    assert stats_of_all(pool).cancelled - before.cancelled == 10
    assert rollout(pool, ["after"])[0].error is None


def test_call_that_is_wrong_as_a_whole_raises(pool) -> None:
    before = stats_of_all(pool).submitted
    for prompts, sampling, message in [
        ("one prompt", None, r"write \[prompt\]"),
        ([1, 2, 3], None, r"write \[token_ids\]"),
        (["x"], {"n": 2}, "sampling must be SamplingParams"),
    ]:
        with pytest.raises(RequestError, match=message):
            rollout(pool, prompts, sampling)
        with pytest.raises(RequestError, match=message):
            ray.get(next(pool.stream.remote(prompts, sampling)))
    assert stats_of_all(pool).submitted == before
    assert rollout(pool, []) == []
    assert list(pool.stream.remote([])) == []


def test_rollout_actor_finds_no_kernels_in_the_checkout_and_really_uses_its_threads(pool) -> None:
    root = Path(rollout_pool.__file__).resolve().parent.parent

    def look(self):
        import torch

        spec = importlib.util.find_spec("kernels")
        return str(spec.origin) if spec else "", torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    for handle in actors(pool):
        origin, threads, environment = ray.get(handle.__ray_call__.remote(look))
        assert not origin.startswith(str(root))
        assert (threads, environment) == (1, "1")


def test_wrong_configuration_is_refused_in_the_driver(tiny_model_dir: str) -> None:
    for config, error, message in [
        ({"model": "/no/such/model"}, ConfigError, "there is no directory"),
        (
            {"model": tiny_model_dir, "num_actors": 9, "cpus_per_actor": 1},
            CapacityError,
            "cluster has 4 CPUs",
        ),
        ({"model": tiny_model_dir, "gpus_per_actor": 1.0}, CapacityError, "cluster has 0 GPUs"),
    ]:
        with pytest.raises(error, match=message):
            RolloutPool.remote(PoolConfig(**config))
    with pytest.raises(ConfigError, match="must be a PoolConfig, got str"):
        RolloutPool.remote(tiny_model_dir)
    with pytest.raises(TypeError, match=r"write RolloutPool\.remote"):
        RolloutPool(PoolConfig(model=tiny_model_dir))


@pytest.mark.slow
def test_what_only_the_loading_finds_reaches_every_caller_as_its_class(
    pool, tiny_model_dir: str, tmp_path: Path
) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(
        tmp_path
    )
    cases = [
        (PoolConfig(model=str(tmp_path), cpus_per_actor=1), UnsupportedModelError, "BloomForCausalLM"),
        (
            PoolConfig(model=tiny_model_dir, cpus_per_actor=4, start_timeout_s=1.0),
            ActorStartError,
            "start_timeout_s",
        ),
        (
            PoolConfig(model="no-such/model", cpus_per_actor=1),
            ConfigError,
            "cannot load model 'no-such/model'",
        ),
    ]
    options = RolloutPool.options(runtime_env={"env_vars": {"HF_HUB_OFFLINE": "1"}})
    started = [(options.remote(config), error, message) for config, error, message in cases]
    for handle, error, message in started:
        for call in (handle.ready.remote(), handle.rollout.remote(["x"])):
            with pytest.raises(error) as caught:
                ray.get(call, timeout=120)
            assert message in str(caught.value.cause)
            assert "\n" not in str(caught.value.cause)
        assert stats_of_all(handle).submitted == 0
