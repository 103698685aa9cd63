"""Logits that are not finite fail their sample where it is, in every way of drawing; masked ids are no fault."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from rollout_pool import Engine, EngineConfig, RolloutRequest, SamplingParams
from rollout_pool.actors import assembly
from rollout_pool.actors.tape import TapeRecorder, one_operation
from rollout_pool.kernels import ops

NAN, INF = float("nan"), float("inf")
NEW = 12
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8, "temperature": 1.5},
    "min-p": {"min_p": 0.05, "temperature": 1.5},
    "penalty": {"repetition_penalty": 1.3, "min_new_tokens": 3},
    "greedy penalty": {"repetition_penalty": 0.8, "temperature": 0},
}
FAULTS = {
    "nan": (slice(None), NAN),
    "one nan": (7, NAN),
    "infinity": (7, INF),
    "all minus infinity": (slice(None), -INF),
}
MODES: dict[str, dict[str, Any]] = {"ragged": {}, "taped": {}, "aligned": {"layout": "aligned"}}


class Switch:
    """Breaks a model's logits wherever the token before is ``token``, in operations that a tape can record."""

    def __init__(self, model: Any, masked: torch.Tensor) -> None:
        self.armed = torch.zeros((), dtype=torch.bool)
        self.token = torch.zeros((), dtype=torch.int64)
        self.fault: tuple[Any, float] = FAULTS["nan"]
        self._masked = masked
        model.model.embed_tokens.register_forward_hook(self._see)
        model.lm_head.register_forward_hook(self._break)

    def _see(self, module: Any, args: Any, output: Any) -> None:
        self._ids = args[0]

    def _break(self, module: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        ids = self._ids[:, -logits.shape[1] :].unsqueeze(-1)
        place, value = self.fault
        where = torch.zeros(logits.shape[-1], dtype=torch.bool)
        where[place] = True
        logits = logits.masked_fill(self._masked, -INF)
        return logits.masked_fill(where & (ids == self.token) & self.armed, value)


@pytest.fixture
def model(build: Any, small_config: Any) -> Any:
    return build(LlamaConfig(**small_config()))


def requests(last: int) -> list[RolloutRequest]:
    rows = [
        RolloutRequest(
            prompt,
            SamplingParams(n=2, max_new_tokens=NEW, ignore_eos=True, seed=4, **way),
            request_id=f"{name}/{prompt[0]}",
        )
        for name, way in WAYS.items()
        for prompt in ([11, 12, 13], [21, 22])
    ]
    return [
        *rows,
        RolloutRequest([9, last], SamplingParams(max_new_tokens=NEW, ignore_eos=True), request_id="first"),
    ]


@pytest.mark.parametrize("mode", MODES)
def test_a_sample_whose_logits_break_ends_there_and_reaches_no_other(
    mode: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked = torch.arange(160) % 3 == 2  # ids that may never be drawn: minus infinity is no fault there
    switch = Switch(model, masked)
    if mode == "taped":
        monkeypatch.setattr(assembly, "recorder_for", lambda *_: TapeRecorder())
        monkeypatch.setattr(ops, "sample_tokens", one_operation(ops.sample_tokens))

    def run(token: int) -> dict[Any, Any]:
        engine = Engine(model, EngineConfig(num_slots=9, max_length=24, **MODES[mode]))
        switch.token.fill_(token)
        switch.armed.fill_(token > 0)
        groups = engine.generate(requests(token or 3))
        switch.armed.fill_(False)
        return {group.request_id: group for group in groups}

    sound = run(0)
    assert all(group.error is None for group in sound.values())
    samples = {
        (name, sample.sample_index): sample for name, group in sound.items() for sample in group.samples
    }
    assert not any(masked[sample.token_ids].any() for sample in samples.values())
    inner = Counter(token for sample in samples.values() for token in set(sample.token_ids[1:-1].tolist()))
    token = next(token for token, count in inner.most_common() if 3 <= count <= len(samples) // 2)
    for fault in FAULTS.values():
        switch.fault = fault
        broken = run(token)
        first = broken.pop("first")
        assert "request 'first': sample 0: the logits are not finite at new token 1," in str(first.error)
        assert (first.samples[0].finish_reason, first.samples[0].token_ids.size) == ("error", 0)
        for name, group in broken.items():
            faulty = []
            for sample in group.samples:
                wanted = samples[name, sample.sample_index].token_ids
                ends = np.flatnonzero(wanted[:-1] == token)
                if ends.size:
                    faulty.append(
                        f"request '{name}': sample {sample.sample_index}: the logits are not finite at new token {ends[0] + 2}"
                    )
                    wanted = wanted[: ends[0] + 1]
                assert (sample.finish_reason == "error") == bool(ends.size), name
                np.testing.assert_array_equal(sample.token_ids, wanted)
                assert sample.logprobs.size == sample.token_versions.size == wanted.size
                assert np.isfinite(sample.logprobs).all()
            assert str(group.error).startswith(faulty[0]) if faulty else group.error is None


def test_a_mask_that_leaves_nothing_to_draw_is_a_fault_and_not_token_0(model: Any) -> None:
    """Only the end may be drawn, and ``min_new_tokens`` rules that out."""
    engine = Engine(model, EngineConfig(num_slots=2, max_length=24))
    switch = Switch(model, torch.arange(160) != 1)
    assert not switch.armed
    wanted = SamplingParams(max_new_tokens=4)
    impossible = [
        SamplingParams(max_new_tokens=4, min_new_tokens=2, temperature=t, top_k=k)
        for t in (0, 1)
        for k in (None, 3)
    ]
    groups = engine.generate([RolloutRequest([5, 6], sampling) for sampling in (wanted, *impossible)])
    assert groups[0].samples[0].token_ids.tolist() == [1]
    for group in groups[1:]:
        assert "at new token 1, or leave no token to draw" in str(group.error)
        assert group.samples[0].token_ids.size == 0
