"""A ring between the actors, on the placement that the configuration has: started, tried, and ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any

import ray

from rollout_pool.actors.ring_rank import RingRank, RingTimes
from rollout_pool.actors.rollout_actor import RankInfo
from rollout_pool.actors.tensor_parallel import RankActors, process_environment
from rollout_pool.config import PoolConfig
from rollout_pool.doctor.check import Checks, failed, ok, skipped, warning
from rollout_pool.preflight import ActorResources

NUM_VALUES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
"""float32 values of the large sum, by device."""
SMALL = 4096
REPEATS = 5
SLOW_GPU_BYTES_PER_S = 10e9
"""Below what PCIe 4.0 does: ranks of one engine on GPUs should be above it."""


def check_ring(config: PoolConfig, asked: ActorResources, timeout_s: float) -> Checks[None]:
    """One ring for each tensor-parallel engine; without, one over all actors."""
    size = config.tensor_parallel_size if config.tensor_parallel_size > 1 else config.num_actors
    num_rings = config.num_actors if config.tensor_parallel_size > 1 else 1
    if size == 1:
        yield skipped("ring", "there is one process only, which has nobody to talk to")
        return
    if 0 < asked.num_gpus < 1:
        yield skipped("ring", "actors share a GPU, and NCCL wants one for each rank")
        return
    backend = "NCCL" if asked.device == "cuda" else "gloo"
    with _Rings(config, asked, size, num_rings, timeout_s) as rings:
        try:
            places, times = asyncio.run(asyncio.wait_for(rings.run(), timeout_s))
        except TimeoutError:
            yield failed(
                "ring",
                f"{size} processes did not sum over {backend} within {timeout_s:.0f} s, {rings.stage}",
                "look for a firewall; set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the right interface",
            )
            return
    yield from versions(places)
    yield from verdict(backend, size, places, times, is_split=config.tensor_parallel_size > 1)


def versions(places: Sequence[tuple[RankInfo, dict[str, str]]]) -> Checks[None]:
    """Whether all processes have the same packages; places: as :meth:`RingRank.place` tells them."""
    differing = sorted(
        {(info.host, name, version) for info, found in places for name, version in found.items()}
    )
    names = sorted({name for _, name, _ in differing if len({v for _, n, v in differing if n == name}) > 1})
    hosts = sorted({info.host for info, _ in places})
    if names:
        where = ", ".join(f"{name} {version} on {host}" for host, name, version in differing if name in names)
        yield failed(
            "versions on nodes",
            where,
            "install the same versions on every node, or use a runtime_env or image",
        )
    else:
        yield ok("versions on nodes", f"the same on {', '.join(hosts)}")


def verdict(
    backend: str,
    size: int,
    places: Sequence[tuple[RankInfo, dict[str, str]]],
    times: Sequence[RingTimes],
    *,
    is_split: bool,
) -> Checks[None]:
    """Sums and speed of one or more rings of ``size`` ranks; is_split: every layer of a step waits for it."""
    wrong = [str(index) for index, one in enumerate(times) if not one.is_exact]
    if wrong:
        yield failed(
            "ring",
            f"{backend}: sums over {size} ranks are wrong on process {', '.join(wrong)}",
            "a link or a device corrupts data: run nccl-tests and the vendor's diagnostics on these nodes",
        )
        return
    slowest = max(times, key=lambda one: one.seconds)
    rate = 2 * (size - 1) / size * slowest.num_bytes / slowest.seconds
    small = max(one.small_seconds for one in times)
    num_hosts = len({info.host for info, _ in places})
    text = (
        f"{backend} over {size} ranks on {num_hosts} {'host' if num_hosts == 1 else 'hosts'}: "
        f"sums right to the bit on each, {rate / 1e9:.2f} GB/s, "
        f"{small * 1e6:.0f} us for {4 * SMALL // 1024} KiB"
    )
    if is_split and backend == "NCCL" and rate < SLOW_GPU_BYTES_PER_S:
        yield warning(
            "ring",
            text,
            "slow for GPUs: look at `nvidia-smi topo -m`, and whether NCCL uses IB or P2P (NCCL_DEBUG=INFO)",
        )
    else:
        yield ok("ring", text)


class _Rings:
    """The processes of all rings; they end with the block."""

    def __init__(
        self, config: PoolConfig, asked: ActorResources, size: int, num_rings: int, timeout_s: float
    ) -> None:
        self.stage = "while they were waiting for room"
        self._config, self._asked, self._size, self._timeout_s = config, asked, size, timeout_s
        how = {"threads": asked.threads, "device": asked.device}
        self._places = [
            RankActors(config, f"doctor-{index}", asked.amounts, **how)  # type: ignore[arg-type]
            for index in range(num_rings)
        ]
        self._handles: list[list[Any]] = []

    def __enter__(self) -> _Rings:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in (each for ring in self._handles for each in ring):
            ray.kill(handle)
        for place in self._places:
            place.kill()

    async def run(self) -> tuple[list[tuple[RankInfo, dict[str, str]]], list[RingTimes]]:
        """Start, meet, sum, leave. All rings at the same time, as engines work."""
        for place in self._places:
            strategies: list[Any] = [None] * self._size
            if self._config.tensor_parallel_size > 1:
                strategies = [place.on(bundle.index) for bundle in await place.reserve()]
            self._handles.append([self._start(rank, one) for rank, one in enumerate(strategies)])
        self.stage = "while their processes were starting"
        everyone = [handle for ring in self._handles for handle in ring]
        places = await asyncio.gather(*(handle.place.remote() for handle in everyone))
        self.stage = "while they were meeting"
        addresses = await asyncio.gather(*(ring[0].open.remote() for ring in self._handles))
        joins = zip(addresses, self._handles, strict=True)
        await _all(handle.join.remote(address) for address, ring in joins for handle in ring)
        self.stage = "while they were summing"
        num_values = NUM_VALUES["cuda" if self._asked.device == "cuda" else "cpu"]
        times = await _all(handle.all_reduce.remote(num_values, SMALL, REPEATS) for handle in everyone)
        with contextlib.suppress(ray.exceptions.RayError):
            await _all(handle.leave.remote() for handle in everyone)
        return places, times

    def _start(self, rank: int, strategy: Any) -> Any:
        asked = self._asked
        is_on_cores = asked.device == "cpu"
        options = {
            "num_cpus": asked.num_cpus,
            "num_gpus": asked.num_gpus,
            "scheduling_strategy": strategy,
            "runtime_env": {"env_vars": process_environment(asked.threads, sees_gpus=not is_on_cores)},
        }
        how = {"threads": asked.threads, "device": asked.device, "timeout_s": self._timeout_s}
        return ray.remote(RingRank).options(**options).remote(rank, self._size, **how)


async def _all(calls: Iterator[Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*calls))
