"""A step on a tape does what a CUDA graph of it would: the operations and numbers of its recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from rollout_pool.actors.graphs import GraphedStep
from rollout_pool.actors.tape import TapeRecorder, one_operation

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]])
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "truth": lambda x: x + 1 if x.sum() > 0 else x,
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "write through a mask": lambda x: x.index_put_((x > 0,), torch.ones(int((X > 0).sum()))),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave((x[:, 0] > 0).long(), dim=0),
}


def test_a_step_that_counts_in_python_goes_wrong() -> None:
    count = 0

    def step() -> torch.Tensor:
        nonlocal count
        count += 1
        total.add_(count)
        return total

    total = torch.zeros(1)
    graphed = GraphedStep(TapeRecorder(), list, lambda: [total])
    seen = [graphed((1,), step).item() for _ in range(3)]
    assert seen == [1, 2, 3]  # not 1, 3, 6: what was counted is the recording's for ever


@pytest.mark.parametrize("read", READS)
def test_the_tape_refuses_what_depends_on_data(read: str) -> None:
    x = X.clone()
    with torch.inference_mode():
        recorded = TapeRecorder().record(lambda: READS[read](x))
        expected = READS[read](X.clone())
    assert recorded.replay is None
    assert "depends on data" in recorded.fault
    torch.testing.assert_close(recorded.result, expected)


OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "out of place": lambda x: (x * 2 + 1).relu(),
    "in place": lambda x: x.clone().mul_(3).add_(x),
    "views": lambda x: x.t()[1:].unsqueeze(0).expand(2, -1, -1) + 1,
    "write through a view": lambda x: torch.zeros(3, 3)[1:].copy_(x),
    "row of a matrix": lambda x: x.clone().select(0, 1).zero_(),
    "tuple": lambda x: x.topk(2, dim=1),
    "list": lambda x: [part + 1 for part in x.clone().split([1, 2], dim=1)],
    "unbind": lambda x: torch.stack(x.unbind(1)),
    "factory": lambda x: torch.arange(3).add_(1) * x,
    "constant": lambda x: x * torch.tensor([1.0, 2.0, 3.0]),
    "out": lambda x: torch.where(x > 0, x, -x, out=torch.empty(2, 3)),
    "reshape with a copy": lambda x: x.t().reshape(6) + 1,
    "reshape without one": lambda x: x.reshape(6),
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to(torch.float64).to(torch.int64),
    "matmul": lambda x: torch.einsum("ij,kj->ik", x, x),
    "linear": lambda x: functional.linear(x, X, torch.tensor([1.0, 2.0])),
    "index": lambda x: x[torch.tensor([1, 0, 1]), torch.tensor([0, 2, 1])],
    "write at an index": lambda x: x.clone().index_put_((torch.tensor([1]),), torch.tensor([7.0])),
    "masked fill": lambda x: x.clone().index_put_((x > 0,), torch.tensor(0.0)),
    "gather": lambda x: x.gather(1, x.argsort(dim=1)),
    "convolution": lambda x: functional.conv1d(x.unsqueeze(0), torch.ones(1, 2, 2)),
    "norm": lambda x: functional.layer_norm(x, (3,)),
    "cat": lambda x: torch.cat((x, x.cumsum(1)), dim=1),
    "bool": lambda x: (x > 0).logical_and_(x < 3).any(dim=1),
}


@pytest.mark.parametrize("is_inference", [True, False])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_tape_replays(operation: str, is_inference: bool) -> None:
    run = OPERATIONS[operation]
    with torch.inference_mode(is_inference):
        x, recorder = X.clone(), TapeRecorder()
        recorded = recorder.record(lambda: run(x))
        assert recorded.replay is not None, recorded.fault
        other = recorder.record(lambda: run(X.clone()))
        assert other.replay is not None
        for factor in (1.0, -2.0, 3.0):
            x.copy_(X * factor)
            torch.testing.assert_close(recorded.replay(), run(X * factor))
            other.replay()


def test_a_kernels_torch_form_is_one_operation_on_the_tape() -> None:
    @one_operation
    def rescale(values: torch.Tensor) -> torch.Tensor:
        if bool((values < 0).any()):
            values.abs_()
        return values[values > 1].sum()

    def step() -> torch.Tensor:
        return rescale(x) + 1

    x = torch.tensor([3.0, -2.0])
    recorded = TapeRecorder().record(step)
    assert recorded.replay is not None, recorded.fault
    x.copy_(torch.tensor([0.5, 4.0]))
    assert (recorded.replay().item(), x.tolist()) == (5.0, [0.5, 4.0])
    x.copy_(torch.tensor([-6.0, 4.0]))
    assert (recorded.replay().item(), x.tolist()) == (11.0, [6.0, 4.0])
