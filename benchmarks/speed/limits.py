"""What this machine can do at best: products of a model's shapes, and copies in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from time import perf_counter

import torch
from torch.nn import functional

CACHE_BYTES = 1 << 27
"""Weights of one shape take at least so much, where the model has so many: a step finds none in a cache."""


def shapes_of(layers: Iterable[torch.nn.Module]) -> Counter[tuple[int, int]]:
    """How many products of (inputs, outputs) one token takes."""
    return Counter((int(one.in_features), int(one.out_features)) for one in layers)  # type: ignore[call-overload]


def product_limits(shapes: Counter[tuple[int, int]], rows: int, repeats: int = 4) -> dict[str, float]:
    """Milliseconds of all products of a step of ``rows`` rows, by how weights lie; ``best`` of each shape."""
    total: Counter[str] = Counter()
    with torch.inference_mode():
        for (inputs, outputs), count in shapes.items():
            seconds = _shape(inputs, outputs, count, rows, repeats)
            for layout, value in seconds.items():
                total[layout] += 1e3 * count * value
            total["best"] += 1e3 * count * min(seconds.values())
    return dict(total)


def copy_rate(num_bytes: int = 1 << 28, repeats: int = 5) -> float:
    """Bytes per second of a copy in memory, read and written ones together."""
    source = torch.zeros(num_bytes // 4)
    target = torch.empty_like(source)
    return 2 * num_bytes / min(_seconds(lambda: target.copy_(source)) for _ in range(repeats))


def _shape(inputs: int, outputs: int, count: int, rows: int, repeats: int) -> dict[str, float]:
    """Seconds of one product of this shape for each layout, at best."""
    number = min(count, max(1, CACHE_BYTES // (4 * inputs * outputs)))
    weights = [torch.randn(outputs, inputs) for _ in range(number)]
    x = torch.randn(rows, inputs)
    ways: dict[str, Callable[[], object]] = {
        "native": lambda: [functional.linear(x, weight) for weight in weights],
    }
    transposed = [weight.t().contiguous().t() for weight in weights]
    ways["transposed"] = lambda: [functional.linear(x, weight) for weight in transposed]
    if torch.backends.mkldnn.is_available():
        ops = torch.ops.mkldnn
        reordered = [ops._reorder_linear_weight(weight, rows) for weight in weights]
        ways["prepacked for oneDNN"] = lambda: [
            ops._linear_pointwise(x, weight, None, "none", [], "") for weight in reordered
        ]
    if torch.backends.mkl.is_available():
        pack, product = torch.ops.mkl._mkl_reorder_linear_weight, torch.ops.mkl._mkl_linear
        pairs = [(pack(weight, rows), weight) for weight in weights]
        ways["prepacked for MKL"] = lambda: [
            product(x, packed, weight, None, rows) for packed, weight in pairs
        ]
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats + 1):  # ways take turns, so that a busy moment is unfair to all
        for layout, way in ways.items():
            best[layout] = min(best[layout], _seconds(way) / number)
    return best


def _seconds(function: Callable[[], object]) -> float:
    begin = perf_counter()
    function()
    return perf_counter() - begin
