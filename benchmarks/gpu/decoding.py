"""Part d: decode speed of random models of about 1B and 7B parameters, ours beside Hugging Face's.

The time of a step is (time for all new tokens - time for one) / (new tokens - 1), the same way for all, so
that prefill and set-up stay out. Its limit is what the memory allows: weights and KV, read once, at the
bandwidth of the copy.
"""

from __future__ import annotations

from functools import partial

from gpu import contenders
from gpu.models import LARGE, LargeModels, Shape, decode_bytes
from gpu.parts import Row, Setting, Step
from gpu.timing import copy_bandwidth, wall_seconds
from gpu.watch import watched

ROWS = (256, 64, 16, 1)
PROMPT, NEW, ROUNDS = 128, 49, 2
OURS = ("ours, graphs", "ours, no graphs")
WAYS = (*OURS, "generate", "generate_batch")


class Field:
    """The models, and the one contender that is set up."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.models = setting, LargeModels(setting)
        self.rows = (3, 1) if setting.is_dry else ROWS
        self.prompt_length, self.new = (6, 4) if setting.is_dry else (PROMPT, NEW)
        self.bandwidth = 0.0
        self._ready: tuple[str, str] = ("", "")
        self._contender: contenders.Contender | None = None

    def contender(self, shape: Shape, way: str) -> contenders.Contender:
        """The contender, which stays until another one is asked for."""
        if self._contender is None or self._ready != (shape.name, way):
            before, self._contender = self._contender, None
            if before is not None:
                before.close()
            del before
            contenders.free_memory()
            self._contender, self._ready = self._set_up(shape, way), (shape.name, way)
        return self._contender

    def _set_up(self, shape: Shape, way: str) -> contenders.Contender:
        model, most_rows = self.models.get(shape), max(self.rows)
        random = self.setting.random("prompt")
        prompt = [random.randint(3, model.config.vocab_size - 1) for _ in range(self.prompt_length)]
        if way == "generate":
            return contenders.generate(model, prompt, self.setting)
        if way == "generate_batch":
            return contenders.generate_batch(model, prompt, self.setting, most_rows, self.new)
        has_graphs = way == "ours, graphs"
        return contenders.engine(model, prompt, self.setting, most_rows, self.new, has_graphs)


def name_of(shape: Shape, rows: int, way: str) -> str:
    return f"{shape.name}, {rows} row{'s' if rows > 1 else ''}, {way}"


def measure(field: Field, shape: Shape, way: str, rows: int) -> list[Row]:
    name = name_of(shape, rows, way)
    try:
        return [_measure(field, shape, way, rows, name)]
    except Exception as error:
        if way in OURS:
            raise
        return [Row(name, f"failed: {' '.join(str(error).split())[:200]}")]  # a peer's fault is not ours


def _measure(field: Field, shape: Shape, way: str, rows: int, name: str) -> Row:
    setting, new = field.setting, field.new
    contender = field.contender(shape, way)
    field.bandwidth = field.bandwidth or copy_bandwidth(setting)
    with watched() as watch:
        contender.run(rows, new)  # compiles kernels, records graphs, fills the allocator's pools
    rounds = 1 if setting.is_dry else ROUNDS
    one, all_ = (
        min(wall_seconds(setting, partial(contender.run, rows, count)) for _ in range(rounds))
        for count in (1, new)
    )
    figures = {
        "model": shape.name, "rows": rows, "way": way, "new": new, "one_token_seconds": one,
        "all_tokens_seconds": all_, "replays": watch.replays, "warnings": watch.warnings,
    }  # fmt: skip
    if all_ <= one:
        return Row(name, f"too short to time{watch.text()}", None, figures)
    step = (all_ - one) / (new - 1)
    limit = decode_bytes(field.models.get(shape), rows, field.prompt_length + new // 2) / field.bandwidth
    figures |= {"tokens_per_second": rows / step, "step_seconds": step, "fraction": limit / step}
    rate = f"{rows / step:,.0f} tokens/s"
    seen = f"{rate} ({step * 1e3:.2f} ms a step, {limit / step:.0%} of the memory-bound limit){watch.text()}"
    return Row(name, seen, None, figures)


def steps(setting: Setting) -> list[Step]:
    """Ours first, so that what a short budget leaves out is a peer."""
    field = Field(setting)
    return [
        Step(name_of(shape, rows, way), partial(measure, field, shape, way, rows))
        for way in WAYS
        for shape in LARGE
        for rows in field.rows
    ]
