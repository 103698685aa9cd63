"""Part a: every kernel against its reference, on fresh random inputs between poisoned cells."""

from __future__ import annotations

from gpu import attention, moves, sampling
from gpu.parts import Setting, Step


def steps(setting: Setting) -> list[Step]:
    """Quick ones first: what is new to compile takes most of the time."""
    return [*moves.steps(setting), *sampling.steps(setting), *attention.steps(setting)]
