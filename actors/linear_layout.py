"""How linear weights lie in CPU memory: as they come, transposed, or with a packed copy beside them.

A product with few rows is bound by how the weight is read. Transposed it takes no more memory. Packed, in the
form that the math library would otherwise make in every product, it takes that of the weight once more. What
is fastest depends on the shape, so weights of one model may lie differently.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
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
"""The usual layout is left for one that takes less than this share of its time."""
LARGEST_COPY = 0.25
"""Share of the free memory that packed copies may take when nobody asked for them."""
_ROUNDS = 5
_TIMED_BYTES = 64 << 20
"""Of weights of one shape that are timed, where there are so many: in a step, too, none is in a cache."""

Product = Callable[[torch.Tensor], torch.Tensor]
Shape = tuple[int, int, bool]
"""Of a linear module: outputs, inputs, and whether it is the head. That is not transposed: embeddings that it
may be tied to are read by row."""
Layouts = dict[Shape, LinearLayout]


def linears(model: torch.nn.Module) -> Iterator[torch.nn.Linear]:
    """The plain linear modules of a model; not what a library has put in their place."""
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.weight.dim() == 2:
            yield module


def by_shape(model: Any) -> dict[Shape, list[torch.nn.Linear]]:
    """The plain linear modules, those of one shape together."""
    head = model.get_output_embeddings()
    found: dict[Shape, list[torch.nn.Linear]] = {}
    for module in linears(model):
        outputs, inputs = module.weight.shape
        found.setdefault((outputs, inputs, module is head), []).append(module)
    return found


def one_layout(model: Any, layout: LinearLayout) -> Layouts:
    """The same for weights of all shapes, but for a head that cannot be transposed."""
    return {shape: usual(shape) if layout == "transposed" else layout for shape in by_shape(model)}


def usual(shape: Shape) -> LinearLayout:
    """What is good at few rows and takes no memory."""
    return "native" if shape[2] else "transposed"


def lay_out(model: Any, layouts: Layouts) -> PackedLinears | None:
    """Store a model's linear weights so; returns what packs copies, if any are to be packed."""
    modules = by_shape(model)
    transposed = [
        module
        for shape, layout in layouts.items()
        if layout != "native" and not shape[2]  # a packed copy serves one number of rows, this the others
        for module in modules[shape]
    ]
    transpose_linear_weights(transposed)
    packed = [module for shape, layout in layouts.items() if layout == "packed" for module in modules[shape]]
    return PackedLinears(packed) if packed else None


def transpose_linear_weights(modules: Iterable[torch.nn.Linear]) -> None:
    """Store their weights column by column; values, shapes and names stay."""
    with torch.no_grad():
        for module in modules:
            module.weight.data = module.weight.data.t().contiguous().t()


def is_packable(model: torch.nn.Module) -> bool:
    """Whether this build of torch has packed products for the model's dtype."""
    dtype = next(model.parameters()).dtype
    if dtype == torch.float32:
        return bool(torch.backends.mkl.is_available()) and hasattr(torch.ops.mkl, "_mkl_linear")
    return dtype == torch.bfloat16 and bool(torch.backends.mkldnn.is_available())


@dataclass
class PackedLinears:
    """Packed copies of the weights of ``modules``, used in products of ``rows`` rows.

    In float32 they serve that number of rows and no other, by MKL; other numbers use the weight itself. In
    bfloat16 they serve any, by oneDNN.
    """

    modules: Collection[torch.nn.Linear]
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
            for module in self.modules:
                module.forward = packed_product(module, self.rows)  # type: ignore[assignment,method-assign]
                self.nbytes += module.weight.nbytes

    def release(self) -> None:
        """Give their memory back; products use the weights."""
        self.nbytes = 0
        for module in self.modules:
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


def fastest_layouts(model: Any, rows: int) -> Layouts:
    """The layouts to decode ``rows`` rows with, by a measurement on the model's own weights.

    The usual ones unless another is clearly faster, so that a busy machine does not decide; packed only as
    far as the copies take little of the free memory, first where they spare most time for their bytes.
    """
    modules = by_shape(model)
    layouts = one_layout(model, "transposed")
    if sum(module.weight.nbytes for module in linears(model)) < LEAST_BYTES:
        return layouts
    seconds = layout_seconds(model, rows)
    left = LARGEST_COPY * psutil.virtual_memory().available
    for shape in sorted(seconds, key=lambda shape: _gain(shape, seconds[shape]) / (shape[0] * shape[1])):
        times = dict(seconds[shape])
        nbytes = sum(module.weight.nbytes for module in modules[shape])
        if nbytes > left:
            times.pop("packed", None)
        best = min(times, key=lambda layout: times[layout])
        if times[best] < MARGIN * times[usual(shape)]:
            layouts[shape] = best
            left -= nbytes if best == "packed" else 0
    return layouts


def layout_seconds(model: Any, rows: int) -> dict[Shape, dict[LinearLayout, float]]:
    """How long one product of each shape takes in a step of ``rows`` rows, by layout."""
    with torch.inference_mode():
        return {
            shape: _product_seconds(
                modules[: 1 + _TIMED_BYTES // modules[0].weight.nbytes], rows, may_transpose=not shape[2]
            )
            for shape, modules in by_shape(model).items()
        }


def _gain(shape: Shape, seconds: dict[LinearLayout, float]) -> float:
    """Seconds that a packed copy costs a product more than the usual layout; below 0 it spares some."""
    return seconds.get("packed", float("inf")) - seconds[usual(shape)]


def _product_seconds(
    modules: list[torch.nn.Linear], rows: int, may_transpose: bool
) -> dict[LinearLayout, float]:
    """Of one product of this shape: the least of some rounds, in which the layouts take turns."""
    weight = modules[0].weight
    x = torch.ones(rows, 1, weight.shape[1], dtype=weight.dtype)
    forms: dict[LinearLayout, list[Product]] = {"native": []}
    if may_transpose:
        forms["transposed"] = []
    for module in modules:
        plain = module.weight.detach().contiguous()
        forms["native"].append(partial(linear, weight=plain, bias=module.bias))
        if may_transpose:
            turned = plain.t().contiguous().t()
            forms["transposed"].append(partial(linear, weight=turned, bias=module.bias))
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
