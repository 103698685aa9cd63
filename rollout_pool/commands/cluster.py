"""Ray as the commands use it: started quietly, and its errors turned into ours."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollout_pool.errors import ActorStartError, ConfigError, RolloutPoolError, one_line


class PoolLostError(RolloutPoolError):
    """The pool's process ended. ``is_final``: Ray starts no other."""

    def __init__(self, message: str, *, is_final: bool) -> None:
        super().__init__(message)
        self.is_final = is_final


@contextmanager
def ray_cluster(address: str | None, *, verbose: bool = False) -> Iterator[None]:
    """Connect to a Ray cluster, or start one on this machine, until the block ends.

    ``address`` None means ``$RAY_ADDRESS``, and without that a cluster of our own. A connection
    that this process has already is used, and left open.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        yield
        return
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    try:
        ray.init(
            address=where,
            include_dashboard=False if where == "local" else None,
            log_to_driver=verbose,
            logging_level=logging.INFO if verbose else logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = one_line(error, 150)
        if where == "local":
            raise ActorStartError(f"cannot start Ray on this machine: {reason}") from None
        raise ConfigError(
            f"ray_address: cannot reach Ray at {where} ({reason}); start it there, or leave --ray-address "
            "and RAY_ADDRESS out to start it here"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def get(ref: Any, timeout: float | None = None) -> Any:
    """``ray.get`` whose errors are those of :mod:`rollout_pool.errors`, with one-line messages.

    Raises :class:`PoolLostError` when the pool itself is the matter.
    """
    import ray
    from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

    try:
        return ray.get(ref, timeout=timeout)
    except RayTaskError as error:
        if isinstance(error.cause, RolloutPoolError):
            raise error.cause from None
        raise
    except RayError as error:
        reason = " ".join(str(error).split())[:300]
        is_final = not isinstance(error, ActorUnavailableError)
        raise PoolLostError(f"the pool was lost: {reason}", is_final=is_final) from None
