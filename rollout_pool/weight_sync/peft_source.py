"""LoRA adapters of a PEFT model: what to send, and what to add where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rollout_pool.actors.weight_records import LoraRecord
from rollout_pool.errors import ConfigError

PREFIX = "base_model.model."
"""What a ``PeftModel`` puts before the names of the model inside."""


def has_adapters(module: torch.nn.Module) -> bool:
    """Whether PEFT has been at ``module``."""
    return bool(getattr(module, "peft_config", None))


def adapters(module: torch.nn.Module) -> tuple[tuple[LoraRecord, ...], list[tuple[str, torch.Tensor]]]:
    """What to merge, and the tensors for it: A and B of active adapters, and weights trained as a whole.

    Raises :class:`ConfigError` for adapters other than plain LoRA on linear layers: they could not be merged.
    """
    loras: list[LoraRecord] = []
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in module.named_modules():
        kind = _kind(layer)
        if kind == "lora":
            for lora, a, b in _factors(plain_name(name), layer):
                loras.append(lora)
                tensors |= {lora.a: a, lora.b: b}
        elif kind == "whole":
            (adapter,) = layer.active_adapters
            trained: torch.nn.Module = layer.modules_to_save[adapter]
            tensors |= {f"{plain_name(name)}.{end}": value for end, value in trained.named_parameters()}
    if not loras:
        raise ConfigError("this PEFT model has no active LoRA adapter: enable one, or merge and unload it")
    tensors |= dict(_trained_bases(module))
    return tuple(loras), list(tensors.items())


def plain_name(name: str) -> str:
    """The name that a module or weight has in the model without PEFT."""
    return name.removeprefix(PREFIX).replace(".base_layer", "")


def _kind(layer: torch.nn.Module) -> str:
    from peft.tuners.lora.layer import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    if isinstance(layer, ModulesToSaveWrapper):
        return "whole"
    if isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper):
        kind: type = type(layer)
        if kind is not Linear:  # its subclasses are quantized, or otherwise no plain product
            what = f"{kind.__module__}.{kind.__name__}"
            raise ConfigError(f"only LoRA on plain linear layers can be merged on arrival, not {what}")
        return "lora"
    return ""


def _factors(name: str, layer: Any) -> Iterator[tuple[LoraRecord, torch.Tensor, torch.Tensor]]:
    for adapter in layer.active_adapters if not layer.disable_adapters else ():
        if adapter not in layer.lora_A:
            continue
        if layer.lora_variant.get(adapter) is not None or layer.lora_bias.get(adapter):
            raise ConfigError(f"adapter {adapter!r} of {name} is no plain LoRA (DoRA, a bias, ...)")
        stem = f"{name}.weight"
        lora = LoraRecord(
            target=stem,
            a=f"{stem}.lora_A.{adapter}",
            b=f"{stem}.lora_B.{adapter}",
            scaling=float(layer.scaling[adapter]),
            is_transposed=bool(layer.fan_in_fan_out),
        )
        yield lora, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight


def _trained_bases(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Weights beside the adapters that are trained, too: biases, say."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not any(part in name for part in ("lora_", ".modules_to_save.")):
            yield plain_name(name), parameter
