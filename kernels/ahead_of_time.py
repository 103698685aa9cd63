"""Compile what the kernels launch for a GPU that this machine need not have.

The functions of the ``*_triton`` modules run as they are, on CPU tensors; Triton believes in a GPU of
the given architecture, and every launch ends when its kernel is compiled. So what is compiled is what
would be launched, with the same specialisations.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class _Absent:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(capability: int) -> Iterator[list[Any]]:
    """Within this context launches compile for ``capability`` (80, 90, 100), and nothing runs.

    Yields the list to which every kernel launched is added: Triton's ``CompiledKernel``, whose ``asm``
    holds the ``ptx`` and the ``cubin``. Not for use while other threads launch kernels.
    """
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        return kernel

    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Absent(capability))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run
        triton.runtime.driver._active = before


def kernels_of(capability: int, call: Callable[[], Any]) -> list[Any]:
    """The compiled kernels that ``call`` launches."""
    with compiling_for(capability) as compiled:
        call()
    return compiled


@dataclass(frozen=True, order=True)
class Resources:
    """What a compiled kernel needs: registers per thread, bytes of shared memory per program, bytes spilled
    per thread (its stack frame, which our kernels use for nothing else), threads per program."""

    registers: int
    shared: int
    spilled: int
    threads: int


def resources(kernel: Any) -> Resources:
    """What the cubin of a compiled kernel says, as read by the ``cuobjdump`` that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    metadata = kernel.metadata
    return Resources(found["REG"], metadata.shared, found["STACK"] + found["LOCAL"], 32 * metadata.num_warps)
