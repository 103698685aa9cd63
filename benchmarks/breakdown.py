"""Where the time of a decode step goes, beside what this machine can do at best.

    python benchmarks/breakdown.py [--rows 16 64 128] [--json FILE] [--trace FILE.json] [--no-pool]

Runs chat prompts through one engine at each number of rows, all of them always live, with spans around what
a step is made of; in the same run it measures the products of the model's shapes with weights as they are,
transposed and prepacked, and copies in memory, so that each part is a fraction of a limit. The trace opens
in Perfetto (ui.perfetto.dev). Ray's part is what the same work takes longer through a pool of one actor.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out

import torch
from speed import our_peers
from speed.limits import copy_rate, product_limits, shapes_of
from speed.machine import machine
from speed.spans import PROMPT, linears, watch
from speed.steps import PARTS, step_tables
from speed.work import Work
from speed.workloads import make_work

from rollout_pool import Engine


def measure(work: Work, rows: int, copy: float, trace: Path | None) -> dict[str, Any]:
    """The parts of a step of so many rows, and the limits of these."""
    engine = Engine(work.model, our_peers.engine_config(work, rows), dtype="float32")
    shapes = shapes_of(linears(engine.model))
    _roll_out(engine, work.warm_up())
    plain_s = _roll_out(engine, work)
    spans = watch(engine)
    before = engine.stats()
    spans.is_on = True
    whole_s = _roll_out(engine, work)
    spans.is_on = False
    after = engine.stats()
    steps = after.decode_steps - before.decode_steps
    parts = {part: 1e3 * spans.own[part] / steps for part in PARTS}
    if trace is not None:
        spans.write(trace)
    limits = product_limits(shapes, rows)
    context = sum(map(len, work.prompts)) / len(work.prompts) + work.max_new / 2
    # Reading alone is at least half as fast again as the copy, whose rate counts both directions.
    limits["kv"] = 1e3 * rows * context * engine.memory_plan.bytes_per_token / copy
    limits["copy_gb_s"] = copy / 1e9
    return {
        "rows": rows,
        "steps": steps,
        "step_ms": sum(parts.values()),
        "parts": parts,
        "prompts_ms": 1e3 * spans.own[PROMPT],
        "whole_s": whole_s,
        "plain_s": plain_s,
        "tokens": after.new_tokens - before.new_tokens,
        "limits": limits,
        "ray_ms": None,
    }


def ray_part(works: list[Work], found: list[dict[str, Any]]) -> None:
    """Add to what was found how much longer the same takes through a pool, in milliseconds per step."""
    import ray

    for work, step in zip(works, found, strict=True):
        run = our_peers.pool_of_one(work, work.max_rows)
        run(work.warm_up())
        begin = perf_counter()
        run(work)
        step["ray_ms"] = 1e3 * (perf_counter() - begin - step["plain_s"]) / step["steps"]
        ray.shutdown()


def _roll_out(engine: Engine, work: Work) -> float:
    """Seconds of one round."""
    begin = perf_counter()
    params = our_peers.sampling(work)
    for index, prompt in enumerate(work.prompts):
        engine.submit(our_peers.request(prompt, params, index))
    while engine.has_work():
        engine.step()
    return perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="by default what fetch-demo-model makes")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--new", type=int, default=32, help="new tokens per sample")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-pool", action="store_true", help="leave Ray's part out")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    parser.add_argument("--trace", type=Path, help="write the steps of the first number of rows here")
    arguments = parser.parse_args()
    if arguments.model is None:
        from rollout_pool.demo_model import default_folder

        arguments.model = str(default_folder())
    torch.set_num_threads(arguments.threads)
    results: dict[str, Any] = {"machine": machine(arguments.threads), "steps": []}
    copy = copy_rate()
    works = []
    with tempfile.TemporaryDirectory() as folder:
        chat = make_work("chat", arguments.model, Path(folder), arguments.threads, max_new=arguments.new)
    for rows in arguments.rows:
        count = max(1, rows // 8)  # every slot is taken by one sample, and all of them end together
        work = chat.part(chat.prompts[:count], n=rows // count)
        works.append(replace(work, max_rows=rows))
        trace = arguments.trace if rows == arguments.rows[0] else None
        results["steps"].append(measure(works[-1], rows, copy, trace))
    keep(results, arguments.json)  # a pool takes a while to start
    if not arguments.no_pool:
        ray_part(works, results["steps"])
        keep(results, arguments.json)
    print(step_tables(results))


def keep(results: dict[str, Any], path: Path | None) -> None:
    """Write what there is so far."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
