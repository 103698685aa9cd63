"""How long an engine that pretends takes for what it does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds. A decode step of ``rows`` rows takes ``step_s + rows * row_s``, whatever the rows hold."""

    num_slots: int
    """Rows that such an engine would be given."""
    step_s: float
    row_s: float
    prompt_token_s: float
    """Per prompt token; a prefill holds up the decode steps of its engine."""
    call_s: float = 0.001
    """A call's way to an actor, by Ray."""
    start_s: float = 30.0
    """From the start of a process until its model is loaded."""
    stage_s: float = 2.0
    """To read and check new weights, while the engine goes on."""
    commit_s: float = 0.5
    """To write them, while it stands still."""

    def of_step(self, rows: int) -> float:
        """One decode step."""
        return self.step_s + rows * self.row_s


CPU_MEASURED = Latency(num_slots=64, step_s=0.0927, row_s=0.0038, prompt_token_s=0.0038)
"""SmolLM2-135M on one CPU thread: a straight line through the steps of 8 and 64 rows after 128 tokens in
docs/results.md (123.1 and 336.1 ms). A prompt token is taken to cost what a row does."""

GPU_ASSUMED = Latency(num_slots=64, step_s=0.015, row_s=0.00005, prompt_token_s=0.00002)
"""Made up, not measured: a GPU whose step hardly depends on its rows, 18.2 ms at 64 (3,500 tokens/s)."""

PRESETS = {"cpu": CPU_MEASURED, "gpu": GPU_ASSUMED}
