"""Tell what a configuration takes, and what of it fits, before anything starts.

Memory of weights and KV, the slots that fit, actors, threads, and what is asked of Ray: for this machine,
or for the one that --nodes, --cpus, --memory, --gpus and --gpu-memory describe. Reads config.json and the
headers of the weights; loads none, and starts no process. Exit status: 0 it fits, 1 it does not, 2 a mistake
in what was given.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_pool.commands.json_file import require_folder, write_json
from rollout_pool.errors import ConfigError

if TYPE_CHECKING:
    from rollout_pool.planning.machine import Machine
    from rollout_pool.planning.pool_plan import PoolPlan
    from rollout_pool.run_config import RunConfig

COUNTS = ("nodes", "cpus", "gpus")
SIZES = ("memory", "gpu_memory")
LABEL_WIDTH = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="configuration (YAML)")
    parser.add_argument("--model", metavar="DIR", help="another model than the configuration's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    other = parser.add_argument_group("for a machine that is not this one")
    other.add_argument("--nodes", type=int, metavar="N", help="nodes (default 1)")
    other.add_argument("--cpus", type=int, metavar="N", help="cores of each node")
    other.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs of each node (default: as many as are asked for)"
    )
    other.add_argument("--memory", metavar="SIZE", help="free host memory of each node, as in 256GiB")
    other.add_argument("--gpu-memory", metavar="SIZE", help="memory of each GPU, as in 80GiB")


def run(args: argparse.Namespace) -> int:
    from rollout_pool.planning.pool_plan import local_folder, make_plan
    from rollout_pool.planning.tables import as_json
    from rollout_pool.preflight import check_paths
    from rollout_pool.run_config import RunConfig

    require_folder(args.json)
    config = RunConfig.load(args.config, {} if args.model is None else {"model": args.model})
    check_paths(config)
    local_folder(config.model)
    machine = _machine(args, config)
    _quieten()
    plan = make_plan(config, machine)
    write_json(args.json, as_json(plan))
    show(plan)
    return 1 if plan.problem else 0


def show(plan: PoolPlan) -> None:
    """Print the plan, and at last whether it fits."""
    from rich.console import Console
    from rich.table import Table

    from rollout_pool.planning.tables import rows

    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=LABEL_WIDTH)
    table.add_column(overflow="fold")
    for label, text in rows(plan):
        table.add_row(label, text)
    console.print(table)
    verdict = "it fits" if plan.problem is None else f"it does not fit: {plan.problem}"
    console.print(verdict, style="green" if plan.problem is None else "red", soft_wrap=True)


def _machine(args: argparse.Namespace, config: RunConfig) -> Machine:
    from rollout_pool.planning.machine import described_machine, parse_size, this_machine

    counts = {name: getattr(args, name) for name in COUNTS}
    for name, count in counts.items():
        if count is not None and count < (0 if name == "gpus" else 1):
            raise ConfigError(f"--{name}: expected a number of {name}, got {count}")
    sizes = {name: None if getattr(args, name) is None else parse_size(getattr(args, name)) for name in SIZES}
    if all(value is None for value in (*counts.values(), *sizes.values())):
        return this_machine()
    return described_machine(config, **counts, **sizes)


def _quieten() -> None:
    """What Transformers says while it builds a model is not about a plan."""
    from transformers.utils import logging

    logging.set_verbosity_error()
