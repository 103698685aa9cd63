"""Everything that only a GPU can show, in one run of at most eight minutes: is it right, and how fast.

    python benchmarks/gpu_check.py [--parts a,b,c,d,e] [--json FILE] [--minutes M] [--seed N] [--dry-run]

Needs one CUDA device and torch, triton and transformers; parts b, d and e pydantic and psutil too. No Ray, no
network, no installation of rollout-pool: the checkout around this file is what is checked.

    a  every kernel against its reference: all dtypes, odd sizes, overlaps, poisoned cells
    b  the engine's greedy tokens against generate's in float32, graphs on and off; strict mode
    c  bandwidth of the kernels as fractions of a device-to-device copy
    d  decode speed of models of 1B and 7B parameters, beside generate and generate_batch
    e  shared against expanded prefill: time and memory

Each part has its share of the time; what does not fit is skipped and said so. The table comes last. Exit
code: 0 when all claims hold; 1 when a claim does not, or a step broke; 3 when a or b was not run to its end;
2 when it could not start. --dry-run goes through all parts on the CPU with tiny sizes and Triton's
interpreter: it shows that the check runs, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # which PYTHONSAFEPATH leaves out

from gpu import report, supervision, worker  # noqa: E402
from gpu.parts import PARTS, TOTAL_SECONDS  # noqa: E402


def use_checkout() -> None:
    """Make ``import rollout_pool`` find this checkout, with no installation.

    Its root must not be on ``sys.path``, where `kernels` would be taken for another package.
    """
    folder = HERE.parent / "rollout_pool"
    spec = spec_from_file_location(
        "rollout_pool", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["rollout_pool"] = module
    spec.loader.exec_module(module)


def letters(text: str) -> list[str]:
    chosen = list(text.replace(",", "").replace(" ", "").lower())
    unknown = [letter for letter in chosen if letter not in PARTS]
    if unknown or not chosen:
        raise argparse.ArgumentTypeError(f"parts are {', '.join(PARTS)}; got {text!r}")
    return [letter for letter in PARTS if letter in chosen]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=letters, default=list(PARTS), metavar="a,b,c,d,e")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    parser.add_argument(
        "--minutes", type=float, help=f"for all five parts together; {TOTAL_SECONDS / 60:.2f}, or 30 when dry"
    )
    parser.add_argument("--seed", type=int, help="of all random inputs; by default a fresh one, printed")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU with tiny sizes")
    parser.add_argument("--worker", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def missing_packages(chosen: list[str]) -> list[str]:
    return [
        name
        for name in dict.fromkeys(name for letter in chosen for name in PARTS[letter].packages)
        if find_spec(name) is None
    ]


def refuse_missing(chosen: list[str]) -> None:
    """Say what is not installed, before any time is spent."""
    missing = missing_packages(chosen)
    if not missing:
        return
    without = [letter for letter in chosen if not missing_packages([letter])]
    remedy = (
        f"pip install {' '.join(missing)}; without a network, put their wheels into a folder and name it in "
        "PYTHONPATH, as docs/gpu.md says"
    )
    if without:
        remedy += f"; --parts {','.join(without)} runs without"
    raise SystemExit(_refusal(f"not installed: {', '.join(missing)}; {remedy}"))


def _refusal(message: str) -> int:
    print(f"gpu_check: {message}", file=sys.stderr)
    return 2


def main() -> int:
    arguments = parse()
    if arguments.worker:
        use_checkout()
        worker.main(PARTS[arguments.worker], arguments.first, arguments.dry_run, arguments.seed)
    refuse_missing(arguments.parts)
    minutes = arguments.minutes or (30 if arguments.dry_run else TOTAL_SECONDS / 60)
    seed = int.from_bytes(os.urandom(4), "little") if arguments.seed is None else arguments.seed
    print(f"seed {seed}", file=sys.stderr)
    command = [sys.executable, __file__, "--seed", str(seed), *(["--dry-run"] if arguments.dry_run else [])]
    outcomes: list[supervision.Outcome] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # who is told to stop still shows the table
    was_stopped = False
    try:
        for letter in arguments.parts:
            part = PARTS[letter]
            budget = part.seconds * minutes * 60 / TOTAL_SECONDS
            supervisor = supervision.Supervisor(part, budget, command, arguments.dry_run)
            outcomes.append(supervisor.outcome)
            supervisor.run()
    except supervision.NoDevice:
        return _refusal("there is no CUDA device here; --dry-run goes through all parts on the CPU")
    except KeyboardInterrupt:
        was_stopped = True
        outcomes[-1].add(outcomes[-1].part.title, "stopped from outside; nothing after this was run")
    code = report.exit_code(outcomes) or (report.INCOMPLETE if was_stopped else report.OK)
    if arguments.json:
        found = report.as_json(outcomes, seed, arguments.dry_run, code)
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(report.heading(outcomes, seed, arguments.dry_run))
    print()
    print(report.table(outcomes, arguments.dry_run))
    return code


if __name__ == "__main__":
    sys.exit(main())
