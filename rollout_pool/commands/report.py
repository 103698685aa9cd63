"""Draw a run as one HTML page: its timeline, its distributions, its samples.

RUN is what `rollout-pool run --output` wrote, or is still writing: JSONL or Parquet. The timeline comes
from NAME.trace.jsonl next to it. The page holds all that it needs and opens without a network. A sample's
"reward", where your own scoring has added one to the JSONL, is shown and can be sorted by.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the output of rollout-pool run")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the page (default: NAME.html, next to RUN)"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="default: NAME.trace.jsonl, next to RUN")
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="to show texts token by token (default: the one of the run)"
    )
    parser.add_argument(
        "--max-samples",
        type=int,
        default=20_000,
        metavar="N",
        help="keep the texts of so many at most (default: 20000)",
    )


def run(args: argparse.Namespace) -> int:
    from rollout_pool.report.page import write_report

    page = args.output or args.run.with_suffix(".html")
    notes = write_report(
        args.run, page, trace=args.trace, tokenizer=args.tokenizer, max_samples=args.max_samples
    )
    for note in notes:
        print(note, file=sys.stderr)
    print(f"the report is in {page} ({page.stat().st_size / 1e6:.1f} MB)", file=sys.stderr)
    return 0
