"""Weights straight from a trainer's memory into the actors', by Ray's tensor transport with gloo."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM
from waiting import wait_until

from rollout_pool import (
    ConfigError,
    EngineConfig,
    PoolConfig,
    RolloutPool,
    RolloutRequest,
    SamplingParams,
    WeightSyncError,
    verify,
)
from rollout_pool.weight_sync import TensorTransportSource, WeightSource, ship

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

ENGINE = EngineConfig(num_slots=4, max_length=64)
SAMPLING = SamplingParams(n=2, max_new_tokens=12, ignore_eos=True, seed=7)
PROMPTS = [RolloutRequest([5 + number, 9]) for number in range(8)]


@pytest.fixture(scope="module")
def pool(tiny_model_dir: str, cluster: None):
    config = PoolConfig(
        model=tiny_model_dir, num_actors=2, cpus_per_actor=1, engine=ENGINE, weight_transport="gloo"
    )
    handle = RolloutPool.remote(config)
    ray.get(handle.ready.remote(), timeout=180)
    yield handle
    ray.kill(handle)


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def changed(folder: str, seed: int) -> Any:
    model = load(folder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


@ray.remote(num_cpus=0)
class Trainer(TensorTransportSource):
    def __init__(self, model: Any) -> None:
        self._model = model

    def become(self, model: Any, has_group: bool = False) -> None:
        self._model = model
        if has_group:
            torch.distributed.init_process_group(
                "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
            )

    def rollout_weights(self) -> Any:
        return self._model

    def prepare_weights(self, bucket_bytes: int = 0) -> None:
        super().prepare_weights(50_000)


@ray.remote(num_cpus=0)
class PlainTrainer(WeightSource):
    def rollout_weights(self) -> Any:
        return {}


def assert_serves(pool, model: Any, actors: int = 2) -> None:
    groups = ray.get(pool.rollout.remote(PROMPTS, SAMPLING), timeout=180)
    assert verify(groups, model).max_abs_diff < 1e-3
    assert len({group.timing.actor for group in groups}) == actors


def test_weights_come_from_memory_to_memory_and_members_may_change(pool, tiny_model_dir: str) -> None:
    first, second, third = (changed(tiny_model_dir, seed) for seed in (1, 2, 3))
    trainer = Trainer.remote(first)
    receipts = ray.get(pool.sync_weights.remote(trainer), timeout=180)
    assert [(r.actor, r.version) for r in receipts] == [("actor-0", 1), ("actor-1", 1)]
    assert len({r.weights_checksum for r in receipts}) == 1
    assert_serves(pool, first)
    ray.get(trainer.become.remote(second))
    ray.get(pool.sync_weights.remote(trainer), timeout=180)
    assert_serves(pool, second)

    os.kill(ray.get(pool.ready.remote())[0].pid, signal.SIGKILL)
    wait_until(lambda: ray.get(pool.stats.remote()).actors_lost == 1, "nobody noticed")
    wait_until(lambda: ray.get(pool.stats.remote()).num_actors == 2, "the lost actor was not replaced")
    assert_serves(pool, second)  # the new one has them from the other
    ray.get(trainer.become.remote(third))
    ray.get(pool.sync_weights.remote(trainer), timeout=180)
    assert_serves(pool, third)
    ray.get(pool.sync_weights.remote(ship(first)), timeout=180)  # by the object store still
    assert_serves(pool, first)
    ray.kill(trainer)


def test_what_the_transport_cannot_do_is_refused(pool, tiny_model_dir: str) -> None:
    served = changed(tiny_model_dir, 4)
    version = ray.get(pool.sync_weights.remote(ship(served)), timeout=180)[0].version
    with pytest.raises(ConfigError, match="needs a trainer that is a TensorTransportSource"):
        ray.get(pool.sync_weights.remote(PlainTrainer.remote()), timeout=60)
    trainer = Trainer.remote(served)
    ray.get(trainer.become.remote({"lm_head.weight": torch.zeros(3)}))
    with pytest.raises(WeightSyncError, match=r"lm_head.weight has shape \[3\]"):
        ray.get(pool.sync_weights.remote(trainer), timeout=60)
    ray.get(trainer.become.remote(served, has_group=True))
    with pytest.raises(ConfigError, match="has its own process group"):
        ray.get(pool.sync_weights.remote(trainer), timeout=60)
    assert ray.get(pool.stats.remote()).weight_version == version
    assert_serves(pool, served)
    with pytest.raises(ConfigError, match="weight_transport: gloo needs a process group"):
        PoolConfig(model=tiny_model_dir, tensor_parallel_size=2, weight_transport="gloo")
