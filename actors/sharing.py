"""Whether the samples of a group share their prompt's KV, or get a copy each. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LEAST_ROWS = 4
LEAST_SAVED = 1024
"""Cells that sharing must spare a step to be worth its own work: see :func:`pays`."""


def pays(prompt_tokens: int, num_rows: int) -> bool:
    """Whether decode steps on a CPU are faster when ``num_rows`` rows share their prompt's KV.

    Copies cost a step ``num_rows * prompt_tokens`` cells to read, sharing ``prompt_tokens`` and some work
    that does not depend on the prompt: a call for every group and layer, and the sum of two attentions.
    ``docs/prefix.md`` has the measurements behind the two numbers.
    """
    return num_rows >= LEAST_ROWS and (num_rows - 1) * prompt_tokens >= LEAST_SAVED


@dataclass
class Sharing:
    """Decides for each group when it starts, and keeps account of the prompts that are shared.

    Args:
        mode: ``expand`` never shares, ``shared`` always, ``auto`` where it must or where it pays.
        num_slots: rows that may decode at once.
        slot_length: cells per slot. A row that would need more must share its prompt.
        prompt_tokens: of all prompts that are shared at the same time.
        by_cost: whether :func:`pays` is asked. Off, ``auto`` only shares where it must.
    """

    mode: Literal["expand", "shared", "auto"]
    num_slots: int
    slot_length: int
    prompt_tokens: int
    by_cost: bool = True
    _held: dict[int, int] = field(default_factory=dict)

    @property
    def num_held(self) -> int:
        """Tokens of the prompts that are shared now."""
        return sum(self._held.values())

    def decide(self, group_id: int, prompt_tokens: int, new_tokens: int, num_samples: int) -> bool | None:
        """True: this group shares its prompt, and takes its part of ``prompt_tokens`` until :meth:`release`.

        False: it does not. None: it must share and has to wait for room; never when no prompt is shared, so
        that there is always something to wait for.
        """
        if self.mode == "expand":
            return False
        must = self.mode == "shared" or prompt_tokens + new_tokens > self.slot_length
        num_rows = min(num_samples, self.num_slots)
        if not must and not (self.by_cost and pays(prompt_tokens, num_rows)):
            return False
        fits = self.num_held + prompt_tokens <= self.prompt_tokens
        if fits or (must and not self._held):
            self._held[group_id] = prompt_tokens
            return True
        return None if must else False

    def release(self, group_id: int) -> None:
        """No row of this group sits any more, and none waits for a slot."""
        self._held.pop(group_id, None)
