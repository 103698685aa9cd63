"""How linear weights lie in CPU memory: as they come, transposed, or with a packed copy beside them.

A product with few rows is bound by how the weight is read. Transposed it takes no more memory. Packed, in the
form that the math library would otherwise make in every product, it takes that of the weights once more.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import psutil
import torch
from torch.nn.functional import linear

LinearLayout = Literal["native", "transposed", "packed"]
LEAST_BYTES = 64 << 20
"""Of linear weights that are worth a measurement; smaller ones stay in a core's cache."""
MARGIN = 0.9
"""Transposed weights are left for a layout that takes less than this share of their time."""
LARGEST_COPY = 0.25
"""Share of the free memory that packed copies may take when nobody asked for them."""
_ROUNDS = 5
_TIMED_PER_SHAPE = 3

Product = Callable[[torch.Tensor], torch.Tensor]


def linears(model: torch.nn.Module) -> Iterator[torch.nn.Linear]:
    """The plain linear modules of a model; not what a library has put in their place."""
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.weight.dim() == 2:
            yield module


def transpose_linear_weights(model: Any) -> int:
    """Store linear weights column by column; values, shapes and names stay. Returns how many.

    Embeddings, and heads tied to them, are read by row and stay.
    """
    outputs = model.get_output_embeddings()
    count = 0
    with torch.no_grad():
        for module in linears(model):
            if module is not outputs:
                module.weight.data = module.weight.data.t().contiguous().t()
                count += 1
    return count


def is_packable(model: torch.nn.Module) -> bool:
    """Whether this build of torch has packed products for the model's dtype."""
    dtype = next(model.parameters()).dtype
    if dtype == torch.float32:
        return bool(torch.backends.mkl.is_available()) and hasattr(torch.ops.mkl, "_mkl_linear")
    return dtype == torch.bfloat16 and bool(torch.backends.mkldnn.is_available())


@dataclass
class PackedLinears:
    """Packed copies of a model's linear weights, used in products of ``rows`` rows.

    In float32 they serve that number of rows and no other, by MKL; other numbers use the weight itself. In
    bfloat16 they serve any, by oneDNN.
    """

    model: torch.nn.Module
    rows: int = 0
    nbytes: int = 0
    """Of the copies."""

    def make_ready(self, rows: int) -> None:
        """Pack for so many rows, unless that is done."""
        if rows != self.rows or not self.nbytes:
            self.rows = rows
            self.pack()

    def pack(self) -> None:
        """Copy the weights as they are now; again after every change of them."""
        self.release()
        with torch.inference_mode():
            for module in linears(self.model):
                module.forward = packed_product(module, self.rows)  # type: ignore[assignment,method-assign]
                self.nbytes += module.weight.nbytes

    def release(self) -> None:
        """Give their memory back; products use the weights."""
        self.nbytes = 0
        for module in linears(self.model):
            vars(module).pop("forward", None)


def packed_product(module: torch.nn.Linear, rows: int) -> Product:
    """What ``module`` computes, with a copy of its weight packed for ``rows`` rows."""
    weight, bias = module.weight, module.bias
    whole = weight.detach().contiguous()
    if weight.dtype == torch.float32:
        packed = torch.ops.mkl._mkl_reorder_linear_weight(whole, rows)
        product: Product = partial(_mkl_product, packed=packed, weight=weight, bias=bias, rows=rows)
        return product
    packed = torch.ops.mkldnn._reorder_linear_weight(whole, rows)
    return partial(_onednn_product, packed=packed, bias=bias)


def _mkl_product(
    x: torch.Tensor, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: int
) -> torch.Tensor:
    if x.numel() != rows * x.shape[-1]:
        return linear(x, weight, bias)
    out: torch.Tensor = torch.ops.mkl._mkl_linear(x, packed, weight, bias, rows)
    return out


def _onednn_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def fastest_layout(model: torch.nn.Module, rows: int) -> LinearLayout:
    """The layout to decode ``rows`` rows with, by a measurement on the model's own weights.

    Transposed unless another one is clearly faster, so that a busy machine does not decide; packed only where
    the copies take little of the free memory.
    """
    nbytes = sum(module.weight.nbytes for module in linears(model))
    if nbytes < LEAST_BYTES:
        return "transposed"
    seconds = layout_seconds(model, rows)
    if nbytes > LARGEST_COPY * psutil.virtual_memory().available:
        seconds.pop("packed", None)
    best = min(seconds, key=lambda layout: seconds[layout])
    return best if seconds[best] < MARGIN * seconds["transposed"] else "transposed"


def layout_seconds(model: torch.nn.Module, rows: int) -> dict[LinearLayout, float]:
    """How long the products of one step of ``rows`` rows take, by layout."""
    shapes: dict[torch.Size, list[torch.nn.Linear]] = defaultdict(list)
    for module in linears(model):
        shapes[module.weight.shape].append(module)
    totals: dict[LinearLayout, float] = defaultdict(float)
    with torch.inference_mode():
        for modules in shapes.values():
            for layout, seconds in _product_seconds(modules[:_TIMED_PER_SHAPE], rows).items():
                totals[layout] += seconds * len(modules)
    return dict(totals)


def _product_seconds(modules: list[torch.nn.Linear], rows: int) -> dict[LinearLayout, float]:
    """Of one product of this shape: the least of some rounds, in which the layouts take turns."""
    weight = modules[0].weight
    x = torch.ones(rows, 1, weight.shape[1], dtype=weight.dtype)
    forms: dict[LinearLayout, list[Product]] = {"native": [], "transposed": []}
    for module in modules:
        plain = module.weight.detach().contiguous()
        forms["native"].append(partial(linear, weight=plain, bias=module.bias))
        forms["transposed"].append(partial(linear, weight=plain.t().contiguous().t(), bias=module.bias))
    if is_packable(modules[0]):
        forms["packed"] = [packed_product(module, rows) for module in modules]
    best: dict[LinearLayout, float] = dict.fromkeys(forms, float("inf"))
    for _ in range(_ROUNDS):
        for layout, products in forms.items():
            begin = time.perf_counter()
            for product in products:
                product(x)
            best[layout] = min(best[layout], (time.perf_counter() - begin) / len(products))
    return best
