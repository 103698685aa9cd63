"""A sample that was cut off goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rollout_pool import Engine, EngineConfig, RolloutRequest, Sample, SamplingParams, verify

CONFIG = EngineConfig(num_slots=6, max_length=64)
SAMPLINGS = {
    "greedy": SamplingParams(n=3, temperature=0, max_new_tokens=30, seed=4),
    "sampled": SamplingParams(n=3, max_new_tokens=30, seed=4),
    "filtered": SamplingParams(n=3, max_new_tokens=30, seed=4, top_p=0.9, temperature=0.8, min_new_tokens=20),
    "penalised": SamplingParams(n=3, max_new_tokens=30, seed=4, repetition_penalty=1.3),
}


def cut(engine: Engine, prompts: list[Any], sampling: SamplingParams, steps: int) -> list[Any]:
    """Groups that were aborted after so many steps."""
    groups = []
    for number, prompt in enumerate(prompts):
        engine.submit(RolloutRequest(prompt, sampling, request_id=f"r{number}"), groups.append)
    for _ in range(steps):
        engine.step()
    for number in range(len(prompts)):
        engine.abort(f"r{number}")
    engine.step()
    return sorted(groups, key=lambda group: group.request_id)


def assert_same(groups: list[Any], expected: list[Any]) -> None:
    for group, whole in zip(groups, expected, strict=True):
        assert group.error is None
        for sample, other in zip(group.samples, whole.samples, strict=True):
            assert sample.token_ids.tolist() == other.token_ids.tolist()
            assert (sample.finish_reason, sample.stop_match) == (other.finish_reason, other.stop_match)
            assert (sample.seed, sample.sample_index, sample.text) == (
                other.seed,
                other.sample_index,
                other.text,
            )
            np.testing.assert_allclose(sample.logprobs, other.logprobs, atol=1e-4)
            np.testing.assert_allclose(sample.sampling_logprobs, other.sampling_logprobs, atol=1e-4)


@pytest.mark.parametrize("layout", ["ragged", "aligned"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_an_aborted_sample_goes_on_token_for_token(
    sampling: str, layout: Any, llama: Any, prompts_of: Any, poison: Any
) -> None:
    params, prompts = SAMPLINGS[sampling], prompts_of([5, 11, 3])
    config = CONFIG.model_copy(update={"layout": layout})
    named = [RolloutRequest(prompt, params, request_id=f"r{n}") for n, prompt in enumerate(prompts)]
    whole = Engine(llama, config).generate(named)

    partial = cut(Engine(llama, config), prompts, params, steps=9)
    reasons = {sample.finish_reason for group in partial for sample in group.samples}
    assert "aborted" in reasons
    again = [
        RolloutRequest(group.prompt_token_ids, params, resume=group.samples)  # no id: samples bring theirs
        for group in partial
    ]
    engine = poison(Engine(llama, config))
    fresh_missing = [len(group.samples) < params.n for group in partial]
    if any(fresh_missing):
        again = [dataclasses.replace(one, request_id=f"r{n}", seed=4) for n, one in enumerate(again)]
    resumed = engine.generate(again)
    assert_same(resumed, whole)
    assert verify(resumed, llama).max_abs_diff < 1e-3


def test_a_larger_budget_continues_what_a_smaller_one_ended(llama: Any, prompts_of: Any) -> None:
    prompts = prompts_of([4, 9])
    short, long = (SamplingParams(n=2, max_new_tokens=size, seed=9) for size in (7, 25))
    engine = Engine(llama, CONFIG)
    first = engine.generate(prompts, short)
    assert {sample.finish_reason for group in first for sample in group.samples} == {"length"}
    resumed = engine.generate(
        [RolloutRequest(group.prompt_token_ids, long, resume=group.samples) for group in first]
    )
    assert_same(resumed, engine.generate(prompts, long))


def test_samples_that_are_over_come_back_as_they_are_without_a_forward_pass(
    llama: Any, prompts_of: Any
) -> None:
    sampling = SamplingParams(n=2, max_new_tokens=6, seed=1)
    engine = Engine(llama, CONFIG)
    (group,) = engine.generate(prompts_of([4]), sampling)
    before = engine.stats()
    (again,) = engine.generate([RolloutRequest(group.prompt_token_ids, sampling, resume=group.samples)])
    assert again.samples == group.samples
    assert (engine.stats().prefills, engine.stats().decode_steps) == (before.prefills, before.decode_steps)


def test_samples_not_given_start_anew(llama: Any, prompts_of: Any) -> None:
    sampling = SamplingParams(n=3, max_new_tokens=20, seed=2)
    engine = Engine(llama, CONFIG)
    (prompt,) = prompts_of([6])
    (whole,) = engine.generate([RolloutRequest(prompt, sampling, request_id="a")])
    piece = shortened(whole.samples[1], 5)
    (group,) = engine.generate([RolloutRequest(prompt, sampling, request_id="a", resume=piece)])
    assert_same([group], [whole])


@pytest.fixture
def word_tokenizer() -> Any:
    """One word per token, joined by spaces."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({f"w{number}": number for number in range(160)}, unk_token="w0"))
    core.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_a_stop_string_across_the_cut_is_found(llama: Any, prompts_of: Any, word_tokenizer: Any) -> None:
    engine = Engine(llama, CONFIG, tokenizer=word_tokenizer)
    sampling = SamplingParams(max_new_tokens=20, seed=2)
    (prompt,) = prompts_of([6])
    (whole,) = engine.generate([RolloutRequest(prompt, sampling, request_id="a")])
    words = whole.samples[0].text.split(" ")
    stopping = sampling.model_copy(update={"stop": (" ".join(words[7:9]),)})
    (expected,) = engine.generate([RolloutRequest(prompt, stopping, request_id="a")])
    assert expected.samples[0].finish_reason == "stop"
    piece = dataclasses.replace(shortened(whole.samples[0], 8), finish_reason="aborted")
    (group,) = engine.generate([RolloutRequest(prompt, stopping, resume=piece)])
    assert_same([group], [expected])


def shortened(sample: Sample, size: int) -> Sample:
    cut = {
        name: getattr(sample, name)[:size]
        for name in ("token_ids", "logprobs", "sampling_logprobs", "token_versions")
    }
    return dataclasses.replace(sample, finish_reason="aborted", stop_match=None, **cut)


@pytest.mark.parametrize(
    ("change", "resume", "message"),
    [
        ({}, "text", "resume must be a Sample or a list of them, got str"),
        ({}, ["text"], "resume must hold Samples, got str"),
        ({"sample_index": 7}, None, "resume holds sample 7, but n=2 and sample_offset=0 ask for 0 to 1"),
        (
            {"token_ids": np.array([5, 4000])},
            None,
            "resume: token id 4000 of sample 0 is outside the vocabulary",
        ),
    ],
)
def test_what_cannot_be_resumed_fails_its_own_group(
    change: Any, resume: Any, message: str, llama: Any, prompts_of: Any
) -> None:
    engine = Engine(llama, CONFIG)
    sampling = SamplingParams(n=2, max_new_tokens=6)
    (group,) = engine.generate(prompts_of([4]), sampling)
    sample = dataclasses.replace(shortened(group.samples[0], 2), **change)
    bad, good = engine.generate(
        [RolloutRequest([3, 4], sampling, resume=resume or [sample]), RolloutRequest([3, 4], sampling)]
    )
    assert message in bad.error
    assert good.error is None
