"""Part a, decode attention: against the reference in float64, with every cell that no row sees poisoned."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gpu.draws import DTYPES, Draw, poisoned_allocations
from gpu.parts import Row, Setting, Step
from rollout_pool.kernels import attention_triton, reference

TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2, "fp32": 1e-5}
DIMS = [(64, 64), (128, 128), (80, 80), (256, 256), (192, 128), (33, 7), (96, 96)]
DRY_DIMS = [(16, 16), (33, 7), (24, 40)]
HEADS = [(6, 2), (3, 3), (5, 1), (32, 4)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 70},
    {"window": "per row"},
    {"softcap": 2.0},
    {"sinks": True},
    {"window": 90, "softcap": 3.0, "sinks": True},
    {"window": 1},
]


class Inputs:
    """Random tensors; the cache is a cut out of a larger one, and the query a transposed view."""

    def __init__(
        self, draw: Draw, dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], options: Any
    ) -> None:
        split = attention_triton.SPLIT
        lengths = [1, split - 1, split, split + 1, draw.number(2, split - 2), draw.number(split, 3 * split)]
        rows, view = len(lengths), max(lengths) + draw.number(0, 70)
        num_heads, kv_heads = heads
        self.query = draw.normal(rows, 1, num_heads, dims[0], dtype=dtype).transpose(1, 2)
        self.keys, self.values = (
            draw.normal(rows + 1, kv_heads, view + 9, dim, dtype=dtype)[:rows, :, :view] for dim in dims
        )
        self.lengths = torch.tensor(lengths, device=draw.device)
        self.options: dict[str, Any] = {"scaling": 0.2, **options}
        if options.get("sinks"):
            self.options["sinks"] = draw.normal(num_heads, dtype=dtype)
        if options.get("window") == "per row":
            self.options["window"] = draw.any_rows(view, rows) + 1

    def expected(self) -> torch.Tensor:
        tensors = (tensor.double() for tensor in (self.query, self.keys, self.values))
        return reference.decode_attention(*tensors, self.lengths, **self.options)

    def poison(self) -> None:
        """Not a number wherever no row may look."""
        visible = reference.visible_cells(self.lengths, self.options.get("window"), self.keys.shape[2])
        for cache in (self.keys, self.values):
            cache.masked_fill_(~visible.transpose(2, 3), float("nan"))

    def run(self, rows: slice = slice(None), view: int | None = None) -> torch.Tensor:
        window = self.options.get("window")
        options = {**self.options, "window": window[rows] if isinstance(window, torch.Tensor) else window}
        keys, values = (cache[rows, :, :view] for cache in (self.keys, self.values))
        with poisoned_allocations():
            return attention_triton.decode_attention(
                self.query[rows], keys, values, self.lengths[rows], **options
            )


def check(setting: Setting, dtype_name: str) -> list[Row]:
    """Every head dim, and every option, in this dtype; the pairs of them differ from dtype to dtype."""
    name, tolerance = f"decode_attention, {dtype_name}", TOLERANCE[dtype_name]
    draw, offset = Draw(setting, name), 2 * list(DTYPES).index(dtype_name)
    dims = DRY_DIMS if setting.is_dry else DIMS
    worst, faults = 0.0, []
    for number, options in enumerate(OPTIONS):
        chosen = dims[(number + offset) % len(dims)]
        heads = HEADS[(number + offset) % (3 if setting.is_dry else len(HEADS))]
        inputs = Inputs(draw, DTYPES[dtype_name], heads, chosen, options)
        expected = inputs.expected()
        inputs.poison()
        got = inputs.run()
        error = (got.double() - expected).abs()
        worst = max(worst, float(error.max()))
        # Written so that nan is a fault.
        if got.dtype != DTYPES[dtype_name] or not bool((error <= tolerance * (1 + expected.abs())).all()):
            faults.append(f"{heads} heads, head dims {chosen}, {options}: off by {float(error.max()):.1e}")
    seen = f"{len(OPTIONS)} cases, off by {worst:.1e} at most ({tolerance:.0e} allowed)"
    if faults:
        seen = f"{len(faults)} of {len(OPTIONS)} cases wrong; first: {faults[0]}"
    return [Row(name, seen, not faults, {"cases": len(OPTIONS), "worst": worst, "wrong": faults})]


def check_own_bits(setting: Setting, dtype_name: str) -> list[Row]:
    """A row alone, in a view as short as it, has the bits that it has among others."""
    name = f"decode_attention, {dtype_name}: a row's bits are its own"
    draw, equal, total = Draw(setting, name), 0, 0
    for options in (OPTIONS[2],) if setting.is_dry else (OPTIONS[0], OPTIONS[2]):
        inputs = Inputs(draw, DTYPES[dtype_name], HEADS[0], DIMS[0], options)
        together = inputs.run()
        for row, length in enumerate(inputs.lengths.tolist()):
            alone = inputs.run(slice(row, row + 1), view=length)
            equal += torch.equal(alone[0], together[row])
            total += 1
    return [Row(name, f"{equal} of {total} rows", equal == total, {"rows": total, "equal": equal})]


def steps(setting: Setting) -> list[Step]:
    if setting.is_dry:
        attention_triton.SPLIT = 64
    return [
        *(Step(f"decode_attention, {dtype}", partial(check, setting, dtype)) for dtype in DTYPES),
        *(
            Step(f"decode_attention, {dtype}: own bits", partial(check_own_bits, setting, dtype))
            for dtype in DTYPES
        ),
    ]
