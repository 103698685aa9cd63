"""Where the time of a decode step goes, beside what this machine can do at best.

    python benchmarks/breakdown.py [--rows 16 64 128] [--json FILE] [--trace FILE.json] [--no-pool]

Runs chat prompts through one engine at each number of rows, all of them always live, with spans around what
a step is made of; in turns with it, it measures the products of the model's shapes with weights as they are,
transposed and prepacked, so that each part is a fraction of a limit. All are medians of rounds. The trace
opens in Perfetto (ui.perfetto.dev). Ray's part is what the same takes longer through a pool of one actor.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out

import torch
from speed import our_peers
from speed.limits import ProductLimits, copy_rate, shapes_of
from speed.machine import machine
from speed.spans import PROMPT, Spans, linears, watch
from speed.steps import PARTS, step_tables
from speed.work import Work
from speed.workloads import make_work

from rollout_pool import Engine


def measure(work: Work, rows: int, rounds: int, copy: float, trace: Path | None) -> dict[str, Any]:
    """The parts of a step of so many rows, and the limits of these: medians of rounds."""
    engine = Engine(work.model, our_peers.engine_config(work, rows), dtype=work.dtype)
    products = ProductLimits(shapes_of(linears(engine.model)), rows, getattr(torch, work.dtype))
    _roll_out(engine, work.warm_up())
    plain = [_roll_out(engine, work) for _ in range(rounds)]  # before the spans, which take a little
    spans = watch(engine)
    watched = []
    for _ in range(rounds):
        products.measure()
        watched.append(_round(engine, work, spans))
    if trace is not None:
        spans.write(trace)
    found = {name: median(one[name] for one in watched) for name in watched[0]}
    parts = {part: found[part] for part in PARTS}
    context = sum(map(len, work.prompts)) / len(work.prompts) + work.max_new / 2
    # Reading alone is at least half as fast again as the copy, whose rate counts both directions.
    kv = 1e3 * rows * context * engine.memory_plan.bytes_per_token / copy
    return {
        "rows": rows,
        "steps": found["steps"],
        "step_ms": sum(parts.values()),
        "parts": parts,
        "prompts_ms": found[PROMPT],
        "whole_s": found["whole_s"],
        "plain_s": median(plain),
        "tokens": found["tokens"],
        "limits": {**products.milliseconds(), "kv": kv, "copy_gb_s": copy / 1e9},
        "ray_ms": None,
    }


def _round(engine: Engine, work: Work, spans: Spans) -> dict[str, float]:
    """Milliseconds of a step by part, and of all prompts."""
    spans.own.clear()
    before = engine.stats()
    spans.is_on = True
    whole_s = _roll_out(engine, work)
    spans.is_on = False
    after = engine.stats()
    steps = after.decode_steps - before.decode_steps
    parts = {part: 1e3 * spans.own[part] / steps for part in PARTS}
    tokens = after.new_tokens - before.new_tokens
    return {**parts, PROMPT: 1e3 * spans.own[PROMPT], "steps": steps, "whole_s": whole_s, "tokens": tokens}


def ray_part(works: list[Work], found: list[dict[str, Any]], rounds: int) -> None:
    """Add to what was found how much longer the same takes through a pool, in milliseconds per step."""
    import ray

    for work, step in zip(works, found, strict=True):
        run = our_peers.pool_of_one(work, work.max_rows)
        run(work.warm_up())
        seconds = []
        for _ in range(rounds):
            begin = perf_counter()
            run(work)
            seconds.append(perf_counter() - begin)
        step["ray_ms"] = 1e3 * (median(seconds) - step["plain_s"]) / step["steps"]
        ray.shutdown()


def _roll_out(engine: Engine, work: Work) -> float:
    """Seconds of one round."""
    begin = perf_counter()
    params = our_peers.sampling(work)
    for prompt in work.prompts:
        engine.submit(our_peers.request(prompt, params))
    while engine.has_work():
        engine.step()
    return perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="by default what fetch-demo-model makes")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=32, help="new tokens per sample")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--no-pool", action="store_true", help="leave Ray's part out")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    parser.add_argument("--trace", type=Path, help="write the steps of the first number of rows here")
    arguments = parser.parse_args()
    if arguments.model is None:
        from rollout_pool.demo_model import default_folder

        arguments.model = str(default_folder())
    torch.set_num_threads(arguments.threads)
    results: dict[str, Any] = {"machine": machine(arguments.threads, arguments.dtype), "steps": []}
    copy = copy_rate()
    works = []
    with tempfile.TemporaryDirectory() as folder:
        chat = make_work(
            "chat", arguments.model, Path(folder), arguments.threads, arguments.dtype, max_new=arguments.new
        )
    for rows in arguments.rows:
        count = max(1, rows // 8)  # every slot is taken by one sample, and all of them end together
        work = chat.part(chat.prompts[:count], n=rows // count)
        works.append(replace(work, max_rows=rows))
        trace = arguments.trace if rows == arguments.rows[0] else None
        results["steps"].append(measure(works[-1], rows, arguments.rounds, copy, trace))
    keep(results, arguments.json)  # a pool takes a while to start
    if not arguments.no_pool:
        ray_part(works, results["steps"], arguments.rounds)
        keep(results, arguments.json)
    print(step_tables(results))


def keep(results: dict[str, Any], path: Path | None) -> None:
    """Write what there is so far."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
