"""Check that a model split over tensor-parallel ranks is still the same model, before it is trusted.

For each size of --tp it starts the ranks and compares their weights with the checkpoint, and their
hidden states, logits, greedy tokens and log-probabilities with those of a single rank, which is always
measured, too; then memory and speed. Runs on CPU ranks as well. Prints a table; --json keeps it. Exit
status: 0 every tolerance holds, 1 one is exceeded or a size was refused, 2 a mistake in what was given,
130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_pool.commands.json_file import require_folder, write_json
from rollout_pool.errors import ConfigError

if TYPE_CHECKING:
    from rollout_pool.config import Dtype
    from rollout_pool.run_config import RunConfig
    from rollout_pool.tp_validation.measured import AfterLoad
    from rollout_pool.tp_validation.report import Report

WIDTH = 132
"""Of the table where there is no terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="configuration (YAML)")
    parser.add_argument(
        "--tp", metavar="SIZES", help="numbers of ranks, as in 1,2,4 (default: the configuration's, or 2)"
    )
    parser.add_argument("--dtype", help="working dtype (default: the configuration's)")
    parser.add_argument(
        "--no-float32", action="store_true", help="only the working dtype, when float32 has no room"
    )
    parser.add_argument(
        "--single-on-cpu", action="store_true", help="the single rank on cores, when no GPU holds the model"
    )
    parser.add_argument("--prompts", metavar="FILE", help="prompts, or - for standard input (default: a few)")
    parser.add_argument("--num-prompts", type=int, default=8, metavar="N", help="use the first N (default 8)")
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N", help="per sample (default 32)")
    parser.add_argument("--samples", type=int, default=4, metavar="N", help="per prompt (default 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--tolerance",
        action="append",
        default=[],
        metavar="[DTYPE.]NAME=VALUE",
        help="change one (docs/tp_validation.md lists them)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="of each step (default: the configuration's start_timeout_s)",
    )
    parser.add_argument("--ray-address", metavar="ADDRESS", help="a running cluster (default: $RAY_ADDRESS)")
    parser.add_argument("--verbose", action="store_true", help="show what Ray and the ranks log")


def run(args: argparse.Namespace, after_load: AfterLoad | None = None) -> int:
    """``after_load(model, rank)`` is called on every rank before it is checked."""
    report = validate(args, after_load)
    write_json(args.json, report.as_json())
    show(report)
    return 0 if report.passed else 1


def validate(args: argparse.Namespace, after_load: AfterLoad | None = None) -> Report:
    """Measure and compare what the arguments say."""
    from rollout_pool.tp_validation.tolerances import parse_tolerances

    tolerances = parse_tolerances(args.tolerance)
    config = _config(args)
    sizes = parse_sizes(args.tp) if args.tp is not None else [max(2, config.tensor_parallel_size)]
    timeout_s = args.timeout if args.timeout is not None else config.start_timeout_s
    _require_positive(args, timeout_s)
    require_folder(args.json)
    from rollout_pool.commands.cluster import ray_cluster
    from rollout_pool.commands.validation_plan import make_plan, working_dtype
    from rollout_pool.tp_validation.job import validate as validate_sizes

    dtype = working_dtype(config)
    dtypes: list[Dtype] = [dtype] if args.no_float32 or dtype == "float32" else ["float32", dtype]
    plan = make_plan(config, args.prompts, args.num_prompts, args.new_tokens, args.samples)
    with ray_cluster(args.ray_address, verbose=args.verbose):
        from rollout_pool.commands.rank_processes import rank_processes

        launch = partial(rank_processes, timeout_s=timeout_s)
        return validate_sizes(
            config.pool,
            plan,
            sizes,
            dtypes,
            tolerances,
            launch,
            _say,
            after_load,
            single_on_cpu=args.single_on_cpu,
        )


def show(report: Report) -> None:
    """Print the tables, then a line per violation, then the verdict."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for table in report.tables():
        console.print(table)
    for line in (*report.notes(), *report.violations(), report.verdict()):
        print(line)


def parse_sizes(text: str) -> list[int]:
    """``1,2,4`` as numbers, each once, in ascending order. Raises :class:`ConfigError`."""
    sizes = set()
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise ConfigError(f"--tp {text}: expected numbers of ranks, as in 1,2,4, got {part.strip()!r}")
        sizes.add(int(part))
    return sorted(sizes)


def _config(args: argparse.Namespace) -> RunConfig:
    from rollout_pool.preflight import check_paths
    from rollout_pool.run_config import RunConfig

    config = RunConfig.load(args.config, {} if args.dtype is None else {"dtype": args.dtype})
    checked = check_paths(config)
    return config.model_copy(update={"model": checked.model, "tokenizer": checked.tokenizer})


def _require_positive(args: argparse.Namespace, timeout_s: float) -> None:
    counts = {"--num-prompts": args.num_prompts, "--new-tokens": args.new_tokens, "--samples": args.samples}
    for option, value in {**counts, "--timeout": timeout_s}.items():
        if not value > 0:
            raise ConfigError(f"{option}: expected a number above 0, got {value}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
