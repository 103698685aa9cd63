"""DeepSpeed's `HybridEngineRollout` in its forms. Runs in an environment of its own (`make bench-full`).

Its continuous forms are greedy with one sample per prompt; its default runs every sample to its budget and
cuts it after the end, because ranks must stay in step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from speed.hf_peers import load
from speed.work import Done, Unavailable, Work, left_padded


def rollout(work: Work, rows: int, *, hybrid: bool = False, slots: int | None = None, **options: bool) -> Any:
    """A function from prompts and a work to the batch that DeepSpeed returns for them."""
    import deepspeed
    from deepspeed.runtime.rollout.base import RolloutRequest, SamplingConfig
    from deepspeed.runtime.rollout.hybrid_engine_rollout import HybridEngineRollout, HybridEngineRolloutConfig

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["MASTER_PORT"] = "0"
    # One process has nobody to share memory with, and the extension for it takes minutes to compile.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
    if hybrid:
        config["hybrid_engine"] = {"enabled": True, "max_out_tokens": work.max_length}
    engine, *_ = deepspeed.initialize(model=load(work), config=config)
    engine.eval()
    # Its tokenizer serves for two ids alone.
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=work.eos[0] if work.eos else None)
    made = HybridEngineRollout(engine, tokenizer, HybridEngineRolloutConfig(**options))

    def run(prompts: list[list[int]], work: Work) -> Any:
        ids, mask = left_padded(prompts)
        settings = SamplingConfig(
            max_new_tokens=work.max_new,
            temperature=work.temperature,
            n_samples_per_prompt=work.n,
            continuous_batch_size=slots,
        )
        return made.generate(RolloutRequest(torch.tensor(ids), torch.tensor(mask)), settings)

    return run


def counted(work: Work, batch: Any) -> tuple[int, int]:
    """Samples and tokens of a batch."""
    start = int(batch.response_start_idx[0])
    made = batch.input_ids[:, start:].tolist()
    there = batch.attention_mask[:, start:].tolist()
    tokens = 0
    for row, mask in zip(made, there, strict=True):
        tokens += work.count(row) if work.eos else min(sum(mask), work.max_new)
    return len(made), tokens


def in_batches(work: Work, rows: int, **options: Any) -> Callable[[Work], Done]:
    """Whole groups of like length, as many at once as the rows hold."""
    run_batch = rollout(work, rows, **options)

    def run(work: Work) -> Done:
        begin, first, samples, tokens = time.perf_counter(), 0.0, 0, 0
        ordered, groups = sorted(work.prompts, key=len), max(1, rows // work.n)
        for start in range(0, len(ordered), groups):
            prompts = ordered[start : start + groups]
            batch = run_batch(prompts, work)
            # Token id 0 is padding to it, also where it was drawn: a sample without end has its whole budget.
            made, count = counted(work, batch)
            tokens += count if work.eos else made * work.max_new
            samples += made
            first = first or time.perf_counter() - begin
        return Done(samples, tokens, first)

    return run


def default(work: Work, rows: int) -> Callable[[Work], Done]:
    """Its default: the model's `generate`."""
    return in_batches(work, rows)


def shared_prefill(work: Work, rows: int) -> Callable[[Work], Done]:
    """Its shared prefill, which needs the hybrid engine's inference kernels."""
    if work.n == 1:
        raise Unavailable("one sample per prompt: no prefill to share")
    return in_batches(work, rows, hybrid=True, use_shared_prefill=True)


def continuous(work: Work, rows: int, **options: bool) -> Callable[[Work], Done]:
    """Its continuous batching with ``rows`` slots."""
    if work.temperature > 0 or work.n > 1:
        raise Unavailable("continuous batching is greedy with one sample per prompt")
    run_all = rollout(work, rows, slots=rows, **options)

    def run(work: Work) -> Done:
        begin = time.perf_counter()
        samples, tokens = counted(work, run_all(work.prompts, work))
        return Done(samples, tokens, time.perf_counter() - begin)

    return run


def aligned(work: Work, rows: int) -> Callable[[Work], Done]:
    """Its continuous batching with aligned decode fronts and trimming."""
    return continuous(work, rows, align_decode_fronts=True, enable_cache_trimming=True)
