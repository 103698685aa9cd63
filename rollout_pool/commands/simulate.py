"""Simulate a pool of any size on work with long-tailed lengths, to see what it would be limited by.

The pool's own code runs, in virtual time, over engines that only pretend to decode; nothing is loaded and no
Ray is started. Prints a table of ways to spread the prompts of one batch over the actors; --json keeps it.
What the engines take is one of two sets of figures: "cpu" was measured, "gpu" is made up (docs/scale.md).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rollout_pool.commands.json_file import require_folder, write_json
from rollout_pool.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--actors", default="8,64,256,1024", metavar="COUNTS", help="as in 8,64 (default: 8,64,256,1024)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all lengths (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--policies", metavar="NAMES", help="only these, separated by ';' (default: all)")
    parser.add_argument(
        "--pools", type=int, default=1, metavar="N", help="that the actors are divided among (default 1)"
    )
    parser.add_argument("--engine", default="gpu", metavar="NAME", help="cpu or gpu (default: gpu)")
    work = parser.add_argument_group("the work")
    for name, kind, default, text in (
        ("groups-per-actor", int, 32, "prompts of a batch, per actor"),
        ("samples", int, 8, "per prompt"),
        ("prompt-tokens", int, 256, "per prompt"),
        ("max-new-tokens", int, 4096, "per sample"),
        ("median", float, 400.0, "length of a sample"),
        ("sigma-prompt", float, 0.6, "of the logarithm of lengths, between prompts"),
        ("sigma-sample", float, 0.6, "of the logarithm of lengths, between samples of a prompt"),
    ):
        work.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=f"{text} ({default})")


def run(args: argparse.Namespace) -> int:
    counts = _counts(args.actors)
    for name in ("groups_per_actor", "samples", "prompt_tokens", "max_new_tokens", "median"):
        if getattr(args, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')}: must be above 0, got {getattr(args, name):g}")
    require_folder(args.json)

    from rollout_pool.simulation.latency import PRESETS
    from rollout_pool.simulation.policies import POLICIES, Work
    from rollout_pool.simulation.report import as_json, table
    from rollout_pool.simulation.study import run_policy
    from rollout_pool.simulation.workload import MOST_TOKENS, Lengths

    if args.max_new_tokens > MOST_TOKENS:
        raise ConfigError(f"--max-new-tokens: at most {MOST_TOKENS}, got {args.max_new_tokens}")
    if args.engine not in PRESETS:
        raise ConfigError(f"--engine: must be one of {', '.join(PRESETS)}, got {args.engine!r}")
    names = list(POLICIES) if args.policies is None else [one.strip() for one in args.policies.split(";")]
    if unknown := [name for name in names if name not in POLICIES]:
        raise ConfigError(f"--policies: no {unknown[0]!r}; there are {'; '.join(POLICIES)}")
    if args.pools != 1 and "5/4 asked, 4/5 taken" in names:
        raise ConfigError("--pools: several pools do not take a part of what is asked; name other --policies")
    if not 1 <= args.pools <= min(counts):
        raise ConfigError(f"--pools: must be from 1 to the number of actors, got {args.pools}")
    lengths = Lengths(args.median, args.sigma_prompt, args.sigma_sample)
    rows = []
    for count in counts:
        work = Work(
            args.groups_per_actor * count,
            args.samples,
            args.prompt_tokens,
            args.max_new_tokens,
            args.seed,
            lengths,
        )
        for name in names:
            print(f"{count} actors: {name}", file=sys.stderr)
            rows.append(run_policy(name, work, PRESETS[args.engine], count, args.pools))
    for line in table(rows):
        print(line)
    write_json(args.json, as_json(rows, PRESETS[args.engine], lengths, args.seed))
    return 0


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ConfigError(f"--actors: expected numbers above 0 as in 8,64, got {text!r}")
    return counts
