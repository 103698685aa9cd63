"""TRL's GRPOTrainer on rollouts of an engine that runs on the trainer's own model: no second copy, no sync.

    python examples/trl_grpo.py --steps 20

A model of 0.2M random weights learns to write one letter; the reward is the share of that letter. With
``--model FOLDER`` the same for a model of yours. Needs ``pip install 'rollout-pool[trl]'``.
"""

from __future__ import annotations

import argparse
import os
import string
import tempfile
import warnings
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads leave their core to others
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import GRPOConfig, GRPOTrainer

from rollout_pool import EngineConfig, verify
from rollout_pool.adapters.trl import GRPORollout, rollout_func

warnings.filterwarnings("ignore", category=FutureWarning)
LETTER = "e"
PROMPTS = ("a letter: ", "write: ", "more of it: ", "the best one is ")


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, print one line per step, and return the mean reward of each step."""
    parser = argparse.ArgumentParser(description="TRL's GRPOTrainer on rollouts of an engine.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", help="a folder; by default a tiny random model")
    parser.add_argument("--tokens", type=int, default=16, help="new tokens per sample (default: 16)")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    torch.manual_seed(options.seed)
    model, tokenizer = load(options.model) if options.model else tiny()
    rollouts = rollout_func(engine_config=EngineConfig(num_slots=32, max_length=64))
    reward = Reward(rollouts, model)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=options.tokens,
            temperature=1.0,
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant",
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            seed=options.seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * 8]),
            rollout_func=rollouts,
        ).train()
    return reward.means


class Reward:
    """The share of one letter; prints how it goes, and how far rollouts and trainer are apart."""

    __name__ = "share_of_letter"

    def __init__(self, rollouts: GRPORollout, model: Any) -> None:
        self.rollouts, self.model = rollouts, model
        self.means: list[float] = []

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        rewards = [text.count(LETTER) / max(len(text), 1) for text in completions]
        self.means.append(sum(rewards) / len(rewards))
        # TRL asks for rewards before it changes the weights: a plain forward must agree with the rollout.
        apart = verify(self.rollouts.last_groups, self.model).max_abs_diff
        print(
            f"step {len(self.means):3}  reward {self.means[-1]:.3f}  "
            f"max |difference| of logprobs {apart:.1e}  {completions[0]!r}"
        )
        return rewards


def load(folder: str) -> tuple[Any, Any]:
    """A model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


def tiny() -> tuple[Any, Any]:
    """A random Llama whose tokens are characters."""
    tokens = ["<pad>", "<eos>", *string.ascii_lowercase, *" .,:"]
    core = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config), tokenizer


if __name__ == "__main__":
    main()
