"""Ray as the commands use it: started quietly, and its errors turned into ours."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollout_pool.errors import ActorStartError, ConfigError, RolloutPoolError, one_line

CONNECT_TIMEOUT_S = 10.0


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
    _require_listener(where)
    try:
        ray.init(
            address=where,
            include_dashboard=False if where == "local" else None,
            log_to_driver=verbose,
            logging_level=logging.INFO if verbose else logging.ERROR,
        )
    except Exception as error:  # a start that takes too long is a bare Exception
        reason = one_line(error, 150)
        if where == "local":
            raise ActorStartError(f"cannot start Ray on this machine: {reason}") from None
        raise _unreachable(where, reason) from None
    try:
        yield
    finally:
        ray.shutdown()


def _require_listener(where: str) -> None:
    """Where nobody listens Ray would try for minutes, and log what it does."""
    host, colon, port = where.rpartition("://")[2].rpartition(":")
    if not colon:  # "local", "auto"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _unreachable(where, one_line(error, 150)) from None


def _unreachable(where: str, reason: str) -> ConfigError:
    return ConfigError(
        f"ray_address: cannot reach Ray at {where} ({reason}); start it there, or leave --ray-address and "
        "RAY_ADDRESS out to start it here"
    )


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
