"""A model whose parameters DeepSpeed's ZeRO-3 has split over the ranks of a trainer.

Such a parameter has no data of its own between forwards: ``numel`` is 0, ``ds_shape`` and ``ds_numel`` tell
what it is. There are two ways to run the model, and in both each rank has prompts of its own.

``layers``: DeepSpeed's hooks gather each layer before it runs and free it afterwards. A gather is a
collective, so all ranks must run the same number of forwards. Before each, a rank tells the others by one
small all-reduce that it has a forward to run, and one that has none runs a dummy along with them, until
nobody has any. A prefill and a decode step are the same to DeepSpeed: all layers in their order.

``whole``: everything is gathered once for a rollout and freed after it, with DeepSpeed's hooks out of the way
meanwhile. No forward is a collective then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import distributed

from rollout_pool.errors import ConfigError, RolloutPoolError

Gather = Literal["layers", "whole"]
HOOKS_OF = "deepspeed.runtime.zero.parameter_offload"
"""Where the hooks are that gather and free parameters."""
IDLE, BUSY = 0, 1


def is_partitioned(model: torch.nn.Module) -> bool:
    """Whether ZeRO-3 holds parameters of ``model``."""
    return any(hasattr(parameter, "ds_numel") for parameter in model.parameters())


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of a parameter, gathered or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def held_bytes(parameter: torch.Tensor) -> int:
    """Bytes that this process holds of a parameter between forwards: its part of a partitioned one."""
    part = getattr(parameter, "ds_tensor", parameter)  # ZeRO-3's
    part = part.to_local() if hasattr(part, "to_local") else part  # a tensor-parallel rank's
    return int(part.nbytes)


def full_bytes(parameter: torch.Tensor) -> int:
    """Bytes of the whole parameter."""
    return int(getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size())


class Partitioned:
    """Runs one partitioned model, and leaves it and DeepSpeed's record of it as they were."""

    def __init__(self, model: torch.nn.Module, gather: Gather, device: torch.device) -> None:
        self.gather = gather
        self.num_forwards = 0
        """Of this rank in collective sections, dummies included; in ``layers`` the same on all ranks."""
        self.num_dummies = 0
        self._model = model
        parameters: list[Any] = [p for p in model.parameters() if hasattr(p, "ds_numel")]
        self._group = parameters[0].ds_process_group
        self._device = device
        self._depth = 0
        self._is_inside_forward = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """A collective section: every rank goes through as many of them, with as many forwards as it has.

        It ends on all ranks at the same time, also on one that raises, unless that was within a forward.
        Sections may be nested; the outermost counts.
        """
        if self._depth:
            yield
            return
        self._depth += 1
        self._is_inside_forward = False
        try:
            with self._whole() if self.gather == "whole" else self._layers():
                yield
        finally:
            self._depth -= 1

    def run(self, arguments: dict[str, Any]) -> Any:
        """One forward of the model, within :meth:`together`."""
        if not self._depth:
            raise RuntimeError("a partitioned model is run by all ranks at the same time: use together()")
        if self._is_inside_forward:
            raise RuntimeError("a forward has failed half-way; the ranks of the trainer are out of step")
        if self.gather == "layers":
            self._tell(BUSY)
        return self._forward(arguments)

    def agree(self, error: RolloutPoolError | None, what: str) -> None:
        """Raise when any rank has an error: its own on that rank, on the others that there is one."""
        is_bad = self._tell(BUSY if error is not None else IDLE)
        if error is not None:
            raise error
        if int(is_bad):
            raise ConfigError(f"another rank of the trainer could not {what}; its own error says why")

    def any_rank(self, value: bool) -> bool:
        """Whether ``value`` is true on any rank. Collective."""
        return bool(int(self._tell(BUSY if value else IDLE)))

    def _tell(self, state: int) -> torch.Tensor:
        """The largest state of all ranks, on the device: reading it waits."""
        told = torch.full((1,), state, dtype=torch.int64, device=self._device)
        distributed.all_reduce(told, op=distributed.ReduceOp.MAX, group=self._group)
        return told

    def _forward(self, arguments: dict[str, Any]) -> Any:
        self._is_inside_forward = True
        out = self._model(**arguments)
        self._is_inside_forward = False
        self.num_forwards += 1
        return out

    def _finish(self) -> None:
        """Run dummies until no rank has a forward left."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        while int(self._tell(IDLE)) == BUSY:
            self._forward({"input_ids": token, "use_cache": False})
            self.num_dummies += 1

    @contextmanager
    def _layers(self) -> Iterator[None]:
        before = _Bookkeeping(self._model)
        try:
            try:
                yield
            finally:
                if not self._is_inside_forward:
                    self._finish()
        finally:
            before.restore(was_cut=self._is_inside_forward)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        import deepspeed

        with (
            _without_hooks(self._model),
            deepspeed.zero.GatheredParameters(list(self._model.parameters())),
        ):
            yield


class _Bookkeeping:
    """What DeepSpeed notes of forwards, for the backward passes that follow in training.

    None follows here: what is counted is put back. A forward that was cut off leaves more behind: its place
    in the stack of modules, and layers gathered for it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        from deepspeed.runtime.zero import parameter_offload

        self._model = model
        self._stack: list[torch.nn.Module] = parameter_offload.FWD_MODULE_STACK
        self._depth = len(self._stack)
        counts = ((module, vars(module).get("applied_pre_backward_ref_cnt")) for module in model.modules())
        self._counts = list(counts)
        self._in_forward = [
            (places, places._in_forward)
            for places in (module._parameters for module in model.modules())
            if hasattr(places, "_in_forward")
        ]

    def restore(self, was_cut: bool) -> None:
        del self._stack[self._depth :]
        for module, count in self._counts:
            if count is not None:
                module.applied_pre_backward_ref_cnt = count
            else:
                vars(module).pop("applied_pre_backward_ref_cnt", None)
        for places, value in self._in_forward:
            places._in_forward = value
        self._release_fetched()
        if was_cut:
            self._release_active()

    def _release_fetched(self) -> None:
        """Free what was gathered ahead for layers that did not come: it would outlive a change of weights."""
        fetched: dict[Any, Any] = getattr(self._model, "ds_inflight_param_registry", {})
        for parameter, handle in list(fetched.items()):
            handle.wait()
            if not parameter.ds_active_sub_modules:
                parameter.partition()
        fetched.clear()

    def _release_active(self) -> None:
        parameters: list[Any] = list(self._model.parameters())
        for parameter in parameters:
            if hasattr(parameter, "ds_numel"):
                parameter.ds_active_sub_modules.clear()
                if parameter.ds_status.name == "AVAILABLE" and not parameter.ds_persist:
                    parameter.partition()


@contextmanager
def _without_hooks(model: torch.nn.Module) -> Iterator[None]:
    """Within this context DeepSpeed neither gathers nor frees; each hook comes back to its place."""
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    found: list[tuple[dict[int, Callable[..., Any]], list[tuple[int, Callable[..., Any]]]]] = []
    for module in model.modules():
        for hooks in (getattr(module, kind) for kind in kinds):
            everything = list(hooks.items())
            ours = [key for key, hook in everything if _is_deepspeeds(hook)]
            if ours:
                found.append((hooks, everything))
                for key in ours:
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, everything in found:
            added = {key: hook for key, hook in hooks.items() if key not in dict(everything)}
            hooks.clear()
            hooks.update(everything)
            hooks.update(added)


def _is_deepspeeds(hook: Callable[..., Any]) -> bool:
    """Whether ZeRO-3 has placed this hook; some are wrapped by a function of another module."""
    cells = getattr(hook, "__closure__", None) or ()
    wrapped = [cell.cell_contents for cell in cells if callable(cell.cell_contents)]
    return any(getattr(function, "__module__", None) == HOOKS_OF for function in (hook, *wrapped))
