"""rollout-pool: LLM rollouts for RL post-training, on a pool of Ray actors.

Names are imported when first used, so ``import rollout_pool`` loads neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "RolloutPool": "rollout_pool.launch",
    "RolloutPools": "rollout_pool.pools",
    "PoolConfig": "rollout_pool.config",
    "EngineConfig": "rollout_pool.config",
    "SamplingParams": "rollout_pool.types",
    "RolloutRequest": "rollout_pool.types",
    "RolloutGroup": "rollout_pool.types",
    "Sample": "rollout_pool.types",
    "Engine": "rollout_pool.actors.engine",
    "oversample": "rollout_pool.oversampling",
    "stream_prompts": "rollout_pool.oversampling",
    "Oversampled": "rollout_pool.oversampling",
    "track": "rollout_pool.live.progress",
    "verify": "rollout_pool.verification",
    "Verification": "rollout_pool.verification",
    "RolloutPoolError": "rollout_pool.errors",
    "ConfigError": "rollout_pool.errors",
    "UnsupportedModelError": "rollout_pool.errors",
    "CapacityError": "rollout_pool.errors",
    "RequestError": "rollout_pool.errors",
    "InputFileError": "rollout_pool.errors",
    "OutputFileError": "rollout_pool.errors",
    "ActorStartError": "rollout_pool.errors",
    "ActorLostError": "rollout_pool.errors",
    "PoolClosedError": "rollout_pool.errors",
    "QueueFullError": "rollout_pool.errors",
    "NoRoomError": "rollout_pool.errors",
    "WeightSyncError": "rollout_pool.errors",
    "WeightsLostError": "rollout_pool.errors",
    "VerificationError": "rollout_pool.errors",
}

__all__ = [*_HOME, "__version__"]

if TYPE_CHECKING:
    from rollout_pool.actors.engine import Engine as Engine
    from rollout_pool.config import EngineConfig as EngineConfig
    from rollout_pool.config import PoolConfig as PoolConfig
    from rollout_pool.errors import ActorLostError as ActorLostError
    from rollout_pool.errors import ActorStartError as ActorStartError
    from rollout_pool.errors import CapacityError as CapacityError
    from rollout_pool.errors import ConfigError as ConfigError
    from rollout_pool.errors import InputFileError as InputFileError
    from rollout_pool.errors import NoRoomError as NoRoomError
    from rollout_pool.errors import OutputFileError as OutputFileError
    from rollout_pool.errors import PoolClosedError as PoolClosedError
    from rollout_pool.errors import QueueFullError as QueueFullError
    from rollout_pool.errors import RequestError as RequestError
    from rollout_pool.errors import RolloutPoolError as RolloutPoolError
    from rollout_pool.errors import UnsupportedModelError as UnsupportedModelError
    from rollout_pool.errors import VerificationError as VerificationError
    from rollout_pool.errors import WeightsLostError as WeightsLostError
    from rollout_pool.errors import WeightSyncError as WeightSyncError
    from rollout_pool.launch import RolloutPool as RolloutPool
    from rollout_pool.live.progress import track as track
    from rollout_pool.oversampling import Oversampled as Oversampled
    from rollout_pool.oversampling import oversample as oversample
    from rollout_pool.oversampling import stream_prompts as stream_prompts
    from rollout_pool.pools import RolloutPools as RolloutPools
    from rollout_pool.types import RolloutGroup as RolloutGroup
    from rollout_pool.types import RolloutRequest as RolloutRequest
    from rollout_pool.types import Sample as Sample
    from rollout_pool.types import SamplingParams as SamplingParams
    from rollout_pool.verification import Verification as Verification
    from rollout_pool.verification import verify as verify


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rollout_pool' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
