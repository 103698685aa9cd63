"""Show what a pool is doing: its actors, their slots, speed, weights and faults.

Connects to the Ray cluster of --address, of $RAY_ADDRESS or of this machine, and shows the pool called
--name, or the only one there is. On a terminal the view is renewed until Ctrl-C; --once prints it once, and
so does a run without a terminal.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from rollout_pool.errors import ActorStartError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from rollout_pool.live.snapshot import PoolSnapshot

WIDTH = 132
"""Of the table where there is no terminal."""
ANSWER_TIMEOUT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", metavar="POOL", help="the pool's name (default: the only one)")
    parser.add_argument("--namespace", metavar="NS", help="the Ray namespace it is in (default: any)")
    parser.add_argument(
        "--address", metavar="ADDRESS", help="a running cluster (default: $RAY_ADDRESS, or this machine's)"
    )
    parser.add_argument("--once", action="store_true", help="print one view and end")
    parser.add_argument("--json", action="store_true", help="print one view as JSON and end")
    parser.add_argument("--interval", type=float, default=2.0, metavar="S", help="between views (default 2)")


def run(args: argparse.Namespace) -> int:
    if not args.interval > 0:
        raise ConfigError(f"--interval: expected a number above 0, got {args.interval}")
    from rich.console import Console

    console = Console()
    with _connected(args.address or os.environ.get("RAY_ADDRESS") or "auto"):
        from rollout_pool.live.pools import find_pool

        pool = find_pool(args.name, args.namespace)
        if args.json:
            print(json.dumps(_look(pool).as_json(), allow_nan=False))
        elif args.once or not console.is_terminal:
            _print(_look(pool), console)
        else:
            _follow(pool, args.interval, console)
    return 0


@contextmanager
def _connected(address: str) -> Iterator[None]:
    from rollout_pool.commands.cluster import ray_cluster

    with ExitStack() as stack:
        try:
            stack.enter_context(ray_cluster(address))
        except (ActorStartError, ConfigError):
            where = "on this machine" if address == "auto" else f"at {address}"
            raise ConfigError(f"no Ray cluster answers {where}; say by --address where one runs") from None
        yield


def _look(pool: Any) -> PoolSnapshot:
    from rollout_pool.commands.cluster import get

    snapshot: PoolSnapshot = get(pool.snapshot.remote(), timeout=ANSWER_TIMEOUT_S)
    return snapshot


def _print(snapshot: PoolSnapshot, console: Console) -> None:
    from rich.console import Console

    from rollout_pool.live.view import render

    (console if console.is_terminal else Console(width=WIDTH)).print(render(snapshot))


def _follow(pool: Any, interval: float, console: Console) -> None:
    from rich.live import Live

    from rollout_pool.commands.cluster import PoolLostError
    from rollout_pool.live.view import render

    with Live(render(_look(pool)), console=console, auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(interval)
            try:
                live.update(render(_look(pool)), refresh=True)
            except PoolLostError as error:
                if error.is_final:
                    live.console.print("the pool has ended")
                    return
