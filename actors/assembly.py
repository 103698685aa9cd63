"""The parts of an engine that its configuration and its device choose."""

from __future__ import annotations

from typing import Literal

import torch

from rollout_pool.actors.aligned_scheduler import AlignedScheduler
from rollout_pool.actors.graphs import CudaRecorder, Recorder
from rollout_pool.actors.rank_group import RankGroup
from rollout_pool.actors.rank_worker import LeadingWorker
from rollout_pool.actors.scheduler import Scheduler
from rollout_pool.actors.served_model import ServedModel
from rollout_pool.actors.sharing import Sharing
from rollout_pool.actors.worker import Worker
from rollout_pool.config import EngineConfig

LOOK_EVERY_ON_GPU = 4


def worker_for(served: ServedModel, config: EngineConfig, group: RankGroup | None) -> Worker:
    """The one worker, or the first of a group."""
    return Worker(served, config) if group is None else LeadingWorker(served, config, group)


def sharing_for(served: ServedModel, config: EngineConfig) -> Sharing:
    """Which groups share their prompt's KV, in a batch of ``config.num_slots`` rows.

    A batch that is smaller than planned, since memory ran out, shares prompts of fewer tokens. On a GPU
    sharing was never measured, and ends the replay of recorded steps; in strict mode a sample must not depend
    on how many siblings it has. There ``auto`` shares where it must.
    """
    plan = served.memory_plan
    asked: Literal["shared", "auto"] = "shared" if config.prefix == "shared" else "auto"
    mode: Literal["expand", "shared", "auto"] = "expand" if plan.sharing == "never" else asked
    by_cost = served.runner.device.type == "cpu" and config.deterministic != "strict"
    budget = plan.prompt_tokens * config.num_slots // plan.num_slots
    return Sharing(mode, config.num_slots, plan.slot_length, budget, by_cost)


def scheduler_for(served: ServedModel, config: EngineConfig) -> Scheduler:
    """By layout."""
    runner = served.runner
    if config.layout == "ragged":
        return Scheduler(config.num_slots, sharing_for(served, config))
    skips_dead = runner.device.type == "cuda" and not runner.needs_mask  # Triton reads what a row sees
    return AlignedScheduler(config.num_slots, config.max_length, reads_dead_columns=not skips_dead)


def recorder_for(config: EngineConfig, device: torch.device, group: RankGroup | None) -> Recorder | None:
    """CUDA graphs where they are possible; None: steps run eagerly."""
    is_possible = device.type == "cuda" and config.layout == "ragged" and group is None
    return CudaRecorder(device) if is_possible and config.cuda_graphs == "auto" else None


def look_every_for(config: EngineConfig, device: torch.device) -> int:
    """Steps between two looks at the rows."""
    return config.readback_every or (LOOK_EVERY_ON_GPU if device.type == "cuda" else 1)
