"""One decode step through the slot cache against one through the cache that `generate` uses.

    python benchmarks/decode_step.py                       # the demo model
    python benchmarks/decode_step.py --rows 64 --context 128 512

Both run the same model on the same tokens at the same length in every row. The other step is what
Transformers does by default on a CPU: a `DynamicCache`, which concatenates, and SDPA, before which the KV
heads are repeated. Linear weights lie alike for both, so only cache and attention differ. Rounds are
interleaved; ratios come from one run.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM, PreTrainedModel

from rollout_pool.actors.kv_cache import SlotCache
from rollout_pool.actors.linear_layout import lay_out, one_layout
from rollout_pool.actors.model_runner import ModelRunner
from rollout_pool.demo_model import default_folder

CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def concatenating_step(model: PreTrainedModel, rows: int, context: int) -> Callable[[], float]:
    """A step of `generate`'s kind; returns its seconds. The new column is cropped again, untimed."""
    cache = DynamicCache(config=model.config)
    ids = torch.randint(3, model.config.vocab_size, (rows, context))
    model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE: cache})
    token = torch.randint(3, model.config.vocab_size, (rows, 1))
    positions = torch.full((rows, 1), context)

    def step() -> float:
        begin = perf_counter()
        model(input_ids=token, position_ids=positions, use_cache=True, **{CACHE: cache})
        seconds = perf_counter() - begin
        cache.crop(-1)
        return seconds

    return step


def slot_step(model: PreTrainedModel, rows: int, context: int) -> Callable[[], float]:
    """A step of the engine's kind; returns its seconds."""
    runner = ModelRunner(model)
    prompt = torch.randint(3, model.config.vocab_size, (context,))
    prefix = runner.prefill(prompt)
    cache = SlotCache(prefix.cache, rows, context + 64)
    cache.expand(prefix.cache, torch.arange(rows), context)
    tokens = torch.randint(3, model.config.vocab_size, (rows,))
    positions = torch.full((rows,), context)

    def step() -> float:
        begin = perf_counter()
        runner.decode(cache, tokens, positions, context)
        return perf_counter() - begin

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=str(default_folder()))
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 128])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    lay_out(model, one_layout(model, "transposed"))
    print(
        f"{torch.get_num_threads()} threads, medians of {arguments.rounds} interleaved rounds, milliseconds"
    )
    print(f"{'rows':>5} {'context':>8} {'concatenating':>14} {'slots':>8} {'ratio':>6}")
    with torch.inference_mode():
        for rows in arguments.rows:
            for context in arguments.context:
                steps = concatenating_step(model, rows, context), slot_step(model, rows, context)
                rounds = [[step() for step in steps] for _ in range(arguments.rounds + 1)][1:]
                before, after = (1e3 * median(column) for column in zip(*rounds, strict=True))
                print(f"{rows:5} {context:8} {before:14.1f} {after:8.1f} {before / after:6.2f}", flush=True)


if __name__ == "__main__":
    main()
