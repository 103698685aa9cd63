"""One peer in a process of its own: loads, then runs a round for every line it reads. Started by bench.py.

    python benchmarks/peer.py NAME --work FILE --rows 32 --threads 2

Answers in lines of JSON: one when it is ready, or why it is not, and one after each round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out

from speed.peers import PEERS
from speed.work import Unavailable, Work


def say(**facts: Any) -> None:
    """One answer."""
    print(json.dumps({"peer": True, **facts}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("--work", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    work = Work.read(arguments.work)
    try:
        run = PEERS[arguments.name].load()(work, arguments.rows)
        run(work.warm_up())
        say()
        for _ in sys.stdin:
            begin = time.perf_counter()
            done = run(work)
            say(seconds=time.perf_counter() - begin, **dataclasses.asdict(done))
    except Unavailable as reason:
        say(unavailable=str(reason))
    except Exception as error:
        traceback.print_exc()
        say(unavailable=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


if __name__ == "__main__":
    main()
