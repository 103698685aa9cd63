"""The pools of a Ray cluster, found by their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ray

from rollout_pool.errors import ConfigError


def find_pool(name: str | None = None, namespace: str | None = None) -> Any:
    """The Ray handle of a pool of the cluster that this process is connected to.

    With nothing given, of the only pool. Raises :class:`ConfigError` that lists the pools there are when
    none, or more than one, is meant.
    """
    pools = list(_pools())
    meant = [
        (entry, handle)
        for entry, handle in pools
        if name in (None, entry["name"]) and namespace in (None, entry["namespace"])
    ]
    if len(meant) == 1:
        return meant[0][1]
    listed = ", ".join(sorted(f"{entry['name']} (namespace {entry['namespace']})" for entry, _ in pools))
    if not pools:
        raise ConfigError("there is no pool in this cluster")
    if not meant:
        wanted = f"pool {name!r}" if name is not None else "pool"
        where = f" in namespace {namespace!r}" if namespace is not None else ""
        raise ConfigError(f"there is no {wanted}{where}; there are: {listed}")
    raise ConfigError(f"more than one pool is meant; say which by name and namespace: {listed}")


def _pools() -> Iterator[tuple[dict[str, str], Any]]:
    for entry in ray.util.list_named_actors(all_namespaces=True):
        try:
            handle = ray.get_actor(entry["name"], namespace=entry["namespace"])
        except ValueError:  # it has ended since
            continue
        if hasattr(handle, "rollout") and hasattr(handle, "snapshot"):
            yield entry, handle
