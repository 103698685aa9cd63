"""Whether what was loaded is the whole checkpoint: no tensor missing, left over, misshapen or broken.

Transformers fills a missing tensor with random numbers and only warns; samples of such a model are noise
that looks like text.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout_pool.actors.weights import is_finite
from rollout_pool.errors import ConfigError

REPORTERS = ("transformers.modeling_utils", "transformers.utils.loading_report")


def load_whole(name: str, **options: Any) -> PreTrainedModel:
    """``AutoModelForCausalLM.from_pretrained``, from safetensors only and with nothing made up.

    Raises :class:`ConfigError` that names a tensor which is missing, does not fit, or is not finite, and
    what Transformers raises.
    """
    with _without_report():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True, **options
        )
    model: PreTrainedModel = loaded[0]
    report: dict[str, Any] = loaded[1]
    fault = _misfit(model, report) or broken_weight(model)
    if fault is not None:
        raise ConfigError(f"cannot load model {name!r}: {fault}")
    return model


def broken_weight(model: torch.nn.Module) -> str | None:
    """What to say of the first parameter that holds NaN or infinity; None when all are finite."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if not is_finite(local.detach()):
            return f"{name} holds NaN or infinity; use an earlier checkpoint, or save this one again"
    return None


def _misfit(model: PreTrainedModel, report: Mapping[str, Any]) -> str | None:
    remedy = "the checkpoint is incomplete, or its config.json belongs to another: copy or download it again"
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, there, here = mismatched[0]
        return (
            f"{name} has shape {list(there)}, by config.json it is {list(here)}{_more(mismatched)}; {remedy}"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        return f"it has no {missing[0]}{_more(missing)}; {remedy}"
    surplus = _surplus(model, report["unexpected_keys"])
    if surplus:
        return f"it has {surplus[0]}{_more(surplus)}, for which config.json has no layer; {remedy}"
    return None


def _surplus(model: PreTrainedModel, unexpected: set[str]) -> list[str]:
    """Tensors of a further layer or expert. Others (of a vision tower, say) are rightly left out."""
    if getattr(model.config.get_text_config(decoder=True), "num_nextn_predict_layers", None):
        return []  # layers that only training uses
    kinds = {_kind(name) for name in model.state_dict()}
    return sorted(name for name in unexpected if re.search(r"\.\d+\.", name) and _kind(name) in kinds)


def _kind(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".#", name)


def _more(found: list[Any]) -> str:
    return f" (and {len(found) - 1} more such)" if len(found) > 1 else ""


@contextlib.contextmanager
def _without_report() -> Iterator[None]:
    """Keep Transformers' table of such tensors out of the log: what is wrong in it is raised here."""

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    loggers = [logging.getLogger(name) for name in REPORTERS]
    for logger in loggers:
        logger.addFilter(is_other)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_other)
