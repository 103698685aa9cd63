"""Room for the ranks of one tensor-parallel group: a placement group with a bundle for each."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
"""Between two looks at a placement group that is waited for."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """One rank's share of a placement group: its number there, and where Ray put it."""

    index: int
    node: str
    device: str = ""
    """Of a GPU, as ``CUDA_VISIBLE_DEVICES`` counts: a number or a UUID."""


def rank_order(bundles: Iterable[Bundle]) -> list[Bundle]:
    """Bundles in the order of ranks: node by node, and on a node by device.

    Ray keeps the order of bundles on no strategy. Ranks that are neighbours should be so in the
    machine, and local ranks should count devices upwards.
    """
    return sorted(bundles, key=lambda bundle: (bundle.node, *_natural(bundle.device), bundle.index))


def _natural(device: str) -> tuple[int, str]:
    return (int(device), "") if device.isdecimal() else (0, device)


class Placement:
    """A placement group for the engine called ``name``, once it is reserved.

    amounts: what each rank asks of Ray. strategy: "strict_pack" or "pack".
    """

    def __init__(self, name: str, size: int, amounts: Mapping[str, float], strategy: str) -> None:
        self._name = name
        self._size = size
        self._amounts = dict(amounts)
        self._strategy = strategy.upper()
        self._group: PlacementGroup | None = None

    async def reserve(self) -> list[Bundle]:
        """Wait for a bundle per rank; returns them in the order of ranks."""
        pool = _own_pool()
        name = f"{_of_pool(pool)}{self._name}" if pool else ""
        self._group = placement_group([self._amounts] * self._size, strategy=self._strategy, name=name)
        while (table := placement_group_table(self._group))["state"] != "CREATED":
            release_abandoned()
            await asyncio.sleep(POLL_INTERVAL_S)
        bundles = [Bundle(index, node) for index, node in table["bundles_to_node_id"].items()]
        if self._amounts.get("GPU"):
            devices = await asyncio.gather(*(self._device_of(bundle.index) for bundle in bundles))
            bundles = [dataclasses.replace(b, device=d) for b, d in zip(bundles, devices, strict=True)]
        if len(nodes := {bundle.node for bundle in bundles}) > 1:
            logger.warning(
                "the %d ranks of %s span %d nodes: each layer waits for the network between them",
                self._size,
                self._name,
                len(nodes),
            )
        return rank_order(bundles)

    def on(self, index: int) -> PlacementGroupSchedulingStrategy:
        """How Ray is told to start something on a reserved bundle."""
        assert self._group is not None
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)

    def remove(self) -> None:
        """Give the room back; Ray ends what runs there."""
        if self._group is not None:
            remove_placement_group(self._group)

    async def _device_of(self, index: int) -> str:
        """Which GPU a bundle holds: only a process on it is told."""
        look = ray.remote(_first_gpu).options(
            num_cpus=0, num_gpus=self._amounts["GPU"], max_retries=0, scheduling_strategy=self.on(index)
        )
        return str(await look.remote())


def release_abandoned() -> None:
    """Remove the placement groups of pools of this namespace that are gone, but could not do so themselves.

    Ray ends the actors of a pool that was killed, and keeps its placement groups until its driver ends.
    """
    alive = tuple(_of_pool(entry["name"]) for entry in ray.util.list_named_actors(all_namespaces=True))
    _remove(lambda name: not name.startswith(alive))


def release_own() -> None:
    """Remove what this pool reserved before it was restarted: nobody else will, for the pool is alive."""
    if pool := _own_pool():
        _remove(lambda name: name.startswith(_of_pool(pool)))


def _remove(is_meant: Callable[[str], bool]) -> None:
    for table in placement_group_table().values():
        name = table["name"]
        if name.startswith(_of_pool("")[:-1]) and table["state"] != "REMOVED" and is_meant(name):
            with contextlib.suppress(ValueError):  # another pool was faster
                remove_placement_group(get_placement_group(name))


def _own_pool() -> str:
    """The name of the pool that this process is; a driver is none."""
    context = ray.get_runtime_context()
    return (context.get_actor_name() or "") if context.worker.mode == ray.WORKER_MODE else ""


def _of_pool(name: str) -> str:
    """How the names of a pool's placement groups begin; the pool is known by its name as a Ray actor."""
    return f"rollout-pool {ray.get_runtime_context().namespace} {name}/"


def _first_gpu() -> str:
    """Runs on a bundle."""
    return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])
