"""Roll out the prompts of a file and write one group of samples per prompt.

Prompts are JSONL or plain text with one prompt per line, from a file or standard input (-). A JSONL
line is a string, a list of token ids, a list of chat messages, or an object with prompt, messages or
prompt_token_ids and, if wanted, request_id, seed, sampling, sample_offset and metadata.
The output is JSONL or Parquet by its ending. A stopped run leaves whole lines only; --resume keeps
them, runs what is missing and tries failed groups again. Processes that are lost meanwhile are replaced,
the pool's own included, and what they had runs again, to the same results. What happened when is written
next to the output, in NAME.trace.jsonl, for rollout-pool report. Exit status: 0 every group has its samples,
1 some groups failed, 2 a mistake in what was given, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_pool.errors import ConfigError, RolloutPoolError

if TYPE_CHECKING:
    from rollout_pool.live.progress import Progress
    from rollout_pool.output import OutputFile
    from rollout_pool.prompt_file import PromptLine
    from rollout_pool.run_config import RunConfig
    from rollout_pool.trace import TraceFile

# option, key of the configuration, type
_OVERRIDES: tuple[tuple[str, str, type], ...] = (
    ("--model", "model", str),
    ("--num-actors", "num_actors", int),
    ("--num-slots", "engine.num_slots", int),
    ("--max-length", "engine.max_length", int),
    ("--seed", "seed", int),
    ("--n", "sampling.n", int),
    ("--max-new-tokens", "sampling.max_new_tokens", int),
    ("--temperature", "sampling.temperature", float),
    ("--top-p", "sampling.top_p", float),
    ("--top-k", "sampling.top_k", int),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration (YAML)")
    parser.add_argument("--prompts", required=True, metavar="FILE", help="prompts, or - for standard input")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help=".jsonl or .parquet")
    parser.add_argument("--resume", action="store_true", help="continue an output that exists")
    parser.add_argument("--no-trace", action="store_true", help="write no NAME.trace.jsonl")
    parser.add_argument(
        "--prompt-format",
        choices=("auto", "jsonl", "text"),
        default="auto",
        help="auto: JSONL if the name ends in .jsonl or the first line starts with {, [ or a quote",
    )
    parser.add_argument("--ray-address", metavar="ADDRESS", help="a running cluster (default: $RAY_ADDRESS)")
    parser.add_argument("--verbose", action="store_true", help="show what Ray and the actors log")
    overrides = parser.add_argument_group("over the configuration")
    for option, key, kind in _OVERRIDES:
        overrides.add_argument(option, dest=key, type=kind, metavar="VALUE", help=f"sets {key}")
    overrides.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="sets any key",
    )


def run(args: argparse.Namespace) -> int:
    from rollout_pool.live.progress import Progress
    from rollout_pool.output import OutputFile
    from rollout_pool.preflight import check_tokenizer
    from rollout_pool.prompt_file import read_prompts
    from rollout_pool.trace import TraceFile, trace_path

    config = _config(args)
    prompts = read_prompts(args.prompts, config, args.prompt_format)
    check_tokenizer(config, (line.request.prompt for line in prompts))
    with OutputFile(args.output, prompts, config.results_hash(), resume=args.resume) as output:
        kept = len(output.done)
        if kept:
            print(f"{args.output} holds {kept} of {len(prompts)} groups already", file=sys.stderr)
        if kept < len(prompts):
            try:
                path = os.devnull if args.no_trace else trace_path(args.output)
                with (
                    TraceFile(path, resume=args.resume) as trace,
                    Progress(len(prompts), kept) as progress,
                ):
                    trace.begin(config, len(prompts), kept)
                    _roll_out(args, config, prompts, output, progress, trace)
            except (KeyboardInterrupt, RolloutPoolError):
                if output.done:
                    print(
                        f"{len(output.done)} of {len(prompts)} groups are written; continue with --resume",
                        file=sys.stderr,
                    )
                raise
        output.finish()
        print(f"results are in {args.output}", file=sys.stderr)
        return 1 if output.failed else 0


def _config(args: argparse.Namespace) -> RunConfig:
    import yaml

    from rollout_pool.preflight import check_paths
    from rollout_pool.run_config import RunConfig

    given = {key: getattr(args, key) for _, key, _ in _OVERRIDES}
    overrides = {key: value for key, value in given.items() if value is not None}
    for item in args.set:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item[:60]}: expected KEY=VALUE")
        try:
            overrides[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(
                f"--set {item[:60]}: the value is not valid YAML; quote it as in a file"
            ) from None
    if args.config is None and "model" not in overrides:
        raise ConfigError("nothing says which model to run: give --config FILE or --model DIR")
    config = RunConfig.load(args.config, overrides)
    checked = check_paths(config)
    return config.model_copy(update={"model": checked.model, "tokenizer": checked.tokenizer})


def _roll_out(
    args: argparse.Namespace,
    config: RunConfig,
    prompts: Sequence[PromptLine],
    output: OutputFile,
    progress: Progress,
    trace: TraceFile,
) -> None:
    from rollout_pool.commands.cluster import ray_cluster

    progress.say(f"starting {config.num_actors} rollout actor(s) with {config.model}")
    with ray_cluster(args.ray_address, verbose=args.verbose):
        from rollout_pool.commands.pool_run import PoolRun

        PoolRun(config, output, progress, trace).roll_out(prompts)
