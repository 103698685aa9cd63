"""What the pool actor itself can do: groups and heartbeats through real Ray, with actors that do nothing.

    python benchmarks/driver.py [--actors 8 64 256] [--groups 2000] [--n 8] [--tokens 512] [--json FILE]
    python benchmarks/driver.py --in-process --actors 8 64 256 1024 --groups 8192

A real pool actor, in a process of its own, with Ray actors that answer each group at once with one made
before. Actors share processes, because only the calls count. Reported are rates and the CPU time of the
pool's process, of all its threads; the driver that asks and the actors that answer have processes of their
own, and on a small machine take their share of the cores.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rollout_pool.actors.progress import IDLE, Progress
from rollout_pool.actors.rollout_actor import ActorInfo
from rollout_pool.config import EngineConfig, PoolConfig
from rollout_pool.launch import MAX_CALLS
from rollout_pool.pool import PoolActor
from rollout_pool.preflight import ActorResources
from rollout_pool.simulation.latency import GPU_ASSUMED
from rollout_pool.simulation.policies import Work
from rollout_pool.simulation.study import run_policy
from rollout_pool.simulation.workload import Lengths
from rollout_pool.types import EngineStats, ResolvedRequest, RolloutGroup, Sample, SamplingParams


class ReadyActor:
    """Answers every group with the same samples."""

    def __init__(self, n: int, tokens: int) -> None:
        ids, zeros = np.arange(tokens, dtype=np.int64), np.zeros(tokens, dtype=np.float32)
        versions = np.zeros(tokens, dtype=np.int64)
        self._samples = [Sample(ids, "", zeros, zeros, "stop", 0, 0, versions, 0, i) for i in range(n)]
        self._ended = 0

    async def run(self, request: ResolvedRequest) -> RolloutGroup:
        self._ended += len(self._samples)
        prompt = np.zeros(0, dtype=np.int64)
        return RolloutGroup(request.request_id, request.index, prompt, self._samples)

    async def abort(self, request_id: int) -> None:
        """Nothing runs."""

    async def progress(self) -> Progress:
        return Progress(0, self._ended, False, IDLE)

    async def stats(self) -> EngineStats:
        return EngineStats()


class SharedRanks:
    """Stands for the processes of one engine; several share one process."""

    def __init__(self, handles: list[Any], name: str) -> None:
        self.stage = "loading"
        self._name = name
        self.leader = handles[int(name.partition("-")[2]) % len(handles)]
        self.handles = (self.leader,)

    async def start(self) -> ActorInfo:
        await self.leader.progress.remote()
        return ActorInfo(self._name, 0, "cpu", 1, "")

    async def progress(self) -> Progress:
        progress: Progress = await self.leader.progress.remote()
        return progress

    def kill(self) -> None:
        """They end with the cluster."""

    def needs(self) -> str:
        return "nothing"


class MeasuredPool(PoolActor):
    """A pool that tells its CPU time."""

    def __init__(self, config: PoolConfig, handles: list[Any]) -> None:
        super().__init__(config, ActorResources(0, 0, 1), new_ranks=lambda name: SharedRanks(handles, name))

    async def cpu_seconds(self) -> float:
        """Of all threads of this process."""
        return time.process_time()


def measure(num_actors: int, handles: list[Any], args: argparse.Namespace) -> dict[str, float]:
    """One pool: its heartbeats while it idles, then its groups."""
    config = PoolConfig(model="none", num_actors=num_actors, engine=EngineConfig(num_slots=64))
    pool = ray.remote(MeasuredPool).options(num_cpus=0, max_concurrency=MAX_CALLS).remote(config, handles)
    ray.get(pool.ready.remote())
    sampling = SamplingParams(n=args.n, max_new_tokens=args.tokens)
    prompts = [[1, 2, 3]] * args.groups
    ray.get(pool.rollout.remote(prompts[:100], sampling))  # warm

    def timed(call: Any) -> tuple[float, float]:
        cpu, began = ray.get(pool.cpu_seconds.remote()), time.perf_counter()
        call()
        return time.perf_counter() - began, ray.get(pool.cpu_seconds.remote()) - cpu

    idle_s, idle_cpu = timed(lambda: time.sleep(args.idle))
    wall, cpu = timed(lambda: ray.get(pool.rollout.remote(prompts, sampling)))
    ray.get(pool.shutdown.remote())
    ray.kill(pool)
    return {
        "actors": num_actors,
        "idle_cpu_share": idle_cpu / idle_s,
        "groups_per_s": args.groups / wall,
        "cpu_us_per_group": cpu / args.groups * 1e6,
    }


def show(row: dict[str, float]) -> None:
    """As one line."""
    print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)


def in_process(num_actors: int, num_groups: int, n: int) -> dict[str, float]:
    """Without Ray: simulated engines that end a group after one step; CPU time of the pool's code alone."""
    work = Work(num_groups, n, 1, 1, seed=0, lengths=Lengths())
    row = run_policy("dynamic", work, GPU_ASSUMED, num_actors)
    return {
        "actors": num_actors,
        "groups_per_cpu_s": 1e6 / row.driver_us_per_group,
        "cpu_us_per_group": row.driver_us_per_group,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--actors", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--processes", type=int, default=4, help="that the actors share")
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--n", type=int, default=8, help="samples per group")
    parser.add_argument("--tokens", type=int, default=512, help="per sample")
    parser.add_argument("--idle", type=float, default=4.0, help="seconds to watch an idle pool")
    parser.add_argument("--in-process", action="store_true", help="without Ray")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.in_process:
        for num_actors in args.actors:
            show(in_process(num_actors, args.groups, args.n))
        return
    ray.init(address="local", include_dashboard=False, num_cpus=4, log_to_driver=False)
    options = {"num_cpus": 0, "max_concurrency": MAX_CALLS}
    handles = [
        ray.remote(ReadyActor).options(**options).remote(args.n, args.tokens) for _ in range(args.processes)
    ]
    results = []
    for num_actors in args.actors:
        results.append(measure(num_actors, handles, args))
        show(results[-1])
    if args.json is not None:
        args.json.write_text(
            json.dumps({"arguments": vars(args) | {"json": None}, "rows": results}, indent=1)
        )
    ray.shutdown()


if __name__ == "__main__":
    main()
