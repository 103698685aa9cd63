"""Numbers that are not finite, and rows that are free: neither reaches another row."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_pool import Engine, EngineConfig, RolloutRequest, SamplingParams

GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)


def test_a_prompt_whose_numbers_break_fails_alone_and_leaves_a_clean_slot(
    build: Any, small_config: Any, hf_greedy: Any
) -> None:
    """Masked cells must be finite: 0 * nan is nan, so a broken row may leave nothing behind."""
    from transformers import LlamaConfig

    model = build(LlamaConfig(**small_config()))
    model.model.embed_tokens.weight.data[5] = float("nan")
    engine = Engine(model, EngineConfig(num_slots=2, max_length=64))
    broken, fine = [[5, 6, 7, 8, 9, 10], [7, 8, 9, 5]], [[6], [7, 8], [9, 10], [11, 12, 13]]
    groups = engine.generate([fine[0], broken[0], fine[1], broken[1], *fine[2:]], GREEDY)
    errors = [group.error for group in groups]
    assert [error is None for error in errors] == [True, False, True, False, True, True]
    assert "not finite" in str(errors[1])
    assert groups[1].samples[0].finish_reason == "error"
    for prompt, group in zip(fine, [groups[0], groups[2], groups[4], groups[5]], strict=True):
        assert group.samples[0].token_ids.tolist() == hf_greedy(model, prompt, 8)
    stats = engine.stats()
    assert (stats.submitted, stats.failed, stats.finished) == (6, 2, 4)


def test_a_row_that_breaks_midway_fails_with_its_place(build: Any, small_config: Any, hf_greedy: Any) -> None:
    from transformers import LlamaConfig

    model = build(LlamaConfig(**small_config()))
    prompt, other = [9, 10, 11], [12, 13]
    expected, others = hf_greedy(model, prompt, 8), hf_greedy(model, other, 8)
    bad = next(token for token in expected[1:] if token not in others and token not in prompt + other)
    place = expected.index(bad) + 2  # the token after the one whose embedding is broken
    model.model.embed_tokens.weight.data[bad] = float("inf")
    engine = Engine(model, EngineConfig(num_slots=4, max_length=64))
    groups = engine.generate([prompt, other], GREEDY)
    assert f"not finite at new token {place}" in str(groups[0].error)
    assert groups[1].samples[0].token_ids.tolist() == others


@pytest.mark.filterwarnings("ignore:deterministic='strict'.*:RuntimeWarning")
def test_a_free_row_that_breaks_reaches_no_live_one(build: Any, small_config: Any, hf_greedy: Any) -> None:
    """A free slot computes too, from token 0; with a sliding window its column 0 outlives the next prompt."""
    from transformers import MistralConfig

    model = build(MistralConfig(**small_config(sliding_window=7)))
    engine = Engine(model, EngineConfig(num_slots=3, max_length=64, deterministic="strict"))
    model.model.embed_tokens.weight.data[0] = float("nan")
    engine.generate([[6, 7, 8]], GREEDY)
    prompts = [list(range(3, 30)), list(range(30, 60)), list(range(60, 80))]
    for prompt, group in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        assert group.error is None
        assert group.samples[0].token_ids.tolist() == hf_greedy(model, prompt, 8)


@pytest.mark.parametrize(
    "changes", [{"deterministic": "strict"}, {"compact": False}], ids=["strict", "no-compaction"]
)
@pytest.mark.filterwarnings("ignore:deterministic='strict'.*:RuntimeWarning")
def test_free_rows_write_nowhere_else_however_long_they_are_free(
    changes: dict[str, Any], llama: Any, hf_greedy: Any
) -> None:
    """They compute in every step: a position that went on counting would run into the next row."""
    engine = Engine(llama, EngineConfig(num_slots=3, max_length=16, **changes))
    short, long = [5], [6, 7]
    first = [RolloutRequest(short, SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True))] * 2
    last = RolloutRequest(long, SamplingParams(temperature=0, max_new_tokens=14, ignore_eos=True))
    expected = hf_greedy(llama, long, 14)
    for _ in range(4):
        groups = engine.generate([*first, last])
        assert groups[2].samples[0].token_ids.tolist() == expected
        (group,) = engine.generate([last])
        assert group.samples[0].token_ids.tolist() == expected
