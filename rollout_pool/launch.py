"""What a driver starts a pool by: the configuration is checked there, before any process starts."""

from __future__ import annotations

import uuid
import warnings
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout_pool.config import PoolConfig
from rollout_pool.errors import ConfigError
from rollout_pool.logs import log_variables
from rollout_pool.pool import PoolActor
from rollout_pool.pool_memory import RayMemory
from rollout_pool.preflight import check_paths, check_split, plan_actors, span_warning

MAX_CALLS = 10_000
"""Calls that one pool answers at once; a ``rollout`` that waits must not keep ``stats`` waiting."""


class RolloutPool:
    """Starts a pool; ``RolloutPool.remote(config)`` returns the Ray handle of a :class:`PoolActor`.

    ::

        pool = RolloutPool.remote(PoolConfig(model="...", num_actors=2))
        groups = ray.get(pool.rollout.remote(prompts, SamplingParams(n=8)))

    The pool lives as long as its handle, like any Ray actor. A tensor-parallel pool is best ended by
    ``shutdown``: after ``ray.kill``, and on older versions of Ray after its handle is dropped, what it
    reserved stays so until the next such pool looks for room, or the driver ends.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError("a pool is a Ray actor: write RolloutPool.remote(config)")

    @staticmethod
    def remote(config: PoolConfig) -> Any:
        """Check ``config`` here and start the pool. Starts Ray when the driver has not.

        Raises :class:`ConfigError` or :class:`CapacityError` before any actor starts. What only
        the loading can find is raised by the handle's first call, and by ``ready``.
        """
        return start_pool(config, {})

    @staticmethod
    def options(**ray_options: Any) -> _WithOptions:
        """Ray options for the pool actor, as ``RolloutPool.options(name="pool").remote(config)``."""
        return _WithOptions(ray_options)


class _WithOptions:
    def __init__(self, ray_options: dict[str, Any]) -> None:
        self._ray_options = ray_options

    def remote(self, config: PoolConfig) -> Any:
        return start_pool(config, self._ray_options)


def start_pool(config: PoolConfig, ray_options: dict[str, Any], planned_as: PoolConfig | None = None) -> Any:
    """See :meth:`RolloutPool.remote`. planned_as: all actors among which the cluster is divided."""
    if not isinstance(config, PoolConfig):
        raise ConfigError(f"config must be a PoolConfig, got {type(config).__name__}")
    config = check_paths(config)
    check_split(config)
    if not ray.is_initialized():
        ray.init()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    resources = plan_actors(planned_as or config, nodes)
    if (warning := span_warning(config, resources, nodes)) is not None:
        warnings.warn(warning, stacklevel=3)
    # By its name others find it, and see whether a pool is gone whose placement groups are still there.
    name = f"rollout-pool-{uuid.uuid4().hex[:12]}"
    # Beside its driver, which the groups go to: a node that is lost then takes no pool from anyone else.
    home = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {
        "name": name,
        "num_cpus": 0,
        "max_concurrency": MAX_CALLS,
        "scheduling_strategy": home,
        "runtime_env": {"env_vars": variables} if (variables := log_variables()) else None,
        **ray_options,
    }
    is_detached = ray_options.get("lifetime") == "detached"
    start = ray.remote(PoolActor).options(**options).remote
    return start(config, resources, memory=RayMemory(), is_detached=is_detached)
