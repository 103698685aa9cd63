"""A pool's plan as lines for a person and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollout_pool.planning.machine import Machine
from rollout_pool.planning.pool_plan import PROCESS_BYTES, PoolPlan


def rows(plan: PoolPlan) -> Iterator[tuple[str, str]]:
    """What each line is about, and what it says."""
    config, memory = plan.config, plan.memory
    is_split = config.tensor_parallel_size > 1
    yield "model", f"{config.model}: {plan.kind}, {plan.num_parameters / 1e6:,.1f} M parameters"
    yield "stored", _by_dtype(plan.stored)
    yield "weights", f"{_by_dtype(plan.loaded)} on each {'rank' if is_split else 'actor'}"
    yield "machine", describe_machine(plan.machine)
    each = _each(plan)
    if is_split:
        size = config.tensor_parallel_size
        yield "actors", f"{config.num_actors} engines of {size} ranks, {each}"
    else:
        yield "actors", f"{config.num_actors}, {each}"
    yield "asked of Ray", _asked(plan)
    yield "KV", f"{memory.bytes_per_token:,} B per token, {size_of(memory.bytes_per_slot)} per slot"
    parts = f"{memory.num_slots} slots x {memory.slot_length} tokens and one prompt"
    if memory.prompt_tokens:
        parts += f", {memory.prompt_tokens:,} tokens of shared prompts"
    if memory.prefix_tokens:
        parts += f", {memory.prefix_tokens:,} tokens of recent prompts"
    yield "", f"{size_of(memory.kv_bytes)} in all: {parts}"
    free = max(0, memory.free_bytes)
    yield "free for KV", f"{size_of(free)} on each, of which an engine takes at most nine tenths"
    yield "slots that fit", f"{plan.slots_that_fit:,} at engine.max_length {memory.max_length}"


def describe_machine(machine: Machine) -> str:
    """One line: nodes, cores, memory, GPUs, and whether it is this one."""
    count = "1 node" if machine.num_nodes == 1 else f"{machine.num_nodes} nodes, each"
    cores = "1 core" if machine.cpus == 1 else f"{machine.cpus} cores"
    host = f"{cores}, {size_of(machine.host_bytes)} free memory"
    gpus = "no GPU"
    if machine.gpus:
        name = f" {machine.gpu_name}" if machine.gpu_name else ""
        gpus = f"{machine.gpus} x{name or ' GPU'} with {size_of(machine.gpu_bytes)} free"
    return f"{count} with {host}, {gpus} ({'this machine' if machine.is_here else 'as described'})"


def as_json(plan: PoolPlan) -> dict[str, Any]:
    """All figures, in bytes."""
    memory, asked = plan.memory, plan.resources
    return {
        "model": plan.config.model,
        "kind": plan.kind,
        "num_parameters": plan.num_parameters,
        "stored_bytes": dict(plan.stored),
        "machine": {
            "nodes": plan.machine.num_nodes,
            "cpus": plan.machine.cpus,
            "gpus": plan.machine.gpus,
            "host_bytes": plan.machine.host_bytes,
            "gpu_bytes": plan.machine.gpu_bytes,
            "is_here": plan.machine.is_here,
        },
        "actors": {
            "num_actors": plan.config.num_actors,
            "ranks_per_actor": plan.config.tensor_parallel_size,
            "ranks_per_node": plan.ranks_per_node,
            "device": asked.device,
            "threads": asked.threads,
            "cpus_per_rank": asked.num_cpus,
            "gpus_per_rank": asked.num_gpus,
        },
        "rank": {
            "weight_bytes": memory.weight_bytes,
            "weight_bytes_by_dtype": dict(plan.loaded),
            "bytes_per_token": memory.bytes_per_token,
            "bytes_per_slot": memory.bytes_per_slot,
            "prefix_bytes": memory.prefix_bytes,
            "prompt_bytes": memory.prompt_bytes,
            "kv_bytes": memory.kv_bytes,
            "free_bytes": memory.free_bytes,
            "process_bytes": 0 if asked.device == "cuda" else PROCESS_BYTES,
        },
        "num_slots": memory.num_slots,
        "max_length": memory.max_length,
        "slot_length": memory.slot_length,
        "prompt_tokens": memory.prompt_tokens,
        "slots_that_fit": plan.slots_that_fit,
        "fits": plan.problem is None,
        "problem": plan.problem,
    }


def size_of(number: int) -> str:
    """Bytes for a person."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= factor:
            return f"{number / factor:,.2f} {unit}"
    return f"{number} B"


def _by_dtype(parts: Mapping[str, int]) -> str:
    return " and ".join(f"{size_of(size)} of {name}" for name, size in parts.items())


def _each(plan: PoolPlan) -> str:
    asked = plan.resources
    where = "a GPU" if asked.num_gpus == 1 else f"{asked.num_gpus:g} GPU" if asked.num_gpus else "cores"
    threads = f"{asked.threads} {'thread' if asked.threads == 1 else 'threads'}"
    what = "ranks" if plan.config.tensor_parallel_size > 1 else "of them"
    return f"each on {where} with {threads}; at most {plan.ranks_per_node} {what} on a node"


def _asked(plan: PoolPlan) -> str:
    amounts = plan.resources.amounts
    if not amounts:
        return "nothing: any node takes them"
    each = " and ".join(f"{amount:g} {name}" for name, amount in amounts.items())
    total = " and ".join(f"{amount * plan.num_ranks:g} {name}" for name, amount in amounts.items())
    kind = "rank" if plan.config.tensor_parallel_size > 1 else "actor"
    return f"{each} for each {kind}, {total} in all"
