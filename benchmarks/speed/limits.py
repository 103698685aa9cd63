"""What this machine can do at best: products of a model's shapes, and copies in memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch.nn import functional

CACHE_BYTES = 1 << 27
"""Weights of one shape take at least so much, where the model has so many: a step finds none in a cache."""

Shape = tuple[int, int]
"""Inputs and outputs."""


def shapes_of(layers: Iterable[torch.nn.Module]) -> Counter[Shape]:
    """How many products of (inputs, outputs) one token takes."""
    return Counter((int(one.in_features), int(one.out_features)) for one in layers)  # type: ignore[call-overload]


class ProductLimits:
    """All products of a step of ``rows`` rows, by how weights lie: measured in turns with the steps that are
    held against them, for a busy machine slows both."""

    def __init__(self, shapes: Counter[Shape], rows: int, dtype: torch.dtype) -> None:
        self._shapes = shapes
        self._ways = {shape: _ways(*shape, count, rows, dtype) for shape, count in shapes.items()}
        self._seconds: dict[tuple[Shape, str], list[float]] = defaultdict(list)

    def measure(self, repeats: int = 3) -> None:
        """Once more."""
        with torch.inference_mode():
            for shape, ways in self._ways.items():
                for _ in range(repeats):
                    for layout, products in ways.items():
                        seconds = _seconds(lambda products=products: [one() for one in products])
                        self._seconds[shape, layout].append(seconds / len(products))

    def milliseconds(self) -> dict[str, float]:
        """Of a step: medians, by layout; ``best`` of each shape."""
        total: Counter[str] = Counter()
        for shape, ways in self._ways.items():
            medians = {layout: 1e3 * median(self._seconds[shape, layout]) for layout in ways}
            for layout, value in (*medians.items(), ("best", min(medians.values()))):
                total[layout] += self._shapes[shape] * value
        return dict(total)


def copy_rate(num_bytes: int = 1 << 28, repeats: int = 5) -> float:
    """Bytes per second of a copy in memory, read and written ones together."""
    source = torch.zeros(num_bytes // 4)
    target = torch.empty_like(source)
    return 2 * num_bytes / min(_seconds(lambda: target.copy_(source)) for _ in range(repeats))


def _ways(
    inputs: int, outputs: int, count: int, rows: int, dtype: torch.dtype
) -> dict[str, list[Callable[[], object]]]:
    """Products of this shape with weights that lie so, each with a weight of its own."""
    number = min(count, max(1, CACHE_BYTES // (dtype.itemsize * inputs * outputs)))
    weights = [torch.randn(outputs, inputs, dtype=dtype) for _ in range(number)]
    transposed = [weight.t().contiguous().t() for weight in weights]
    x = torch.randn(rows, inputs, dtype=dtype)
    ways: dict[str, list[Callable[[], object]]] = {
        "native": [partial(functional.linear, x, weight) for weight in weights],
        "transposed": [partial(functional.linear, x, weight) for weight in transposed],
    }
    if torch.backends.mkldnn.is_available():
        pack, product = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
        ways["prepacked for oneDNN"] = [
            partial(product, x, pack(weight, rows), None, "none", [], "") for weight in weights
        ]
    if torch.backends.mkl.is_available() and dtype == torch.float32:
        pack, product = torch.ops.mkl._mkl_reorder_linear_weight, torch.ops.mkl._mkl_linear
        ways["prepacked for MKL"] = [
            partial(product, x, pack(weight, rows), weight, None, rows) for weight in weights
        ]
    return ways


def _seconds(function: Callable[[], object]) -> float:
    begin = perf_counter()
    function()
    return perf_counter() - begin
