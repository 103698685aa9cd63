"""Two ranks of DeepSpeed ZeRO-3 train a policy; a rollout pool on Ray gets their weights after every step.

    python examples/deepspeed_zero3.py                                        # starts both ranks, on CPUs
    torchrun --nproc-per-node 2 examples/deepspeed_zero3.py                   # the same, started for it

Once training has begun, no rank holds the whole model. The first one also talks to Ray: it asks the pool for
rollouts and shares them out, each rank learns from its part, and all of them gather the new weights for the
pool, a bucket at a time (``ship``). When a rank learns, it compares the log-probabilities that came with the
samples with those of its own forward: after every sync they must be the same.

The task is a toy: answer with the first token of the prompt, over and over. The loss is REINFORCE with the
mean reward of the group as its baseline. Needs ``pip install 'rollout-pool[deepspeed]'``.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads leave their core to others
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import ray
import torch
from torch import distributed
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rollout_pool import EngineConfig, PoolConfig, RolloutGroup, RolloutPool, Sample, SamplingParams
from rollout_pool.adapters.padded import PaddedBatch, pad_groups
from rollout_pool.weight_sync import ship

VOCAB, PROMPT, ANSWER = 16, 4, 8
PROMPTS, SAMPLES = 16, 8  # per step, of all ranks together
MODEL = LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1,
    bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": PROMPTS * SAMPLES // 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
    # A torch optimizer on CPUs; with GPUs leave these two out and name a DeepSpeed optimizer.
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def join(rank: int, size: int, port: int) -> None:
    """Enter the trainer's process group, unless the launcher has said all that is needed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    for name, value in {**places, "MASTER_ADDR": "127.0.0.1", "LOCAL_SIZE": size}.items():
        os.environ.setdefault(name, str(value))
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False  # compiled when first used; gloo does the sums
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def from_first_rank(value: Any) -> Any:
    """What rank 0 has, on every rank."""
    box = [value]
    distributed.broadcast_object_list(box)
    return box[0]


def reward_of(group: RolloutGroup, sample: Sample) -> float:
    """The share of the answer that is the prompt's first token."""
    return float(np.mean(sample.token_ids == group.prompt_token_ids[0]))


def learn(engine: Any, groups: list[RolloutGroup]) -> tuple[float, float]:
    """One step on this rank's groups: their mean reward, and how far log-probabilities were apart."""
    batch: PaddedBatch = pad_groups(groups, pad_token_id=0, rewards=reward_of)
    assert batch.rewards is not None
    out = engine(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids
    )
    logprobs = batch.at_predictors(out.logits).float().log_softmax(dim=-1)
    logprobs = logprobs.gather(-1, batch.responses.unsqueeze(-1)).squeeze(-1)
    apart = ((logprobs.detach() - batch.logprobs) * batch.response_mask).abs().max()
    rewards = batch.rewards.view(-1, SAMPLES)
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)).view(-1, 1)
    engine.backward(-(advantages * logprobs * batch.response_mask).sum() / batch.num_rows)
    engine.step()
    return float(batch.rewards.mean()), float(apart)


def start_pool(folder: str) -> Any:
    """On the first rank."""
    ray.init(log_to_driver=False, include_dashboard=False)
    engine = EngineConfig(num_slots=64, max_length=PROMPT + ANSWER)
    pool = RolloutPool.remote(PoolConfig(model=folder, dtype="float32", engine=engine))
    ray.get(pool.ready.remote())
    return pool


def train(rank: int, size: int, port: int, folder: str, steps: int) -> None:
    """What every rank does."""
    join(rank, size, port)
    import deepspeed

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=DEEPSPEED)
    pool = start_pool(folder) if rank == 0 else None
    dice, sampling = np.random.default_rng(0), SamplingParams(n=SAMPLES, max_new_tokens=ANSWER)
    groups: list[RolloutGroup] | None = None
    for step in range(steps):
        if pool is not None:
            prompts = dice.integers(1, VOCAB, size=(PROMPTS, PROMPT)).tolist()
            groups = ray.get(pool.rollout.remote(prompts, sampling))
        mine = from_first_rank(groups)[rank::size]
        reward, apart = learn(engine, mine)
        shipment = ship(engine)  # all ranks gather; the first one has the result
        found = torch.tensor([reward / size, apart])
        distributed.all_reduce(found[:1])
        distributed.all_reduce(found[1:], op=distributed.ReduceOp.MAX)
        if pool is not None:
            (receipt,) = ray.get(pool.sync_weights.remote(shipment))
            print(
                f"step {step:3}  reward {found[0]:.3f}  logprobs off by {found[1]:.0e}  "
                f"pool at version {receipt.version}, {receipt.num_bytes:,} bytes",
                flush=True,
            )
    if pool is not None:
        ray.get(pool.shutdown.remote())
        ray.shutdown()
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="ZeRO-3 training on a rollout pool, on two CPU ranks.")
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as own:
        if "RANK" in os.environ:  # torchrun has started the ranks
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            join(rank, size, 0)
            folder = from_first_rank(own)
            if rank == 0:
                LlamaForCausalLM(MODEL).save_pretrained(folder)
            distributed.barrier()
            train(rank, size, 0, folder, steps)
            return
        LlamaForCausalLM(MODEL).save_pretrained(own)
        with socket.create_server(("127.0.0.1", 0)) as door:
            port = door.getsockname()[1]
        torch.multiprocessing.spawn(train, args=(2, port, own, steps), nprocs=2)


if __name__ == "__main__":
    main()
