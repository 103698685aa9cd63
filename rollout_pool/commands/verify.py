"""Rescore the results of a run with a plain teacher-forced forward of the same model.

Prints how far the log-probabilities of the rollouts lie from those that a trainer would compute.
With --tolerance the exit status is 1 when one differs by more.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="what `rollout-pool run` wrote")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, metavar="FILE", help="the configuration of that run")
    source.add_argument("--model", metavar="DIR", help="the model, when there is no configuration file")
    parser.add_argument("--dtype", help="dtype to rescore in (default: that of the configuration)")
    parser.add_argument("--tolerance", type=float, metavar="NATS", help="largest difference to accept")


def run(args: argparse.Namespace) -> int:
    from rollout_pool.preflight import check_paths
    from rollout_pool.results import read_groups
    from rollout_pool.run_config import RunConfig

    given = {"model": args.model, "dtype": args.dtype}
    config = RunConfig.load(args.config, {key: value for key, value in given.items() if value is not None})
    check_paths(config)
    groups = list(read_groups(args.output))

    from transformers.utils import logging

    from rollout_pool.actors.loading import load_model
    from rollout_pool.verification import verify

    logging.disable_progress_bar()
    model = load_model(
        config.model, dtype=config.dtype, device=None, trust_remote_code=config.trust_remote_code
    )
    result = verify(groups, model)
    print(result.describe())
    if args.tolerance is not None:
        result.check(args.tolerance)
    return 0
