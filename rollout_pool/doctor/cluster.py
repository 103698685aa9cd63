"""The Ray cluster: its room, its GPUs, its nodes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import ray

from rollout_pool.config import PoolConfig
from rollout_pool.doctor.check import Checks, failed, of_error, ok, skipped, warning
from rollout_pool.doctor.devices import Gpus
from rollout_pool.errors import CapacityError
from rollout_pool.preflight import ActorResources, plan_actors, span_warning


def check_cluster() -> Checks[None]:
    """What is connected to."""
    nodes = alive_nodes()
    total = ray.cluster_resources()
    text = f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}, {total.get('CPU', 0):g} cores"
    yield ok("Ray", f"{ray.__version__}: {text}, {total.get('GPU', 0):g} GPUs")


def check_room(config: PoolConfig) -> Checks[ActorResources | None]:
    """Whether all actors find a place; returns what each asks for."""
    nodes = alive_nodes()
    try:
        asked = plan_actors(config, nodes)
    except CapacityError as error:
        yield of_error("room for actors", error)
        return None
    free = ray.available_resources()
    num_ranks = config.num_actors * config.tensor_parallel_size
    amounts = {name: amount * num_ranks for name, amount in asked.amounts.items()}
    text = " and ".join(f"{amount:g} {name}" for name, amount in amounts.items()) or "no resources"
    taken = [name for name, amount in amounts.items() if free.get(name, 0) < amount - 1e-6]
    if taken:
        yield failed(
            "room for actors",
            f"{text} are asked for; free are only "
            + " and ".join(f"{free.get(name, 0):g} {name}" for name in taken),
            "wait for, or end, what else runs on this cluster (`ray status` lists it)",
        )
        return None
    if (spanning := span_warning(config, asked, nodes)) is not None:
        yield warning("room for actors", spanning, "see docs/multi_node.md on groups that span nodes")
    else:
        yield ok("room for actors", f"{text} for {num_ranks} {'process' if num_ranks == 1 else 'processes'}")
    return asked


def check_gpus_agree(gpus: Gpus) -> Checks[None]:
    """Ray counts a node's GPUs by itself when it starts, and need not see those that torch sees."""
    node = ray.get_runtime_context().get_node_id()
    here = next(node_["Resources"] for node_ in ray.nodes() if node_["NodeID"] == node)
    counted = int(here.get("GPU", 0))
    if counted == gpus.number:
        if counted:
            yield ok("GPUs in Ray", f"{counted}, as torch sees here")
        else:
            yield skipped("GPUs in Ray", "none on this node, for Ray as for torch")
    else:
        yield failed(
            "GPUs in Ray",
            f"Ray counts {counted} on this node, and torch sees {gpus.number} in this process",
            "start Ray without --num-gpus and under the CUDA_VISIBLE_DEVICES of this command",
        )


def store_bytes_here() -> float:
    """Of the object store of this node."""
    node = ray.get_runtime_context().get_node_id()
    found = [entry["Resources"] for entry in ray.nodes() if entry["NodeID"] == node]
    return float(found[0].get("object_store_memory", 0.0)) if found else 0.0


def session_folder() -> Path:
    """Where Ray keeps the files of this session, on this node."""
    context = ray.get_runtime_context()
    if hasattr(context, "get_temp_dir"):  # not in all supported versions
        return Path(context.get_temp_dir())
    return Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())


def alive_nodes() -> list[dict[str, float]]:
    """The resources of every node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
