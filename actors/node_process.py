"""A process as its node's operating system knows it, and how to end one that answers to nothing.

Ray asks a process to end, and some versions leave it at that: one that is stopped, or hangs where it takes
no messages, would keep its memory and its device.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

GRACE_S = 1.0
"""For a process to end as it was asked to."""


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """One process of a cluster."""

    node: str
    """Ray's id of its node."""
    pid: int
    started: float
    """As the operating system tells: a later process may have the same number."""

    @classmethod
    def here(cls) -> NodeProcess:
        """This process, which is one of Ray's."""
        return cls(ray.get_runtime_context().get_node_id(), os.getpid(), psutil.Process().create_time())

    def end(self) -> None:
        """Have its node kill it unless it ends by itself now. Does not wait; one that is gone stays so."""
        there = NodeAffinitySchedulingStrategy(self.node, soft=False)
        task = ray.remote(kill_process).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        task.remote(self.pid, self.started)


def kill_process(pid: int, started: float) -> None:
    """Kill a process of this node, if it is the one that started then."""
    try:
        process = psutil.Process(pid)
        if process.create_time() != started:
            return
        process.wait(GRACE_S)
    except psutil.NoSuchProcess:
        return
    except psutil.TimeoutExpired:
        process.kill()
