"""The parts of an engine that its configuration and its device choose."""

from __future__ import annotations

import torch

from rollout_pool.actors.aligned_scheduler import AlignedScheduler
from rollout_pool.actors.graphs import CudaRecorder, Recorder
from rollout_pool.actors.model_runner import ModelRunner
from rollout_pool.actors.rank_group import RankGroup
from rollout_pool.actors.rank_worker import LeadingWorker
from rollout_pool.actors.scheduler import Scheduler
from rollout_pool.actors.served_model import ServedModel
from rollout_pool.actors.worker import Worker
from rollout_pool.config import EngineConfig

LOOK_EVERY_ON_GPU = 4


def worker_for(served: ServedModel, config: EngineConfig, group: RankGroup | None) -> Worker:
    """The one worker, or the first of a group."""
    return Worker(served, config) if group is None else LeadingWorker(served, config, group)


def scheduler_for(config: EngineConfig, runner: ModelRunner) -> Scheduler:
    """By layout."""
    if config.layout == "ragged":
        return Scheduler(config.num_slots)
    skips_dead = runner.device.type == "cuda" and not runner.needs_mask  # Triton reads what a row sees
    return AlignedScheduler(config.num_slots, config.max_length, reads_dead_columns=not skips_dead)


def recorder_for(config: EngineConfig, device: torch.device, group: RankGroup | None) -> Recorder | None:
    """CUDA graphs where they are possible; None: steps run eagerly."""
    is_possible = device.type == "cuda" and config.layout == "ragged" and group is None
    return CudaRecorder(device) if is_possible and config.cuda_graphs == "auto" else None


def look_every_for(config: EngineConfig, device: torch.device) -> int:
    """Steps between two looks at the rows."""
    return config.readback_every or (LOOK_EVERY_ON_GPU if device.type == "cuda" else 1)
