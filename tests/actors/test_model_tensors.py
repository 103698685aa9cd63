"""The tensors of a model, whatever is replaced in it."""

from __future__ import annotations

from typing import Any

import torch

from rollout_pool.actors.model_tensors import ModelTensors


def test_the_tensors_of_a_model_are_its_parameters_and_buffers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    model[2].weight = model[0].weight
    tensors = ModelTensors(model)

    def addresses(found: Any) -> set[int]:
        return {tensor.data_ptr() for tensor in found}

    assert addresses(tensors()) == addresses([*model.parameters(), *model.buffers()])
    model[1].running_mean = torch.ones(2)
    model[2].bias = None
    assert addresses(tensors()) == addresses([*model.parameters(), *model.buffers()])
