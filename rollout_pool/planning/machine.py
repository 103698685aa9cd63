"""What a plan is made for: this machine as it is found, or others as they are described."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass

import psutil
import torch

from rollout_pool.config import PoolConfig
from rollout_pool.errors import ConfigError

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
DECIMAL_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
CUDA_CONTEXT_BYTES = 512 * 2**20
"""What CUDA and its libraries take of a GPU before a tensor does; part of what a described GPU has."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Equal nodes; bytes are those that an engine may still take."""

    num_nodes: int
    cpus: int
    """Per node."""
    gpus: int
    """Per node."""
    host_bytes: int
    """Per node."""
    gpu_bytes: int
    """Per GPU; 0 without one."""
    is_here: bool
    """Found on this machine, and not described."""
    gpu_name: str = ""

    @property
    def nodes(self) -> list[dict[str, float]]:
        """As Ray would count their resources."""
        node = {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})
        return [dict(node) for _ in range(self.num_nodes)]


def this_machine() -> Machine:
    """One node: the cores, GPUs and free memory that are here."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Machine(
        num_nodes=1,
        cpus=os.cpu_count() or 1,
        gpus=gpus,
        host_bytes=psutil.virtual_memory().available,
        gpu_bytes=min((torch.cuda.mem_get_info(index)[0] for index in range(gpus)), default=0),
        is_here=True,
        gpu_name=torch.cuda.get_device_name(0) if gpus else "",
    )


def boundless_machine(config: PoolConfig) -> Machine:
    """One node with room for all that ``config`` asks for: to know what that is, whatever there is."""
    num_ranks = config.num_actors * config.tensor_parallel_size
    each = 1.0 if config.gpus_per_actor is None else config.gpus_per_actor
    cpus, gpus = num_ranks * (config.cpus_per_actor or 1), math.ceil(num_ranks * each)
    return Machine(1, cpus, gpus, host_bytes=2**60, gpu_bytes=2**60, is_here=False)


def described_machine(
    config: PoolConfig,
    *,
    nodes: int | None = None,
    cpus: int | None = None,
    gpus: int | None = None,
    memory: int | None = None,
    gpu_memory: int | None = None,
) -> Machine:
    """A machine that is not this one. What is not said is as much as ``config`` asks for, or as here.

    With ``gpu_memory`` alone there are as many GPUs as the ranks need, on one node.
    """
    here = this_machine()
    num_nodes = nodes or 1
    num_ranks = config.num_actors * config.tensor_parallel_size
    if gpus is None and gpu_memory is not None:
        each = 1.0 if config.gpus_per_actor is None else config.gpus_per_actor
        gpus = math.ceil(num_ranks * each / num_nodes)
    num_gpus = here.gpus if gpus is None else gpus
    if num_gpus and gpu_memory is None and not here.gpus:
        raise ConfigError("--gpus: say how much memory each has, as in --gpu-memory 80GiB")
    free = here.gpu_bytes if gpu_memory is None else max(0, gpu_memory - CUDA_CONTEXT_BYTES)
    return Machine(
        num_nodes=num_nodes,
        cpus=cpus or max(here.cpus, -(-num_ranks // num_nodes)),
        gpus=num_gpus,
        host_bytes=here.host_bytes if memory is None else memory,
        gpu_bytes=free if num_gpus else 0,
        is_here=False,
    )


def parse_size(text: str) -> int:
    """``80GiB``, ``80G`` (both 80 * 2**30), ``80GB`` (80 * 10**9) or a number of bytes, as bytes.

    Raises :class:`ConfigError` for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?B?)\s*", text.upper())
    if match is None or (match[3] in ("I", "IB") and not match[2]):
        raise ConfigError(f"{text!r} is no size; write one as in 80GiB, 80GB or a number of bytes")
    number, prefix, suffix = float(match[1]), match[2], match[3]
    factor = DECIMAL_UNITS[prefix + "B"] if suffix == "B" and prefix else UNITS[prefix]
    size = int(number * factor)
    if size < 1:
        raise ConfigError(f"{text!r} is no size; it must be above 0")
    return size
