"""Ways to decode many rows with one model: the engine, ``generate`` and ``generate_batch``."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from gpu.parts import Setting
from rollout_pool import Engine, EngineConfig, SamplingParams

Run = Callable[[int, int], int]
"""``run(rows, new)``: ``new`` tokens for each of ``rows`` samples of one prompt; returns how many it made."""


def free_memory() -> None:
    """Give back what objects that are gone held, for what comes next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Contender:
    """One way to decode with one model."""

    make: Run
    close: Callable[[], None] = lambda: None
    """Give back what it holds on to."""

    def run(self, rows: int, new: int) -> None:
        """
        Raises:
            RuntimeError: it made another number of tokens.
        """
        made = self.make(rows, new)
        if made != rows * new:
            raise RuntimeError(f"made {made} tokens, {rows * new} were asked for")


def engine(
    model: PreTrainedModel,
    prompt: list[int],
    setting: Setting,
    most_rows: int,
    most_new: int,
    has_graphs: bool,
) -> Contender:
    """Ours: one engine with a slot for each row; the prompt is computed once."""
    config = EngineConfig(
        num_slots=most_rows,
        max_length=len(prompt) + most_new,
        cuda_graphs="auto" if has_graphs else "off",
    )
    served = Engine(model, config)

    def run(rows: int, new: int) -> int:
        sampling = SamplingParams(n=rows, max_new_tokens=new, ignore_eos=True, seed=setting.seed % 2**31)
        (group,) = served.generate([prompt], sampling)
        if group.error:
            raise RuntimeError(group.error)
        return sum(sample.token_ids.size for sample in group.samples)

    return Contender(run)


def generate(model: PreTrainedModel, prompt: list[int], setting: Setting) -> Contender:
    """Hugging Face ``generate`` on one batch, as it comes."""
    ids = torch.tensor([prompt], device=setting.device)

    def run(rows: int, new: int) -> int:
        batch = ids.expand(rows, -1)
        out = model.generate(
            batch, attention_mask=torch.ones_like(batch), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=new, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return int(out[:, len(prompt) :].numel())

    return Contender(run)


def generate_batch(
    model: PreTrainedModel, prompt: list[int], setting: Setting, most_rows: int, most_new: int
) -> Contender:
    """Hugging Face continuous batching with its own choice of sizes, kept warm between calls."""
    options: dict[str, Any] = {"max_memory_percent": 0.5, "max_requests_per_batch": most_rows}
    if setting.is_dry:
        options = {"num_blocks": 8 * most_rows, "max_batch_tokens": 64, "max_requests_per_batch": most_rows}
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)  # it warns at every call
    batching = ContinuousBatchingConfig(**options)
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=most_new, eos_token_id=-1,
        pad_token_id=0,
    )  # fmt: skip
    implementation = model.config._attn_implementation

    def run(rows: int, new: int) -> int:
        with torch.inference_mode():
            out = model.generate_batch(
                inputs=[prompt] * rows, generation_config=config, continuous_batching_config=batching,
                persistent_manager=True, warmup=not setting.is_dry, max_new_tokens=new,
            )  # fmt: skip
        return sum(len(result.generated_tokens) for result in out.values())

    def close() -> None:
        model.destroy_cached_continuous_batching_manager()
        model.set_attn_implementation(implementation)

    return Contender(run, close)
