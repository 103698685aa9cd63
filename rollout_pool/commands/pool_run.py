"""The prompts of one run through a pool of its own, also when the pool's process is lost on the way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import ray

from rollout_pool.actors.node_process import NodeProcess
from rollout_pool.commands.cluster import PoolLostError, get
from rollout_pool.commands.summary import Summary
from rollout_pool.errors import RolloutPoolError
from rollout_pool.launch import RolloutPool
from rollout_pool.live.progress import Progress
from rollout_pool.output import OutputFile
from rollout_pool.prompt_file import PromptLine
from rollout_pool.run_config import RunConfig
from rollout_pool.trace import TraceFile

POLL_S = 0.5
STATS_INTERVAL_S = 1.0
MAX_RESTARTS = 3
"""Of the pool's process."""
RESTART_TIMEOUT_S = 120.0
"""For Ray to start another."""


class PoolRun:
    """What a run writes to, and the pool that it asks. A group depends on its prompt's line alone, so what
    was not written when the pool's process ended is asked for again, of the next process."""

    def __init__(self, config: RunConfig, output: OutputFile, progress: Progress, trace: TraceFile) -> None:
        self._silence_s = config.heartbeat_timeout_s
        self._output = output
        self._progress = progress
        self._trace = trace
        self._summary = Summary()
        self._pool = RolloutPool.options(max_restarts=MAX_RESTARTS).remote(config.pool)

    def roll_out(self, prompts: Sequence[PromptLine]) -> None:
        """Write a group for every prompt that has none yet. Ends the pool, whatever happens."""
        try:
            while todo := [line for line in prompts if line.index not in self._output.done]:
                try:
                    self._begin(len(todo))
                    self._stream(todo)
                except PoolLostError as error:
                    if error.is_final:
                        raise
                    self._progress.say(f"{error}; another process takes over")
                    self._wait_until_back()
            self._end()
        finally:
            with contextlib.suppress(RolloutPoolError):  # lost before: Ray ends its processes with ours
                get(self._pool.shutdown.remote(), timeout=10)

    def _begin(self, num_prompts: int) -> None:
        actors = get(self._pool.ready.remote())
        self._trace.add_actors(actors)
        devices = ", ".join(sorted({f"{actor.device} x {actor.threads} threads" for actor in actors}))
        self._progress.say(f"rolling out {num_prompts} prompts on {len(actors)} actor(s): {devices}")

    def _stream(self, todo: Sequence[PromptLine]) -> None:
        """Write each group when it finishes, and ask the pool for its counters meanwhile.

        A pool that is silent for as long as an actor may be is ended, as if it had ended by itself.
        """
        process: NodeProcess = get(self._pool.__ray_call__.remote(_process), timeout=self._silence_s)
        groups = self._pool.stream.remote([line.request for line in todo])
        stats, asked_at = None, 0.0
        while True:
            ready, _ = ray.wait([groups], timeout=POLL_S)
            if ready:
                try:
                    group = get(next(groups))
                except StopIteration:
                    return
                line = todo[group.index]
                self._output.append(line, group)
                self._trace.add_group(group.replace(index=line.index))
                self._summary.add(line, group)
                self._progress.add_group()
            since = time.monotonic() - asked_at
            if stats is None and since >= STATS_INTERVAL_S:
                stats, asked_at = self._pool.stats.remote(), time.monotonic()
            elif stats is not None and ray.wait([stats], timeout=0)[0]:
                counters = get(stats)
                self._progress.update(counters)
                self._trace.add_stats(counters)
                stats = None
            elif stats is not None and since > self._silence_s:
                self._progress.say(f"the pool gave no answer for {self._silence_s:g} s and is ended")
                process.end()
                asked_at = time.monotonic()

    def _wait_until_back(self) -> None:
        deadline = time.monotonic() + RESTART_TIMEOUT_S
        while True:
            try:
                get(self._pool.num_actors.remote(), timeout=RESTART_TIMEOUT_S)
                return
            except PoolLostError as error:
                if error.is_final or time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)

    def _end(self) -> None:
        stats = get(self._pool.stats.remote(), timeout=self._silence_s)
        self._trace.add_stats(stats)
        self._trace.end()
        self._summary.finish(stats)
        self._progress.update(stats)
        for line in self._summary.lines():
            self._progress.say(line)
        if self._trace.fault is not None:
            self._progress.say(self._trace.fault)


def _process(_: Any) -> NodeProcess:
    """Runs in the pool's process."""
    return NodeProcess.here()
