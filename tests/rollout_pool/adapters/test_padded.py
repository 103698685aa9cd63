"""Padded tensors hold every token once, and nothing else counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_pool import Engine, EngineConfig, RequestError, RolloutGroup, Sample, SamplingParams
from rollout_pool.adapters.padded import PaddedBatch, PromptSide, pad_groups

TENSORS = (
    "input_ids", "attention_mask", "position_ids", "prompts", "responses", "response_mask", "logprobs",
    "sampling_logprobs", "prompt_lengths", "response_lengths", "response_start", "group", "sample_index",
)  # fmt: skip


def sample_of(ids: list[int], index: int = 0, start: float = -1.0) -> Sample:
    """A sample whose log-probabilities are all different."""
    logprobs = (start - np.arange(len(ids)) / 8).astype(np.float32)
    return Sample(
        token_ids=np.array(ids, dtype=np.int64),
        text="",
        logprobs=logprobs,
        sampling_logprobs=logprobs / 2,
        finish_reason="stop",
        stop_match=None,
        weight_version=0,
        token_versions=np.zeros(len(ids), dtype=np.int64),
        seed=0,
        sample_index=index,
    )


def group_of(prompt: list[int], *responses: list[int], error: str | None = None) -> RolloutGroup:
    return RolloutGroup(
        request_id=f"p{len(prompt)}",
        index=0,
        prompt_token_ids=np.array(prompt, dtype=np.int64),
        samples=[sample_of(ids, index, -1.0 - index) for index, ids in enumerate(responses)],
        error=error,
    )


def naive(groups: list[RolloutGroup], pad: int, side: PromptSide, more: tuple[int, int]) -> dict[str, Any]:
    """What ``pad_groups`` returns, written down token by token."""
    pairs = [(place, group, sample) for place, group in enumerate(groups) for sample in group.samples]
    left = max(len(group.prompt_token_ids) for _, group, _ in pairs) + more[0]
    right = max(len(sample.token_ids) for _, _, sample in pairs) + more[1]
    out: dict[str, Any] = {name: [] for name in TENSORS}
    for place, group, sample in pairs:
        prompt, response = group.prompt_token_ids.tolist(), sample.token_ids.tolist()
        hole = [None] * (left - len(prompt))
        padded_prompt = hole + prompt if side == "left" else prompt + hole
        cells = (hole + prompt if side == "left" else prompt) + response
        cells += [None] * (left + right - len(cells))
        positions, seen = [], 0
        for cell in cells:
            seen += cell is not None
            positions.append(max(seen - 1, 0))
        tail = [None] * (right - len(response))
        out["input_ids"].append([pad if cell is None else cell for cell in cells])
        out["attention_mask"].append([int(cell is not None) for cell in cells])
        out["position_ids"].append(positions)
        out["prompts"].append([pad if cell is None else cell for cell in padded_prompt])
        out["responses"].append([pad if cell is None else cell for cell in response + tail])
        out["response_mask"].append([1] * len(response) + [0] * len(tail))
        out["logprobs"].append(sample.logprobs.tolist() + [0.0] * len(tail))
        out["sampling_logprobs"].append(sample.sampling_logprobs.tolist() + [0.0] * len(tail))
        out["prompt_lengths"].append(len(prompt))
        out["response_lengths"].append(len(response))
        out["response_start"].append(left if side == "left" else len(prompt))
        out["group"].append(place)
        out["sample_index"].append(sample.sample_index)
    return out


ids = st.integers(0, 3)  # few, so that prompts and responses are full of pad ids
prompts = st.lists(ids, min_size=1, max_size=6)
responses = st.lists(ids, max_size=6)
some_groups = st.lists(
    st.builds(lambda prompt, answers: group_of(prompt, *answers), prompts, st.lists(responses, max_size=3)),
    min_size=1,
    max_size=4,
).filter(lambda groups: any(group.samples for group in groups))


@given(some_groups, ids, st.sampled_from(["left", "right"]), st.tuples(st.integers(0, 2), st.integers(0, 2)))
@settings(max_examples=150, deadline=None)
def test_padding_agrees_with_a_loop_over_tokens(
    groups: list[RolloutGroup], pad: int, side: PromptSide, more: tuple[int, int]
) -> None:
    expected = naive(groups, pad, side, more)
    batch = pad_groups(
        groups,
        pad_token_id=pad,
        prompt_side=side,
        prompt_width=len(expected["prompts"][0]),
        response_width=len(expected["responses"][0]),
    )
    for name in TENSORS:
        assert getattr(batch, name).tolist() == expected[name], name
    for name in TENSORS:
        kind = torch.float32 if name.endswith("logprobs") else torch.int64
        assert getattr(batch, name).dtype == kind, name
    if more == (0, 0):
        shortest = pad_groups(groups, pad_token_id=pad, prompt_side=side)
        assert all(torch.equal(getattr(shortest, name), getattr(batch, name)) for name in TENSORS)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_pad_id_that_is_the_eos_id_hides_no_eos(side: PromptSide) -> None:
    eos = 2
    batch = pad_groups([group_of([2, 5, 2], [7, eos], [7, 8, 9, eos])], pad_token_id=eos, prompt_side=side)
    assert batch.response_mask.sum(dim=1).tolist() == [2, 4]
    assert batch.attention_mask.sum(dim=1).tolist() == [5, 7]
    last = batch.response_start + batch.response_lengths - 1
    rows = torch.arange(2)
    assert batch.input_ids[rows, last].tolist() == [eos, eos]
    assert batch.attention_mask[rows, last].tolist() == [1, 1]
    assert batch.logprobs[rows, batch.response_lengths - 1].tolist() == [-1.125, -2.375]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_plain_forward_of_the_batch_gives_the_log_probabilities(
    tiny_model_dir: str, side: PromptSide, temperature: float
) -> None:
    engine = Engine(tiny_model_dir, EngineConfig(num_slots=8, max_length=64))
    sampling = SamplingParams(n=3, max_new_tokens=11, temperature=temperature, seed=3)
    groups = engine.generate([[5, 6, 7, 8, 9, 10], [11], [12, 0, 13]], sampling)
    batch = pad_groups(groups, pad_token_id=0, prompt_side=side)
    assert len(set(batch.response_lengths.tolist())) > 1 or batch.response_mask.all()
    with torch.inference_mode():
        logits = engine.model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids
        ).logits
    scored = torch.log_softmax(batch.at_predictors(logits).float() / temperature, dim=-1)
    found = scored.gather(2, batch.responses.unsqueeze(2)).squeeze(2) * batch.response_mask
    torch.testing.assert_close(found, batch.logprobs, atol=1e-4, rtol=0)


def test_rewards_stay_with_their_samples() -> None:
    groups = [group_of([1], [2], [3, 3]), group_of([4], [5])]
    listed = pad_groups(groups, pad_token_id=0, rewards=[[0.5, 1.0], [-2.0]])
    assert listed.rewards is not None
    assert listed.rewards.tolist() == [0.5, 1.0, -2.0]
    called = pad_groups(groups, pad_token_id=0, rewards=lambda group, sample: len(sample.token_ids))
    assert called.rewards is not None
    assert called.rewards.tolist() == [1.0, 2.0, 1.0]
    assert pad_groups(groups, pad_token_id=0).rewards is None


def test_a_failed_group_is_an_error_or_left_out() -> None:
    groups = [group_of([1], [2]), group_of([3, 3], error="prompt 1: too long"), group_of([4], [5], [6])]
    with pytest.raises(RequestError, match="1 of 3 groups failed, first prompt 1: too long"):
        pad_groups(groups, pad_token_id=0)
    batch = pad_groups(groups, pad_token_id=0, skip_failed=True, rewards=[[1.0], [], [2.0, 3.0]])
    assert batch.group.tolist() == [0, 2, 2]
    assert batch.prompts.tolist() == [[1], [4], [4]]
    assert batch.rewards is not None
    assert batch.rewards.tolist() == [1.0, 2.0, 3.0]


CASES: list[tuple[dict[str, Any], str]] = [
    ({"prompt_width": 1}, r"request 'p2', sample 0: the prompt has 2 tokens, prompt_width is 1"),
    ({"response_width": 2}, r"request 'p1', sample 1: the response has 3 tokens, response_width is 2"),
    ({"rewards": [[1.0, 2.0]]}, r"request 'p2': 1 samples and no rewards"),
    ({"rewards": [[1.0], [1.0]]}, r"request 'p1': 2 samples and 1 rewards"),
    ({"prompt_side": "middle"}, r"prompt_side must be 'left' or 'right', got 'middle'"),
]


@pytest.mark.parametrize(("options", "message"), CASES, ids=[next(iter(options)) for options, _ in CASES])
def test_what_does_not_fit_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        pad_groups([group_of([1], [2], [2, 2, 2]), group_of([3, 3], [4])], pad_token_id=0, **options)


def test_nothing_to_pad_is_an_error() -> None:
    with pytest.raises(RequestError, match="no samples to pad in 1 groups"):
        pad_groups([group_of([1])], pad_token_id=0)


def test_predictors_are_one_column_before_their_tokens() -> None:
    groups = [group_of([1, 2, 3], [4, 5]), group_of([6], [7])]
    sides: list[PromptSide] = ["left", "right"]
    for side in sides:
        batch: PaddedBatch = pad_groups(groups, pad_token_id=0, prompt_side=side)
        before = batch.at_predictors(batch.input_ids)
        assert (before * batch.response_mask).tolist() == [[3, 4], [6, 0]]
