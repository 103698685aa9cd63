"""Every kernel variant compiles to a cubin for every architecture, without a GPU, and fits it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

from rollout_pool.kernels import ahead_of_time, variants

SHARED_LIMITS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
NAMES = [name for name, _ in variants.launches()]
DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"


@cache
def compiled(name: str, capability: int) -> list[Any]:
    call: Callable[[], object] = dict(variants.launches())[name]
    return ahead_of_time.kernels_of(capability, call)


@pytest.mark.parametrize(
    "capability", [90, pytest.param(80, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", NAMES)
def test_every_variant_compiles_and_fits(name: str, capability: int) -> None:
    kernels = compiled(name, capability)
    assert kernels
    for kernel in kernels:
        assert f".target sm_{capability}" in kernel.asm["ptx"]
        needs = ahead_of_time.resources(kernel)
        assert needs.shared <= SHARED_LIMITS[capability]
        assert needs.registers * needs.threads <= 1 << 16
        assert needs.spilled == 0


@pytest.mark.parametrize("name", ["cache moves, 2-byte", "cache moves, many rows"])
def test_in_place_moves_read_everything_before_they_overwrite(name: str) -> None:
    """Between the reads of a block and its writes all threads of the program meet."""
    in_place = {"move_kernel", "trim_kernel", "expand_in_place_kernel"}
    checked = [kernel for kernel in compiled(name, 90) if kernel.metadata.name in in_place]
    assert checked
    for kernel in checked:
        # Tables, row numbers and conversions between layouts come first; they do not count.
        steps = re.findall(r"ld\.global|st\.global|bar\.sync", kernel.asm["ptx"])
        last_read = max(i for i, step in enumerate(steps) if step == "ld.global")
        first_write = steps.index("st.global")
        assert last_read < first_write
        assert "bar.sync" in steps[last_read:first_write]


def test_cells_are_moved_sixteen_bytes_at_a_time() -> None:
    for kernel in compiled("cache moves, 2-byte", 90):
        if kernel.metadata.name != "write_kernel":
            assert "ld.global.v4.b32" in kernel.asm["ptx"]
            assert "st.global.v4.b32" in kernel.asm["ptx"]


def test_the_table_in_the_docs_names_every_variant() -> None:
    text = DOCS.read_text()
    assert [name for name in NAMES if f"| {name} |" not in text] == []
