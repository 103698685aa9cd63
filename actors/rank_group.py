"""The ranks of one tensor-parallel group: how they meet, and how the first one speaks to the others."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed hides it from type checkers

from rollout_pool.actors.rank_messages import Announcer, Listener
from rollout_pool.actors.rank_place import (
    interface_towards,
    own_address,
    place_rank,
    rank_environment,
    this_host,
)
from rollout_pool.errors import ActorStartError, one_line


class RankLostError(RuntimeError):
    """Another rank of the group is gone. The group lives and dies as one, so this rank must end too."""


def open_store(host: str | None = None) -> tuple[TCPStore, str]:
    """The meeting point of a group, on a free port of this host. For rank 0.

    Returns the store, which must be kept as long as the group, and its address as ``host:port``.
    ``host`` is the name or address under which the other ranks reach this one; by default the address
    of the interface that leads out of this host. Nothing listens on any other.
    """
    host = host or own_address()
    door = socket.create_server((host, 0))  # of its own accord the store listens on all interfaces
    port = door.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach())
    return store, f"{host}:{port}"


class RankGroup:
    """One rank's end of a tensor-parallel group of ``size`` ranks; rank 0 leads.

    Messages are lists of integers from rank 0 to all others, over host memory on every kind of device.
    Tensors go over the data group, which is torch's default group: NCCL on GPUs, else gloo. Every method
    that meets a lost rank raises :class:`RankLostError`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        line: Announcer | Listener,
        leave: contextlib.ExitStack,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.is_first = rank == 0
        self._line = line
        self._leave = leave

    @classmethod
    def join(
        cls,
        address: str,
        rank: int,
        size: int,
        device: str,
        *,
        store: TCPStore | None = None,
        timeout_s: float,
    ) -> RankGroup:
        """Meet the other ranks at ``address``, where rank 0 has opened ``store``; returns when all are there.

        ``timeout_s`` bounds the meeting and, later, every collective on tensors. Sets the variables by
        which libraries know their rank (``RANK``, ``LOCAL_RANK`` and so on) until :meth:`close`.
        Raises :class:`ActorStartError` naming the ranks that did not come, and :class:`CapacityError` when
        this rank has no device.
        """
        assert not dist.is_initialized(), "a process is a rank of one group at a time"
        limit = timedelta(seconds=timeout_s)
        meeting = store if store is not None else _reach(address, rank, limit)
        hosts = _meet(meeting, rank, size, limit)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        num_devices = 0 if device == "cpu" else torch.cuda.device_count()
        place = place_rank(rank, hosts, device, visible, num_devices)
        is_one_host = len(set(hosts)) == 1
        host = "127.0.0.1" if is_one_host else address.rpartition(":")[0]
        with contextlib.ExitStack() as undo:
            undo.enter_context(rank_environment(rank, size, place, interface_towards(host)))
            options: dict[str, Any] = {"backend": "gloo"}
            if place.device.type == "cuda":
                torch.cuda.set_device(place.device)
                options = {"backend": "nccl", "device_id": place.device}
            try:
                line = _connect(meeting, rank, size, host, timeout_s)
                undo.callback(line.close)
                dist.init_process_group(store=meeting, rank=rank, world_size=size, timeout=limit, **options)
                undo.callback(dist.destroy_process_group)
            except RuntimeError as error:
                raise ActorStartError(f"rank {rank} of {size} cannot join: {one_line(error, 300)}") from error
            return cls(rank, size, place.device, line, undo.pop_all())

    def send(self, numbers: Sequence[int]) -> None:
        """Send one message to all other ranks. For rank 0; does not wait for them to receive it."""
        assert isinstance(self._line, Announcer)
        with self._noticing_loss():
            self._line.send(numbers)

    def receive(self) -> list[int]:
        """The next message of rank 0. For the others; waits without a limit."""
        assert isinstance(self._line, Listener)
        with self._noticing_loss():
            return self._line.receive()

    def share(self, tensor: torch.Tensor) -> None:
        """Give every rank rank 0's values of a contiguous tensor on :attr:`device`, in place."""
        assert tensor.is_contiguous()
        with self._noticing_loss():
            if isinstance(self._line, Announcer):
                self._line.check()
            dist.broadcast(tensor, src=0)

    def close(self) -> None:
        """Leave the group; may be called twice. The others' next wait for this rank then raises."""
        self._leave.close()

    @contextlib.contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            message = f"rank {self.rank} of {self.size} lost another rank: {one_line(error, 300)}"
            raise RankLostError(message) from error


def _connect(store: TCPStore, rank: int, size: int, host: str, timeout_s: float) -> Announcer | Listener:
    """The connection for messages; rank 0 says through the store where and with which token."""
    if rank == 0:
        announcer = Announcer(host)
        store.set("rollout_pool/line", f"{announcer.port} {announcer.token}")
        announcer.accept(size, timeout_s)
        return announcer
    port, token = store.get("rollout_pool/line").decode().split()
    return Listener(host, int(port), token, rank, timeout_s)


def _reach(address: str, rank: int, limit: timedelta) -> TCPStore:
    host, _, port = address.rpartition(":")
    try:
        return TCPStore(host, int(port), is_master=False, timeout=limit)
    except RuntimeError as error:
        raise ActorStartError(
            f"rank {rank} cannot reach rank 0 at {address}: {one_line(error, 300)}"
        ) from error


def _meet(store: TCPStore, rank: int, size: int, limit: timedelta) -> list[str]:
    """Wait for all ranks; returns the host of each."""
    keys = [f"rollout_pool/host/{other}" for other in range(size)]
    try:
        store.set(keys[rank], this_host())
        store.wait(keys, limit)
        return [store.get(key).decode() for key in keys]
    except RuntimeError as error:
        missing = "rank 0 is gone"
        with contextlib.suppress(RuntimeError):
            absent = [str(other) for other, key in enumerate(keys) if not store.check([key])]
            missing = f"no sign of rank {', '.join(absent)}"
        seconds = limit.total_seconds()
        raise ActorStartError(f"rank {rank} of {size} waited {seconds:.0f} s: {missing}") from error
