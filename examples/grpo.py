"""GRPO in one file: a pool of rollout actors, a plain torch trainer, new weights after every step.

    python examples/grpo.py                          # about two minutes on two CPU cores
    python examples/grpo.py --seed 1 --curve docs/images/grpo_seed_1.png

The task is a toy that a random model can learn from nothing but rewards: repeat the first token of the
prompt. The reward is the share of the answer that does. A random model gets one of 16, and one that
has learned to look back gets all. Everything else is as in a real run: groups of samples, advantages within
the group, a clipped ratio against the log-probabilities that came with the samples, and a check that
these are the trainer's own. Needs ``pip install 'rollout-pool[examples]'`` for the curve.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads leave their core to others
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollout_pool import EngineConfig, PoolConfig, RolloutGroup, RolloutPool, Sample, SamplingParams, verify
from rollout_pool.adapters.padded import PaddedBatch, pad_groups
from rollout_pool.weight_sync import ship

VOCAB, PROMPT, ANSWER = 16, 4, 8
PROMPTS, SAMPLES = 16, 8  # per step
CLIP = 0.2


def make_model(seed: int) -> LlamaForCausalLM:
    """A small Llama that knows nothing."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def reward_of(group: RolloutGroup, sample: Sample) -> float:
    """The share of the answer that is the prompt's first token."""
    return float(np.mean(sample.token_ids == group.prompt_token_ids[0]))


def policy_loss(model: LlamaForCausalLM, batch: PaddedBatch) -> torch.Tensor:
    """PPO's clipped objective with GRPO's advantages: rewards less their group's mean, over its spread."""
    assert batch.rewards is not None
    rewards = batch.rewards.view(-1, SAMPLES)
    spread = rewards.std(dim=1, keepdim=True) + 1e-4
    advantages = ((rewards - rewards.mean(dim=1, keepdim=True)) / spread).view(-1, 1)
    out = model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids
    )
    logprobs = batch.at_predictors(out.logits).float().log_softmax(dim=-1)
    logprobs = logprobs.gather(-1, batch.responses.unsqueeze(-1)).squeeze(-1)
    ratio = (logprobs - batch.logprobs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gain * batch.response_mask).sum() / batch.response_mask.sum()


def train(seed: int, steps: int, num_actors: int) -> list[float]:
    """The mean reward of every step."""
    model = make_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    dice = np.random.default_rng(seed)
    sampling = SamplingParams(n=SAMPLES, max_new_tokens=ANSWER)
    curve = []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = EngineConfig(num_slots=64, max_length=PROMPT + ANSWER)
        config = PoolConfig(model=folder, num_actors=num_actors, seed=seed, dtype="float32", engine=engine)
        pool = RolloutPool.remote(config)
        ray.get(pool.ready.remote())
        begin = time.monotonic()
        for step in range(steps):
            prompts = dice.integers(1, VOCAB, size=(PROMPTS, PROMPT)).tolist()
            groups = ray.get(pool.rollout.remote(prompts, sampling))
            batch = pad_groups(groups, pad_token_id=0, rewards=reward_of)
            assert batch.rewards is not None
            curve.append(float(batch.rewards.mean()))
            if step % 10 == 0:
                worst = verify(groups[:2], model).max_abs_diff
                took = time.monotonic() - begin
                print(f"step {step:3}  reward {curve[-1]:.3f}  logprobs off by {worst:.0e}  {took:4.0f} s")
            loss = policy_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            ray.get(pool.sync_weights.remote(ship(model)))
        ray.get(pool.shutdown.remote())
    return curve


def draw(curve: list[float], path: Path, seed: int) -> None:
    """The curve as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    axes.plot(curve)
    axes.axhline(1 / VOCAB, linestyle=":", color="grey", label="chance")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02), title=f"GRPO on the pool, seed {seed}")
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny model by GRPO on a rollout pool.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--curve", type=Path, help="write the reward curve to this PNG")
    arguments = parser.parse_args()
    ray.init(log_to_driver=False, include_dashboard=False)
    torch.set_num_threads(1)
    curve = train(arguments.seed, arguments.steps, arguments.actors)
    first, last = np.mean(curve[:5]), np.mean(curve[-5:])
    print(f"mean reward of the first 5 steps {first:.3f}, of the last 5 steps {last:.3f}")
    if arguments.curve is not None:
        draw(curve, arguments.curve, arguments.seed)
        print(f"curve in {arguments.curve}")


if __name__ == "__main__":
    main()
