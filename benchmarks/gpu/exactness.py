"""Part b: the engine's greedy tokens are those of ``generate``, and strict samples do not see their batch.

Everything in float32 without TF32. Prompts have different lengths, some shorter and some longer than the
sliding window; there are fewer slots than samples, so rows are refilled, and moved together at the tail.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from gpu.models import FAMILIES, small_model
from gpu.parts import Row, Setting, Step
from gpu.watch import watched
from rollout_pool import Engine, EngineConfig, RolloutGroup, RolloutRequest, SamplingParams

LENGTHS = (1, 5, 130, 33, 300, 70)
SAMPLES = (2, 1, 1, 2, 1, 1)
DRY_LENGTHS = (1, 5, 17, 9)
WAYS: tuple[tuple[str, int | None, str], ...] = (
    ("auto", None, "ragged"),
    ("off", None, "ragged"),
    ("auto", 1, "ragged"),
    ("off", 1, "ragged"),
    ("auto", None, "aligned"),
)
"""CUDA graphs, steps between read-backs, layout."""


class Case:
    """A model with its prompts, and the tokens of single-row ``generate`` for them."""

    def __init__(self, setting: Setting, family: str) -> None:
        self.setting, self.family = setting, family
        self.new = 12 if setting.is_dry else 40
        self.least_distinct = 8 if setting.is_dry else 40
        random = setting.random(f"{family}, prompts")
        lengths = DRY_LENGTHS if setting.is_dry else LENGTHS
        high = 159 if setting.is_dry else 1_999
        self.prompts = [[random.randint(3, high) for _ in range(length)] for length in lengths]
        self.max_length = max(lengths) + self.new
        self._model: PreTrainedModel | None = None
        self._expected: list[list[int]] = []

    @property
    def model(self) -> PreTrainedModel:
        if self._model is None:
            self._model = small_model(self.setting, self.family)
        return self._model

    def expected(self) -> list[list[int]]:
        for prompt in self.prompts[len(self._expected) :]:
            ids = torch.tensor([prompt], device=self.setting.device)
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=self.new,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            self._expected.append(out[0, len(prompt) :].tolist())
        return self._expected

    def engine(self, **config: Any) -> Engine:
        return Engine(self.model, EngineConfig(max_length=self.max_length, **config))

    @torch.no_grad()
    def gap(self, prompt: list[int], tokens: list[int]) -> float:
        """How far apart the two largest logits are after these tokens."""
        ids = torch.tensor([prompt + tokens], device=self.setting.device)
        best = self.model(input_ids=ids).logits[0, -1].float().topk(2).values
        return float(best[0] - best[1])


def name_of(case: Case, graphs: str, readback: int | None, layout: str) -> str:
    name = f"{case.family}: graphs {graphs}, read-back {readback or 'default'}"
    return name if layout == "ragged" else f"{name}, layout {layout}"


def check_greedy(case: Case, graphs: str, readback: int | None, layout: str) -> list[Row]:
    """Token for token, and with tokens that keep changing, so that equal ones mean something."""
    name = name_of(case, graphs, readback, layout)
    expected = case.expected()
    requests = [
        RolloutRequest(prompt, SamplingParams(n=n, temperature=0, max_new_tokens=case.new, ignore_eos=True))
        for prompt, n in zip(case.prompts, SAMPLES, strict=False)
    ]
    with watched() as watch:
        engine = case.engine(num_slots=4, cuda_graphs=graphs, readback_every=readback, layout=layout)
        groups = engine.generate(requests)
    pairs = [
        (prompt, tokens, sample.token_ids.tolist())
        for prompt, tokens, group in zip(case.prompts, expected, groups, strict=True)
        for sample in group.samples
    ]
    equal, wanted = (
        sum(got == tokens for _, tokens, got in pairs),
        sum(request.sampling.n for request in requests),
    )
    distinct = len({token for tokens in expected for token in tokens})
    seen = f"{equal} of {wanted} samples equal generate's, {distinct} distinct tokens{watch.text()}"
    seen += next((_divergence(case, *pair) for pair in pairs if pair[1] != pair[2]), "")
    seen += next((f"; error: {group.error}" for group in groups if group.error), "")
    holds = equal == wanted and distinct >= case.least_distinct
    figures = {"stats": asdict(engine.stats()), "replays": watch.replays, "warnings": watch.warnings}
    return [Row(name, seen, holds, figures)]


def _divergence(case: Case, prompt: list[int], expected: list[int], got: list[int]) -> str:
    """Where the first difference is, and how close the logits of the two best tokens were there."""
    pairs = enumerate(zip(got, expected, strict=False))
    at = next((i for i, (one, other) in pairs if one != other), min(len(got), len(expected)))
    gap = case.gap(prompt, expected[:at])
    return f"; first difference: prompt of {len(prompt)}, new token {at}, best logits {gap:.1e} apart"


def check_strict(case: Case) -> list[Row]:
    """Samples in one call against other batches of the same: tokens and log-probabilities, bit for bit."""
    engine = case.engine(num_slots=6, deterministic="strict")
    sampling = SamplingParams(n=4, max_new_tokens=case.new // 2, seed=case.setting.seed % 2**31)
    half = sampling.model_copy(update={"n": 2})
    requests = [RolloutRequest(prompt, request_id=f"p{i}") for i, prompt in enumerate(case.prompts)]
    second = [RolloutRequest(r.prompt, request_id=r.request_id, sample_offset=2) for r in requests]
    shuffled = case.setting.random(f"{case.family}, order").sample(requests, len(requests))
    base = _bits(engine.generate(requests, sampling))
    others = {
        "shuffled prompts": engine.generate(shuffled, sampling),
        "n=4 as 2 + 2": engine.generate(requests, half) + engine.generate(second, half),
        "one prompt alone": engine.generate(requests[:1], sampling),
    }
    rows = []
    for name, groups in others.items():
        got = _bits(groups)
        equal = sum(bits == base.get(key) for key, bits in got.items())
        wanted = 4 if "alone" in name else len(base)
        row = f"{case.family}: strict, {name}"
        holds = equal == len(got) == wanted
        rows.append(Row(row, f"{equal} of {wanted} samples have equal bits", holds, {"equal": equal}))
    return rows


def _bits(groups: list[RolloutGroup]) -> dict[tuple[Any, int], tuple[bytes, ...]]:
    return {
        (group.request_id, sample.sample_index): (
            sample.token_ids.tobytes(), sample.logprobs.tobytes(), sample.sampling_logprobs.tobytes()
        )
        for group in groups
        for sample in group.samples
    }  # fmt: skip


def steps(setting: Setting) -> list[Step]:
    made = []
    for family in FAMILIES:
        case = Case(setting, family)
        for way in WAYS:
            made.append(Step(name_of(case, *way), partial(check_greedy, case, *way)))
        made.append(Step(f"{family}: strict", partial(check_strict, case)))
    return made
