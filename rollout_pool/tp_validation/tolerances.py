"""How much may differ, by dtype: the defaults, and what the command line changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from rollout_pool.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tolerances:
    """The largest figures that pass in one dtype. What is equal by construction has no tolerance."""

    states_max: float
    """Largest relative difference of hidden states and logits (:meth:`Difference.relative`)."""
    states_mean: float
    """Mean of them."""
    greedy_gap: float
    """Where greedy tokens part: the gap of the two largest logits, in the run where it is wider."""
    logprobs_max: float
    """Largest difference of a token's log-probability from a teacher-forced forward, in nats."""
    logprobs_mean: float
    prefill_logprobs: float
    """Largest difference of a log-probability between shared and separate prefill, in nats."""


DEFAULTS = {
    "float32": Tolerances(1e-3, 1e-5, 1e-3, 5e-4, 5e-5, 1e-4),
    "float16": Tolerances(0.1, 0.01, 0.1, 0.2, 0.02, 0.02),
    "bfloat16": Tolerances(0.5, 0.05, 0.5, 1.0, 0.1, 0.1),
}
NAMES = tuple(field.name for field in dataclasses.fields(Tolerances))


def parse_tolerances(settings: Iterable[str]) -> dict[str, Tolerances]:
    """The defaults, changed by ``NAME=VALUE`` (for every dtype) and ``DTYPE.NAME=VALUE``.

    Raises :class:`ConfigError` for what is not one of these.
    """
    found = dict(DEFAULTS)
    for setting in settings:
        key, equals, value = setting.partition("=")
        dtype, dot, name = key.rpartition(".")
        if not equals or name not in NAMES or (dot and dtype not in found):
            raise ConfigError(
                f"--tolerance {setting}: expected [DTYPE.]NAME=VALUE with DTYPE one of "
                f"{', '.join(found)} and NAME one of {', '.join(NAMES)}"
            )
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if not limit >= 0:
            raise ConfigError(f"--tolerance {setting}: {value!r} is not a number from 0 upwards")
        for one in [dtype] if dot else list(found):
            found[one] = dataclasses.replace(found[one], **{name: limit})
    return found
