"""Trainers that train: after each of five steps the pool serves the trainer's model.

The trainer is plain torch, or DeepSpeed on two ranks at every ZeRO stage; the pool has two plain actors, or
one tensor-parallel group. The trainer's model is read back as DeepSpeed itself consolidates it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Phi3Config
from waiting import wait_until

from rollout_pool import (
    EngineConfig,
    PoolConfig,
    RolloutPool,
    RolloutRequest,
    SamplingParams,
    WeightSyncError,
    verify,
)
from rollout_pool.weight_sync import WeightSource, ship

pytestmark = pytest.mark.slow
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

ENGINE = EngineConfig(num_slots=4, max_length=64)
SAMPLING = SamplingParams(n=2, max_new_tokens=16, ignore_eos=True)
PROMPTS = [RolloutRequest([5 + number, 9, 33]) for number in range(4)]
NUM_STEPS = 5


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=8, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module", params=[("transformers", 1), ("transformers", 2), ("deepspeed", 2)], ids=str)
def pool(request, tiny_model_dir: str, cluster: None):
    backend, size = request.param
    config = PoolConfig(
        model=tiny_model_dir,
        num_actors=2 // size,
        cpus_per_actor=1,
        tensor_parallel_size=size,
        tensor_parallel_backend=backend,
        engine=ENGINE,
    )
    handle = RolloutPool.remote(config)
    ray.get(handle.ready.remote(), timeout=300)
    yield handle
    ray.get(handle.shutdown.remote())
    ray.kill(handle)


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def batch(step: int) -> torch.Tensor:
    return torch.randint(5, 128, (2, 16), generator=torch.Generator().manual_seed(step))


def check(pool, source: Any, model: Any, step: int) -> None:
    receipts = ray.get(pool.sync_weights.remote(source, step), timeout=300)
    assert len(receipts) == 2  # ranks, in either kind of pool
    assert {receipt.version for receipt in receipts} == {step}
    groups = ray.get(pool.rollout.remote(PROMPTS, SAMPLING), timeout=300)
    found = verify(groups, model)
    assert found.num_tokens == 4 * 2 * 16
    assert found.max_abs_diff < 1e-3
    assert {sample.weight_version for group in groups for sample in group.samples} == {step}


def test_plain_trainer_after_every_step(pool, tiny_model_dir: str) -> None:
    model = load(tiny_model_dir)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = ray.get(pool.stats.remote()).weight_version
    stale = ray.get(pool.rollout.remote(PROMPTS, SAMPLING), timeout=300)
    for step in range(1, NUM_STEPS + 1):
        model.train()
        model(input_ids=batch(step), labels=batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        check(pool, ship(model, bucket_bytes=50_000), model, first + step)
    assert verify(stale, model).max_abs_diff > 1e-2  # training has moved it, or nothing is shown above


def test_update_that_does_not_fit_is_refused_and_a_lost_rank_gets_the_present_one(
    pool, tiny_model_dir
) -> None:
    model = load(tiny_model_dir)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    version = ray.get(pool.stats.remote()).weight_version + 1
    check(pool, ship(model), model, version)
    name = "model.layers.0.mlp.down_proj.weight"
    for change, said in (
        (
            lambda weight: weight[:, ::2],
            r"has shape \[64, 64\], here it is \[64, 128\]",
        ),  # a rank's part of it
        (lambda weight: weight * torch.nan, "holds NaN or infinity"),
    ):
        wrong = {**model.state_dict(), name: change(model.state_dict()[name])}
        with pytest.raises(WeightSyncError, match=f"{name} {said}"):
            ray.get(pool.sync_weights.remote(ship(wrong)), timeout=180)
    before = ray.get(pool.stats.remote())
    os.kill(ray.get(pool.ready.remote())[0].ranks[-1].pid, signal.SIGKILL)

    def is_replaced() -> bool:
        now = ray.get(pool.stats.remote())
        return now.actors_lost > before.actors_lost and now.num_actors == before.num_actors

    wait_until(is_replaced, "the lost rank was not replaced")
    groups = ray.get(pool.rollout.remote(PROMPTS, SAMPLING), timeout=180)
    assert verify(groups, model).max_abs_diff < 1e-3
    assert {sample.weight_version for group in groups for sample in group.samples} == {version}


@ray.remote(num_cpus=0)
class Rank(WeightSource):
    """One rank of a DeepSpeed trainer, on gloo."""

    def __init__(self, rank: int, size: int, stage: int, folder: str) -> None:
        self._rank, self._size, self._stage, self._folder = rank, size, stage, folder

    def free_port(self) -> int:
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as door:
            return door.getsockname()[1]

    def start(self, port: int) -> None:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
        ranks = {
            "RANK": self._rank,
            "WORLD_SIZE": self._size,
            "LOCAL_RANK": self._rank,
            "LOCAL_SIZE": self._size,
        }
        os.environ.update(where | {name: str(value) for name, value in ranks.items()})
        import deepspeed
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False  # compiled when first used; gloo does the sums
        torch.set_num_threads(1)
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": self._stage, "stage3_param_persistence_threshold": 100},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(self, number: int) -> float:
        ids = batch(10 * number + self._rank)
        loss = self._engine(input_ids=ids, labels=ids).loss
        self._engine.backward(loss)
        self._engine.step()
        return float(loss)

    def consolidated(self) -> dict[str, Any]:
        """The whole model, by DeepSpeed's own means; every rank takes part."""
        if self._stage < 3:
            values = self._engine.module.state_dict()
        else:
            values = self._engine._zero3_consolidated_16bit_state_dict() or {}
        return {name: value.detach().clone() for name, value in values.items()}

    def num_elements(self) -> int:
        return sum(parameter.numel() for parameter in self._engine.module.parameters())

    def rollout_weights(self) -> Any:
        return self._engine

    def weight_buckets(self, bucket_bytes: int = 0) -> Any:
        yield from super().weight_buckets(50_000)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_trainer_of_two_ranks_after_every_step(pool, tiny_model_dir: str, stage: int) -> None:
    pytest.importorskip("deepspeed")
    model = load(tiny_model_dir)
    whole = sum(parameter.numel() for parameter in model.parameters())
    ranks = [Rank.remote(rank, 2, stage, tiny_model_dir) for rank in (0, 1)]
    port = ray.get(ranks[0].free_port.remote(), timeout=120)
    ray.get([rank.start.remote(port) for rank in ranks], timeout=300)
    assert (ray.get(ranks[0].num_elements.remote()) < whole) == (stage == 3)
    first = ray.get(pool.stats.remote()).weight_version
    for step in range(1, NUM_STEPS + 1):
        ray.get([rank.step.remote(step) for rank in ranks], timeout=300)
        values, _ = ray.get([rank.consolidated.remote() for rank in ranks], timeout=300)
        model.load_state_dict(values)
        check(pool, ranks, model, first + step)
    for rank in ranks:
        ray.kill(rank)


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("tied Llama", "transformers"),
        ("tied Llama", "deepspeed"),
        ("fused Phi-3", "transformers"),
        ("MoE", "transformers"),
    ],  # AutoTP refuses the other two
)
def test_shards_of_other_shapes_take_the_trainers_weights(
    cluster: None, tmp_path: Path, family: str, backend: str
) -> None:
    """A head tied to the embedding, fused projections, stacked experts."""
    size = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
    }  # fmt: skip
    if family == "tied Llama":
        configuration: Any = LlamaConfig(**size, tie_word_embeddings=True)
    elif family == "MoE":
        configuration = MixtralConfig(**size, num_local_experts=4)
    else:
        configuration = Phi3Config(**size)
    AutoModelForCausalLM.from_config(configuration).save_pretrained(tmp_path)
    config = PoolConfig(
        model=str(tmp_path),
        cpus_per_actor=1,
        tensor_parallel_size=2,
        tensor_parallel_backend=backend,  # type: ignore[arg-type]
        engine=ENGINE,
    )
    pool = RolloutPool.remote(config)
    model = load(str(tmp_path))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    check(pool, ship(model), model, 1)
    ray.get(pool.shutdown.remote())
