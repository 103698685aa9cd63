"""Transformers' own ways: `generate` in batches, and `generate_batch`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from speed.work import Done, Unavailable, Work, left_padded


def load(work: Work, **options: Any) -> Any:
    """The model in evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(
        work.model, dtype=getattr(torch, work.dtype), trust_remote_code=work.own_code, **options
    ).eval()


def generate(work: Work, rows: int) -> Callable[[Work], Done]:
    """Static batches of ``rows``; prompts of like length share one, which pads least."""
    model = load(work)

    def run(work: Work) -> Done:
        begin, first, samples, tokens = time.perf_counter(), 0.0, 0, 0
        expanded = [prompt for prompt in sorted(work.prompts, key=len) for _ in range(work.n)]
        for start in range(0, len(expanded), rows):
            ids, mask = left_padded(expanded[start : start + rows])
            out = generate_rows(model, work, torch.tensor(ids), torch.tensor(mask))
            tokens += sum(map(work.count, out))
            samples += len(out)
            if not first and samples >= work.n:
                first = time.perf_counter() - begin
        return Done(samples, tokens, first)

    return run


def generate_rows(model: Any, work: Work, ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """The new tokens of one left-padded batch, padding after their ends included."""
    options: dict[str, Any] = {"do_sample": work.temperature > 0, "max_new_tokens": work.max_new}
    if work.temperature > 0:
        options |= {"temperature": work.temperature, "top_k": 0, "top_p": 1.0}
    out = model.generate(ids, attention_mask=mask, eos_token_id=work.eos or None, pad_token_id=0, **options)
    tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return tokens


def generate_batch(work: Work, rows: int) -> Callable[[Work], Done]:
    """Transformers' continuous batching with paged KV; its results come all at once."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = load(work, attn_implementation="sdpa")
    page = 64
    batching = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=rows * (-(-work.max_length // page) + 1),
        max_batch_tokens=max(256, rows),
        max_requests_per_batch=rows,
    )

    def run(work: Work) -> Done:
        begin = time.perf_counter()
        config = GenerationConfig(
            do_sample=work.temperature > 0,
            temperature=work.temperature or 1.0,
            max_new_tokens=work.max_new,
            num_return_sequences=work.n,
            eos_token_id=work.eos or -1,
            pad_token_id=0,
            top_k=0,
            top_p=1.0,
        )
        with torch.inference_mode():
            out = model.generate_batch(
                inputs=work.prompts,
                generation_config=config,
                continuous_batching_config=batching,
                warmup=False,
            )
        results = list(out.values())
        faults = [result.error for result in results if result.error]
        if faults:
            raise Unavailable(str(faults[0]))
        tokens = sum(work.count(result.generated_tokens) for result in results)
        return Done(len(results), tokens, time.perf_counter() - begin)

    return run
