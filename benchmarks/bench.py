"""Rollouts per second, ours beside what people would otherwise use: workloads, peers, medians of rounds.

    python benchmarks/bench.py              # make bench: every workload, main peers
    python benchmarks/bench.py quick        # make bench-quick: under three minutes, beside `generate` alone
    python benchmarks/bench.py full         # make bench-full: every peer, DeepSpeed's in .venv-deepspeed

Ratios come first. `--json` keeps the figures (workloads that are run again replace those in the file), and
`benchmarks/render.py` makes the tables of docs/performance.md from such files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out

from speed.machine import machine
from speed.peers import OUR_WAYS, OURS, PEERS
from speed.rounds import run_work
from speed.table import ratio_table
from speed.workloads import RECIPES, make_work

ROUNDS = {"quick": 2, "main": 3, "full": 3}


def peers_of(workload: str, size: str) -> list[str]:
    """Who takes part in a workload."""
    if size == "full":
        return list(PEERS)
    if size == "quick":
        return [OURS, "generate"]
    return [*OUR_WAYS, "generate", *RECIPES[workload].peers]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and keep after every workload what there is."""
    path: Path | None = arguments.json
    results: dict[str, Any] = {"size": arguments.size, "workloads": {}}
    if path is not None and path.exists():
        results = json.loads(path.read_text(encoding="utf-8"))
    results["machine"] = machine(arguments.threads, arguments.dtype)
    results["size"] = arguments.size
    names = arguments.workloads or [
        name for name, recipe in RECIPES.items() if arguments.size != "quick" or recipe.quick is not None
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            quick = RECIPES[name].quick if arguments.size == "quick" else None
            changes = {**(quick or {}), **arguments.change}
            work = make_work(
                name, arguments.model, Path(folder), arguments.threads, arguments.dtype, **changes
            )
            peers = arguments.peers or peers_of(name, arguments.size)
            rounds = arguments.rounds or ROUNDS[arguments.size]
            peers = list(dict.fromkeys([OURS, *peers]))
            found = run_work(work, peers, rounds, arguments.patience)
            results["workloads"][name] = {**found, "load": round(os.getloadavg()[2], 1)}
            print(ratio_table({**results, "workloads": {name: results["workloads"][name]}}), flush=True)
            if path is not None:
                path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def number(text: str) -> tuple[str, int]:
    """``num_prompts=4`` and the like."""
    name, _, value = text.partition("=")
    return name, int(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("size", nargs="?", choices=ROUNDS, default="main")
    parser.add_argument("--model", help="by default what fetch-demo-model makes")
    parser.add_argument("--workloads", nargs="+", choices=RECIPES)
    parser.add_argument("--peers", nargs="+", choices=PEERS, help="besides ours")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of all peers")
    parser.add_argument("--patience", type=float, default=150.0, help="seconds per peer and workload")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    parser.add_argument(
        "--change",
        type=number,
        nargs="+",
        default=[],
        help="other sizes: num_prompts=4 n=2 max_new=8 max_rows=8",
    )
    arguments = parser.parse_args()
    arguments.change = dict(arguments.change)
    if arguments.model is None:
        from rollout_pool.demo_model import default_folder

        arguments.model = str(default_folder())
    run(arguments)


if __name__ == "__main__":
    main()
