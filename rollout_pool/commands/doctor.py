"""Check this environment, and say what to do about what is wrong in it.

Python, packages, devices, limits and disks; with --config also the model, its memory, a ring between the
actors where they would be placed, and one engine, started and tried. Asks no network beyond the cluster.
Exit status: 0 nothing failed (warnings may be there), 1 something did.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_pool.commands.json_file import require_folder, write_json

if TYPE_CHECKING:
    from rollout_pool.doctor.check import Check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration (YAML) to check, too")
    parser.add_argument(
        "--output", type=Path, default=Path(), metavar="FILE", help="where results will go (default: here)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all checks there")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="of an engine's start (default: the configuration's)"
    )
    parser.add_argument("--ray-address", metavar="ADDRESS", help="a running cluster (default: $RAY_ADDRESS)")
    parser.add_argument("--verbose", action="store_true", help="show what Ray and the actors log")


def run(args: argparse.Namespace) -> int:
    # What is not in the hub's cache is said to be missing; set before anything imports the hub's library.
    os.environ["HF_HUB_OFFLINE"] = "1"
    require_folder(args.json)
    checks = list(_shown(args))
    from rollout_pool.doctor.report import as_json, summary

    print(f"\n{summary([check for _, check in checks])}")
    write_json(args.json, as_json(checks))
    return 1 if any(check.status == "failed" for _, check in checks) else 0


def _shown(args: argparse.Namespace) -> Iterator[tuple[str, Check]]:
    """Print each check when it is over."""
    from functools import partial

    from rollout_pool.commands.cluster import ray_cluster
    from rollout_pool.doctor.examination import Wanted, examine
    from rollout_pool.doctor.report import lines

    cluster = partial(ray_cluster, args.ray_address, verbose=args.verbose)
    subject_shown = None
    address = args.ray_address or os.environ.get("RAY_ADDRESS") or "local"
    wanted = Wanted(args.config, args.output, args.timeout, cluster, joins=address != "local")
    for subject, check in examine(wanted):
        if subject != subject_shown:
            print(subject)
            subject_shown = subject
        for line in lines(check, is_terminal=sys.stdout.isatty()):
            print(line, flush=True)
        yield subject, check
