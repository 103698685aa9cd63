"""Small tensors on their way from the device to the host, without stopping the device.

A transfer is started after the work that makes its tensor and is looked at in a later step. On a GPU
the copy goes into pinned memory behind that work, and the host learns from an event that it is there.
On a CPU everything is there at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

HostArray = np.ndarray[Any, np.dtype[Any]]


class Transfer:
    """One tensor, its copy in host memory, and whether the copy is complete."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """tensor: fresh, or not written again; a view of state would show later values on a CPU."""
        self._event: torch.cuda.Event | None = None
        self._source = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tensor

    def is_ready(self) -> bool:
        """Whether the copy is complete. Never waits."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Stop the host until the copy is complete."""
        if self._event is not None:
            self._event.synchronize()

    def array(self) -> HostArray:
        """The values, in host memory that nobody writes again."""
        array: HostArray = self._host.numpy()
        return array


class Readback:
    """Transfers in the order in which they were started, each with what is to be done with its values.

    Transfers of one device arrive in order, so waiting for one makes all before it ready.
    """

    def __init__(self, transfer: Callable[[torch.Tensor], Transfer] = Transfer) -> None:
        self.num_waits = 0
        """How often the host had to stop for the device."""
        self._transfer = transfer
        self._pending: deque[tuple[int, Transfer, Callable[[HostArray], None]]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def start(self, tensor: torch.Tensor, step: int, then: Callable[[HostArray], None]) -> None:
        """Copy ``tensor`` to the host; a later :meth:`deliver` hands its values to ``then``."""
        self._pending.append((step, self._transfer(tensor), then))

    def deliver(self, wait_for: int) -> None:
        """Hand out all that has arrived, in order; what was started up to step ``wait_for`` is waited for.

        The host stops at most once. What a ``then`` starts is handed out as well if it is there at once.
        """
        awaited = next((one for one in reversed(self._pending) if one[0] <= wait_for), None)
        if awaited is not None and not awaited[1].is_ready():
            self.num_waits += 1
            awaited[1].wait()
        while self._pending and self._pending[0][1].is_ready():
            _, transfer, then = self._pending.popleft()
            then(transfer.array())
