"""The command line. Exit status: 0 fine, 1 something failed, 2 a mistake of the user's, 130 Ctrl-C."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import rollout_pool
from rollout_pool.commands import (
    doctor,
    fetch_demo_model,
    plan,
    report,
    run,
    simulate,
    top,
    validate_tp,
    verify,
)
from rollout_pool.errors import ConfigError, InputFileError, OutputFileError, RequestError, RolloutPoolError
from rollout_pool.threads import WAITING

_MISTAKES = (ConfigError, InputFileError, OutputFileError, RequestError)
_COMMANDS = {
    "run": run,
    "verify": verify,
    "report": report,
    "top": top,
    "validate-tp": validate_tp,
    "simulate": simulate,
    "doctor": doctor,
    "plan": plan,
    "fetch-demo-model": fetch_demo_model,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. Errors are one line on standard error."""
    # Before torch is imported, here or in actors that inherit it: threads that wait by spinning take
    # the cores from each other as soon as anything else runs, and a step gets ten times slower.
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)
    args = _parser().parse_args(argv)
    try:
        return int(_COMMANDS[args.command].run(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except RolloutPoolError as error:
        print(f"rollout-pool {args.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, _MISTAKES) else 1
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        sys.stderr.close()
        return 1


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message[:300]}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rollout-pool", description="LLM rollouts for RL post-training, on a pool of Ray actors."
    )
    parser.add_argument("--version", action="version", version=f"rollout-pool {rollout_pool.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        text = (module.__doc__ or "").strip()
        command = commands.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    return parser
