"""Which form of a kernel runs, and that nothing but a GPU tensor needs Triton."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_pool.actors.attention import spans
from rollout_pool.kernels import counter_hash, ops, prefix_reference, reference, sampling_reference

MODULES = {
    "cache_triton": ["expand_kv", "expand_in_place", "compact_kv", "move_rows", "trim_kv", "write_kv"],
    "attention_triton": ["decode_attention"],
    "prefix_attention_triton": ["prefix_attention"],
    "sampling_triton": ["sample_tokens"],
    "counter_hash_triton": ["position_keys", "exponential_noise"],
}
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from rollout_pool.kernels import ops
cache = torch.arange(4.0).view(4, 1, 1, 1)
ops.expand_in_place([cache], 2, 2, 1)
assert cache.flatten().tolist() == [0, 0, 1, 1]
assert not any(name.endswith("_triton") for name in sys.modules)
"""


def test_a_machine_without_triton_runs_the_references() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True)


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in MODULES.items() for name in names]
)
def test_both_forms_have_one_signature(module: str, name: str) -> None:
    pytest.importorskip("triton")
    import importlib

    form = getattr(importlib.import_module(f"rollout_pool.kernels.{module}"), name)
    torch_form = next(
        getattr(home, name)
        for home in (reference, prefix_reference, sampling_reference, counter_hash)
        if hasattr(home, name)
    )
    assert inspect.signature(form) == inspect.signature(torch_form)


def test_the_first_tensors_device_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        ops, "import_module", lambda name: asked.append(name) or SimpleNamespace(trim_kv=asked.append)
    )
    choose = ops._by_device(reference.trim_kv, "cache_triton")
    cache = torch.zeros(1, 1, 2, 1)
    choose([cache], 1, 2)
    choose([], 1, 2)
    choose(caches=[cache], columns=1, length=2)
    assert asked == []
    monkeypatch.setattr(ops, "uses_triton", lambda tensor: tensor is cache)
    with pytest.raises(TypeError):  # the stand-in takes one argument
        choose([cache], 1, 2)
    assert asked == ["rollout_pool.kernels.cache_triton"]


def test_spans_say_the_same_as_the_mask() -> None:
    column = torch.arange(9)
    visible = torch.stack([column < 1, column < 9, (column >= 3) & (column < 7), column == 8]).view(
        4, 1, 1, 9
    )
    lengths, window = spans(visible)[:, 0, 0].unbind(dim=1)
    assert torch.equal(reference.visible_cells(lengths, window, 9), visible)
    assert lengths.is_contiguous()
    assert window.is_contiguous()
