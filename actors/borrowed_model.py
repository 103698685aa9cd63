"""A model that a trainer lends: taken out of what it is wrapped in, and watched for a trainer's steps."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from transformers import PreTrainedModel

from rollout_pool.actors.model_tensors import ModelTensors
from rollout_pool.actors.zero3 import is_partitioned
from rollout_pool.errors import ConfigError

SAMPLED = 256
"""Values of each parameter that are looked at, about."""
WRAPPERS = ("DistributedDataParallel", "DeepSpeedEngine")


class BorrowedModel:
    """A trainer's model, and the DeepSpeed engine around it if there is one."""

    def __init__(self, model: PreTrainedModel, trainer: Any | None) -> None:
        self.model = model
        self._trainer = trainer
        self._is_partitioned = is_partitioned(model)
        self._tensors = ModelTensors(model)
        self.look()

    def look(self) -> None:
        """Take the weights as they are for seen."""
        self._mark, self._sample = self._counts(), self._some_values()

    def has_changed(self, closely: bool) -> bool:
        """Whether weights were written since :meth:`look`, as far as that shows.

        It shows in DeepSpeed's count of steps, and in torch's count of writes to each tensor, which leaves
        out those to ``parameter.data``; closely, it shows in some values of every parameter as well.
        """
        return self._counts() != self._mark or (closely and self._some_values() != self._sample)

    def commit(self, version: int) -> None:
        """The trainer writes its weights itself: there is nothing to do."""

    def refuse_layout(self, layout: str) -> None:
        """Raise :class:`ConfigError` when weights laid out anew would no longer be those of the trainer.

        ZeRO-1 and 2 keep them as views of one flat buffer, ZeRO-3 in parts. Packed copies would be of the
        weights before the trainer's next step.
        """
        if layout == "packed":
            raise ConfigError(
                "engine.linear_layout 'packed' would copy weights that their trainer changes; leave it at "
                "'auto'"
            )
        is_in_pieces = self._is_partitioned or any(
            parameter.untyped_storage().nbytes() > parameter.nbytes for parameter in self.model.parameters()
        )
        if layout == "transposed" and is_in_pieces:
            raise ConfigError(
                "engine.linear_layout 'transposed' would take the weights out of their trainer's buffers; "
                "leave it at 'auto'"
            )

    def _counts(self) -> Hashable:
        steps = getattr(self._trainer, "global_steps", None)
        if self._is_partitioned:
            return steps
        parameters = (tensor for tensor in self._tensors() if isinstance(tensor, torch.nn.Parameter))
        return steps, sum(parameter._version for parameter in parameters if not parameter.is_inference())

    def _some_values(self) -> bytes:
        """Of every parameter, or of this rank's part of it: a step of training changes some of them."""
        parts = [getattr(p, "ds_tensor", p).detach() for p in self.model.parameters()]
        dense = [part if part.is_contiguous() or part.dim() != 2 else part.t() for part in parts]
        values = [part.flatten()[:: max(1, part.numel() // SAMPLED)].double() for part in dense]
        found: bytes = torch.cat(values).cpu().numpy().tobytes()
        return found


def borrow(given: Any) -> BorrowedModel:
    """The model inside a DeepSpeed engine, DDP or ``torch.compile``, or given as it is.

    Raises :class:`ConfigError` for anything else.
    """
    inner, trainer = given, None
    while not isinstance(inner, PreTrainedModel):
        if type(inner).__name__ == "DeepSpeedEngine":
            trainer = inner
        if isinstance(getattr(inner, "_orig_mod", None), torch.nn.Module):
            inner = inner._orig_mod
        elif type(inner).__name__ in WRAPPERS:
            inner = inner.module
        else:
            raise ConfigError(
                f"an engine serves a folder, a name or a PreTrainedModel, bare or in a DeepSpeed engine, DDP "
                f"or torch.compile; got {type(inner).__name__}"
            )
    return BorrowedModel(inner, trainer or _trainer_of(inner))


def _trainer_of(model: torch.nn.Module) -> Any | None:
    """The DeepSpeed engine around a bare module: its hooks on the module refer to it."""
    for hook in model._forward_pre_hooks.values():
        for cell in getattr(hook, "__closure__", None) or ():
            if type(cell.cell_contents).__name__ == "DeepSpeedEngine":
                return cell.cell_contents
    return None
