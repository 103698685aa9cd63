"""Recorded steps where there are no CUDA graphs: a list of operations with their tensors, run again.

A replay shows what a CUDA graph would do with a step: none of its Python runs again, every number in it
is the recording's, every operation reads and writes the storage it had. So a counter that Python holds,
or a view of a tensor that has been replaced, gives wrong results here as it would on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollout_pool.actors.graphs import Recorded

P = ParamSpec("P")
T = TypeVar("T")

_running: ContextVar[_Tape | None] = ContextVar("running tape", default=None)


class TapeRecorder:
    """A :class:`rollout_pool.actors.graphs.Recorder` that records operations.

    As on a GPU, a step whose operations depend on data is not recorded, and what a step returned is valid
    until the next record or replay: then everything that it had computed is overwritten with nan.
    """

    def __init__(self) -> None:
        self._last: _Tape | None = None

    def record(self, step: Callable[[], T]) -> Recorded[T]:
        self._forget_last()
        tape = self._last = _Tape()
        with tape.running():
            result = step()
        if tape.fault:
            return Recorded(result, None, tape.fault)

        def replay() -> T:
            self._forget_last()
            self._last = tape
            tape.replay()
            return result

        return Recorded(result, replay)

    def clear(self) -> None:
        """Nothing is held but the last tape."""

    def _forget_last(self) -> None:
        if self._last is not None:
            with torch.inference_mode():
                for tensor in self._last.computed:
                    _spoil(tensor)


def one_operation(function: Callable[P, T]) -> Callable[P, T]:
    """``function`` as an operation of its own on a tape: a replay runs its Python again.

    For the torch form of a kernel, which may look at data where the kernel does not.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        tape = _running.get()
        if tape is None or tape.is_paused:
            return function(*args, **kwargs)
        tape.is_paused = True
        try:
            result = function(*args, **kwargs)
        finally:
            tape.is_paused = False
        tape.add(function, args, kwargs, result)
        return result

    return run


class _Operation(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor]


class _Tape(TorchDispatchMode):
    """The operations of one step, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self.computed: list[torch.Tensor] = []
        """What operations returned in storage of their own."""
        self.fault = ""
        self.is_paused = False

    @contextmanager
    def running(self) -> Iterator[None]:
        token = _running.set(self)
        try:
            with self:
                yield
        finally:
            _running.reset(token)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        with self:  # operations that are made of others are recorded in their parts
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        result = func(*args, **kwargs)
        if depends_on_data(func, args):
            self.fault = self.fault or f"{func} depends on data"
        elif torch.Tag.inplace_view not in func.tags:  # those change what Python sees, and no storage
            self.add(func, args, kwargs, result, is_pure=not func._schema.is_mutable)
        return result

    def add(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, is_pure: bool = False
    ) -> None:
        outputs = list(_tensors(result))
        known = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        computed = [tensor for tensor in outputs if _storage(tensor) not in known]
        if computed or not is_pure:  # what is left out are views: their storage is another's
            self.operations.append(_Operation(function, args, kwargs, outputs))
            self.computed += computed

    def replay(self) -> None:
        with torch.inference_mode():
            for function, args, kwargs, outputs in self.operations:
                for tensor, again in zip(outputs, _tensors(function(*args, **kwargs)), strict=True):
                    if _storage(tensor) != _storage(again):
                        tensor.copy_(again)


def depends_on_data(operation: Any, args: tuple[Any, ...]) -> bool:
    """Whether the shape or the value that Python gets from an ATen operation depends on tensors' data."""
    if operation.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        fills_one_value = len(args) > 2 and args[2].numel() == 1  # a masked fill
        return bool(masks) and not fills_one_value
    return not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(operation.tags)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif is_dataclass(value):
        yield from _tensors([getattr(value, field.name) for field in fields(value)])


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _spoil(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
