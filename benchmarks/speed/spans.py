"""Where an engine's steps spend their time: spans around its own functions, which nest.

A span's own time is what its inner spans leave of it, so the parts of a step add up to the step.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rollout_pool.actors.attention import NAME

PROMPT = "prompts"
STEP = "scheduling"
"""What a step does besides all that has a span of its own."""


class Spans:
    """Spans of one thread. ``own`` is the seconds of each part, ``events`` the spans themselves."""

    def __init__(self, max_events: int = 50_000) -> None:
        self.own: Counter[str] = Counter()
        self.events: list[tuple[str, float, float]] = []
        self.is_on = False
        self._max_events = max_events
        self._open: list[tuple[str, float]] = []
        self._mark = 0.0

    def begin(self, part: str) -> None:
        if not self.is_on:
            return
        now = perf_counter()
        if self._open:
            self.own[self._part()] += now - self._mark
        self._open.append((part, now))
        self._mark = now

    def end(self) -> None:
        if not self.is_on or not self._open:
            return
        now = perf_counter()
        self.own[self._part()] += now - self._mark
        part, start = self._open.pop()
        if len(self.events) < self._max_events:
            self.events.append((part, start, now))
        self._mark = now

    def _part(self) -> str:
        """The innermost part; all that computes a prompt is one part."""
        return PROMPT if any(part == PROMPT for part, _ in self._open) else self._open[-1][0]

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with a span around each call."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.begin(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.end()

        return timed

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """A span around a method of one object."""
        setattr(owner, name, self.around(part, getattr(owner, name)))

    def write(self, path: Path) -> None:
        """A trace that Perfetto and chrome://tracing open (Trace Event Format, complete events)."""
        origin = min((start for _, start, _ in self.events), default=0.0)
        events = [
            {"name": name, "cat": "engine", "ph": "X", "pid": 0, "tid": 0,
             "ts": round(1e6 * (start - origin), 1), "dur": round(1e6 * (end - start), 1)}
            for name, start, end in sorted(self.events, key=lambda event: event[1])
        ]  # fmt: skip
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def watch(engine: Any) -> Spans:
    """Put spans around what an engine's steps are made of. They stay for the life of the process."""
    spans = Spans()
    batch = engine.batch
    worker, rows, runner = batch.worker, batch.rows, batch.worker.runner
    spans.wrap(engine, "_advance", STEP)
    for name in ("prefill", "prefill_together"):
        spans.wrap(runner, name, PROMPT)
    spans.wrap(runner, "decode", "other in the forward")
    for name in ("expand", "move", "trim", "clear"):
        spans.wrap(worker.cache, name, "cache moves")
    spans.wrap(rows, "move", "cache moves")
    for name in ("deliver", "deliver_ready", "look"):
        spans.wrap(batch.seating, name, "results to the host")
    drawing = rows.drawing
    rows.drawing = lambda *args: spans.around("sampling", drawing(*args))
    for layer in worker.cache.layers:
        if hasattr(layer, "keys"):
            spans.wrap(layer, "update", "KV written")
    for module in linears(runner.model):
        module.register_forward_pre_hook(lambda *_: spans.begin("matrix products"))
        module.register_forward_hook(lambda *_: spans.end())
    ALL_ATTENTION_FUNCTIONS.register(NAME, spans.around("attention", ALL_ATTENTION_FUNCTIONS[NAME]))
    return spans


def linears(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers that are matrix products, whatever class computes them."""
    return [
        module
        for module in model.modules()
        if getattr(module, "in_features", None) and getattr(module, "out_features", None)
    ]
