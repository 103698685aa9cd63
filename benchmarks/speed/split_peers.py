"""Ray without a pool: one process per core, prompts split among them beforehand.

With `generate` in each this is what people write first. With an engine in each it shows what the pool's
dispatch changes, and what its actors could reach without it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speed.our_peers import start_ray
from speed.work import Done, Unavailable, Work


class Part:
    """One process: a peer with its share of threads and rows."""

    def __init__(self, folder: str, kind: str, work: Work, rows: int) -> None:
        sys.path.insert(0, folder)
        import torch

        torch.set_num_threads(work.threads)
        from speed import hf_peers, our_peers

        makers = {"generate": hf_peers.generate, "engine": our_peers.engine}
        self._run = makers[kind](work, rows)

    def ready(self) -> bool:
        """It has loaded its model."""
        return True

    def run(self, work: Work) -> tuple[Done, float]:
        """A round of these prompts, and its seconds."""
        begin = time.perf_counter()
        done = self._run(work)
        return done, time.perf_counter() - begin


def split(work: Work, rows: int, kind: str) -> Callable[[Work], Done]:
    """Every core's process has the same number of prompts and of rows."""
    import ray

    count = work.threads
    if count < 2:
        raise Unavailable("there is nothing to split on one core")
    if len(work.prompts) < count:
        raise Unavailable(f"{len(work.prompts)} prompt(s) cannot be split among {count} processes")
    start_ray(count)
    actor: Any = ray.remote(Part)
    one = work.part(work.prompts, threads=1)
    folder = str(Path(__file__).resolve().parents[1])
    environment = {"env_vars": {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}}
    parts = [
        actor.options(num_cpus=1, runtime_env=environment).remote(folder, kind, one, max(1, rows // count))
        for _ in range(count)
    ]
    ray.get([part.ready.remote() for part in parts])

    def run(work: Work) -> Done:
        shares = [work.part(work.prompts[index::count], threads=1) for index in range(count)]
        results = ray.get(
            [part.run.remote(share) for part, share in zip(parts, shares, strict=True) if share.prompts]
        )
        all_done = [done for done, _ in results]
        return Done(
            sum(done.samples for done in all_done),
            sum(done.tokens for done in all_done),
            min(done.first_group_s for done in all_done),
            sum_of_rates=sum(done.tokens / seconds for done, seconds in results),
        )

    return run


def split_generate(work: Work, rows: int) -> Callable[[Work], Done]:
    """`generate` in every process."""
    return split(work, rows, "generate")


def split_engines(work: Work, rows: int) -> Callable[[Work], Done]:
    """An engine of ours in every process."""
    return split(work, rows, "engine")
