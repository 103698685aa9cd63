"""Where a rank runs: its host, its device, and the variables by which libraries know it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil
import torch

from rollout_pool.errors import CapacityError


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its number and the number of ranks on its host, and its device."""

    local_rank: int
    local_size: int
    device: torch.device


def place_rank(
    rank: int, hosts: Sequence[str], device: str, visible: str | None = None, num_devices: int = 0
) -> Place:
    """The place of ``rank``; ``hosts`` names the host of every rank.

    Devices are numbered within what the process sees: ``visible`` is its ``CUDA_VISIBLE_DEVICES`` (None
    when unset, then it sees ``num_devices``). A process that sees one GPU calls it ``cuda:0``, whichever
    it is; processes that see all of them take them in the order of their ranks, so "1,3" is ``cuda:0`` and
    ``cuda:1``. Raises :class:`CapacityError` when there are more ranks than devices.
    """
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    local_rank, local_size = here.index(rank), len(here)
    wanted = torch.device(device)
    if wanted.type == "cpu":
        return Place(local_rank, local_size, wanted)
    if visible is not None:
        num_devices = len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    index = wanted.index
    if index is None:
        index = 0 if num_devices == 1 else local_rank
    if index >= num_devices:
        raise CapacityError(
            f"rank {rank} needs {wanted.type}:{index}, but its process sees {num_devices} devices for "
            f"{local_size} ranks on this host; use a smaller tensor_parallel_size or more devices"
        )
    return Place(index, local_size, torch.device(wanted.type, index))


def own_address(towards: str = "192.0.2.1") -> str:
    """The address of the interface that packets to ``towards`` would leave by; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
        except OSError:  # no network at all: the ranks are on this host
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def this_host() -> str:
    """Ranks share a host when they share its memory; a name alone may be "localhost" on many."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()}/{boot}"


@contextlib.contextmanager
def rank_environment(rank: int, size: int, place: Place, interface: str | None) -> Iterator[None]:
    """The variables that tell libraries of this rank; what was there before comes back.

    DeepSpeed counts the ranks of a host in LOCAL_SIZE. Gloo listens on what the host's name resolves to,
    which may be nothing or a loopback that others cannot reach, so it is told the interface.
    """
    local_size = str(place.local_size)
    values = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": local_size,
        "LOCAL_SIZE": local_size,
    }
    if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        values["GLOO_SOCKET_IFNAME"] = interface
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def interface_towards(host: str) -> str | None:
    """The network interface that leads to ``host``, or None when that cannot be told."""
    try:
        own = own_address(socket.gethostbyname(host))
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == own for entry in addresses):
            return name
    return None
