"""The weights of a model out of the memory that they are computed with, while their engine sleeps.

Those of a GPU go into pinned host memory. Those of a CPU have no other memory to go to, and go into a file
without a name, which the system deletes when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
from typing import IO, Any

import torch


class StoredWeights:
    """Every parameter of ``model``, stored, with its memory given back, until :meth:`restore`.

    Parameters that share memory share it again afterwards; layouts stay, addresses do not. Meanwhile all
    values are nan.

    Raises :class:`OSError` when the disk is full; then nothing has changed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        groups: dict[tuple[str, int], list[torch.nn.Parameter]] = {}
        for parameter in model.parameters():
            if parameter.numel():
                key = str(parameter.device), parameter.untyped_storage().data_ptr()
                groups.setdefault(key, []).append(parameter)
        self._groups = [_Group(parameters) for parameters in groups.values()]
        self._file: IO[bytes] | None = None
        if any(group.is_on_cpu for group in self._groups):
            self._file = tempfile.TemporaryFile(prefix="rollout-pool-weights-")  # noqa: SIM115  # closed by restore
        try:
            for group in self._groups:
                group.store(self._file)
            if self._file is not None:
                self._file.flush()
        except BaseException:
            self._close()
            raise
        for group in self._groups:
            group.free()
        if self._file is not None:
            trim_heap()

    def restore(self) -> None:
        """Take the memory again, and put the same bits into it."""
        if self._file is not None:
            self._file.seek(0)
        for group in self._groups:
            group.restore(self._file)
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


def trim_heap() -> None:
    """Give freed memory back to the system; the C library keeps pieces of up to 32 MiB for later."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)


class _Group:
    """Parameters that lie in one piece of memory."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._views = [(p, p.shape, p.stride(), p.storage_offset()) for p in parameters]
        self._device = parameters[0].device
        self._nbytes = parameters[0].untyped_storage().nbytes()
        self._copy: torch.Tensor | None = None
        self.is_on_cpu = self._device.type == "cpu"

    def store(self, file: IO[bytes] | None) -> None:
        data = torch.empty(0, dtype=torch.uint8, device=self._device)
        data.set_(self._views[0][0].untyped_storage())
        if self.is_on_cpu:
            assert file is not None
            file.write(_bytes_of(data))
        else:
            self._copy = torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=True)
            self._copy.copy_(data)

    def free(self) -> None:
        with torch.inference_mode(False):
            for parameter, shape, _, _ in self._views:
                value = float("nan") if parameter.is_floating_point() else 0
                cell = torch.full((1,), value, dtype=parameter.dtype, device=self._device)
                parameter.data = cell.expand(shape)

    def restore(self, file: IO[bytes] | None) -> None:
        with torch.inference_mode(False):
            data = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
            if self.is_on_cpu:
                assert file is not None
                _fill(data, file)
            else:
                assert self._copy is not None
                data.copy_(self._copy)
                self._copy = None
            for parameter, shape, stride, offset in self._views:
                whole = torch.empty(0, dtype=parameter.dtype, device=self._device)
                parameter.data = whole.set_(data.untyped_storage(), offset, shape, stride)


def _bytes_of(data: torch.Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)


def _fill(data: torch.Tensor, file: IO[bytes]) -> None:
    rest: Any = _bytes_of(data)
    while rest:
        count = file.readinto(rest)  # type: ignore[attr-defined]
        if not count:
            raise OSError("the stored weights end too early")
        rest = rest[count:]
