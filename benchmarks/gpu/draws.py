"""Fresh random inputs, and memory that shows what was written and what was not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gpu.parts import Setting

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GUARD = 64
_MARK = -(2**30)


class Draw:
    """Numbers and tensors of one step, drawn from a seed of its own."""

    def __init__(self, setting: Setting, name: str) -> None:
        self.device = setting.device
        self._random: random.Random = setting.random(name)
        self._generator = torch.Generator(setting.device).manual_seed(self._random.getrandbits(48))

    def number(self, low: int, high: int) -> int:
        """From ``low`` to ``high``, both included."""
        return self._random.randint(low, high)

    def rows(self, total: int, count: int) -> torch.Tensor:
        """``count`` different rows of ``total``, in any order: int64 ``[count]``."""
        return torch.tensor(self._random.sample(range(total), count), device=self.device)

    def any_rows(self, total: int, count: int) -> torch.Tensor:
        """``count`` rows of ``total``, with repetitions: int64 ``[count]``."""
        return torch.tensor([self.number(0, total - 1) for _ in range(count)], device=self.device)

    def bits(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Every pattern of bits, also those that are no numbers."""
        word = WORDS[dtype.itemsize]
        low, high = torch.iinfo(word).min, torch.iinfo(word).max
        drawn = torch.randint(
            low, high, tuple(shape), generator=self._generator, dtype=word, device=self.device
        )
        return drawn.view(dtype)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.device).to(dtype)


class GuardedCaches:
    """Cache tensors of random bits inside larger storages, whose other cells no kernel may touch.

    They begin ``shift`` elements off a multiple of 16 bytes, as views of a user's tensor may.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, draw: Draw, shift: int) -> None:
        self.shapes, self._begin = [torch.Size(shape) for shape in shapes], GUARD + shift
        size = max(shape.numel() for shape in self.shapes) + 2 * GUARD
        self._storage = draw.bits((len(shapes), size), dtype)

    def difference(
        self, call: Callable[[Any, list[torch.Tensor]], object], reference: object, form: object
    ) -> str:
        """What differs in the storages after ``call`` with the reference and with the other form; or ""."""
        expected, got = self._storage.clone(), self._storage.clone()
        call(reference, self._tensors(expected))
        call(form, self._tensors(got))
        word = WORDS[self._storage.dtype.itemsize]
        wrong = (expected.view(word) != got.view(word)).nonzero()
        if not wrong.shape[0]:
            return ""
        tensor, cell = wrong[0].tolist()
        inside = 0 <= cell - self._begin < self.shapes[tensor].numel()
        where = f"cell {cell - self._begin} of tensor {tensor}" if inside else f"around tensor {tensor}"
        return f"{wrong.shape[0]} cells differ, the first is {where}"

    def _tensors(self, storage: torch.Tensor) -> list[torch.Tensor]:
        begin = self._begin
        return [
            row[begin : begin + shape.numel()].view(shape)
            for row, shape in zip(storage, self.shapes, strict=True)
        ]


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Every tensor that a kernel gets uninitialised is poisoned, and lies between cells that must stay so.

    Raises:
        AssertionError: on leaving, when one of those cells was written.
    """
    made: list[torch.Tensor] = []
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        storage = empty(torch.Size(shape).numel() + 2 * GUARD, dtype=dtype, device=device)
        made.append(storage.fill_(float("nan") if dtype.is_floating_point else _MARK))
        return storage[GUARD:-GUARD].view(shape)

    def poisoned_like(tensor: torch.Tensor) -> torch.Tensor:
        return poisoned(*tensor.shape, dtype=tensor.dtype, device=tensor.device)

    torch.empty, torch.empty_like = poisoned, poisoned_like
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like
    for storage in made:
        ends = torch.cat((storage[:GUARD], storage[-GUARD:]))
        if not bool((ends.isnan() if ends.is_floating_point() else ends == _MARK).all()):
            raise AssertionError("a kernel wrote before or behind its output")
