"""Steps that CUDA graphs can't hold are found, and run eagerly."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollout_pool.actors.graphs import CudaRecorder, GraphedStep, run_and_find_waits

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_place_where_a_step_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits() -> int:
        assert modes[-1] == "warn"
        warnings.warn(
            "called a synchronizing CUDA operation (Triggered internally)", UserWarning, stacklevel=1
        )
        return 7

    def warns() -> int:
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
        return 8

    result, fault = run_and_find_waits(waits)
    assert (result, modes[-1]) == (7, 0)
    assert fault.endswith(" waits for the GPU")
    assert f"test_cuda_recorder.py:{waits.__code__.co_firstlineno + 2}" in fault
    with pytest.warns(UserWarning, match="something else") as caught:
        assert run_and_find_waits(warns) == (8, "")
    assert len(caught) == 1
    with pytest.raises(ZeroDivisionError):
        run_and_find_waits(lambda: 1 // 0)
    assert modes[-1] == 0


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "found beforehand": lambda x: x.sum().item(),
    "found by the capture": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("wait", [pytest.param(wait, marks=on_gpu) for wait in WAITS])
def test_cuda_steps_that_wait_run_eagerly_and_leave_torch_in_order(wait: str) -> None:
    def step() -> torch.Tensor:
        WAITS[wait](x)
        return x.add_(1)

    x = torch.zeros(4, device="cuda")
    stream = torch.cuda.current_stream()
    graphed = GraphedStep(CudaRecorder(x.device), list, lambda: [x])
    with pytest.warns(RuntimeWarning, match="run eagerly"):
        values = [graphed((4,), step)[0].item() for _ in range(4)]
    assert values == [1, 2, 3, 4]
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()
    fresh = GraphedStep(CudaRecorder(x.device), list, lambda: [x])
    assert [fresh((4,), lambda: x.mul_(2))[0].item() for _ in range(3)] == [8, 16, 32]
    assert fresh.num_replays == 2
