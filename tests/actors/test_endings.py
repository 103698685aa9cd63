"""How samples end and what shapes them: EOS ids, stop ids, stop strings, budgets, penalties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollout_pool import Engine, EngineConfig, RolloutRequest, Sample, SamplingParams

EOS = 1
GREEDY = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(llama: Any) -> Engine:
    return Engine(llama, EngineConfig(num_slots=6, max_length=96))


@pytest.fixture(scope="module")
def texts(tiny_model_dir: str) -> Engine:
    """An engine with a tokenizer, on a model loaded from its folder."""
    return Engine(tiny_model_dir, EngineConfig(num_slots=6, max_length=128))


def with_(**changes: Any) -> SamplingParams:
    return SamplingParams(**{**GREEDY.model_dump(), **changes})


def arrays_agree(sample: Sample) -> bool:
    sizes = {
        sample.token_ids.size,
        sample.logprobs.size,
        sample.sampling_logprobs.size,
        sample.token_versions.size,
    }
    kinds = (sample.token_ids.dtype, sample.logprobs.dtype, sample.sampling_logprobs.dtype)
    return len(sizes) == 1 and kinds == (np.int64, np.float32, np.float32)


def test_requests_of_every_kind_share_a_batch(
    engine: Engine, llama: Any, prompts_of: Any, hf_greedy: Any
) -> None:
    """Own budgets, own temperatures, own penalties and filters: each as if it were alone."""
    prompts = prompts_of([4, 9, 2, 7, 5, 3])
    requests = [
        RolloutRequest(prompts[0], with_(max_new_tokens=3)),
        RolloutRequest(prompts[1], with_(repetition_penalty=1.7)),
        RolloutRequest(
            prompts[2], SamplingParams(temperature=1.3, max_new_tokens=30, ignore_eos=True, seed=5, n=3)
        ),
        RolloutRequest(prompts[3], with_(temperature=0.9, top_k=4, seed=6)),
        RolloutRequest(prompts[4], with_(temperature=0.9, top_p=0.5, min_p=0.1, seed=7)),
        RolloutRequest(prompts[5], with_(min_new_tokens=20, max_new_tokens=25, ignore_eos=False)),
    ]
    requests = [RolloutRequest(r.prompt, r.sampling, request_id=f"r{i}") for i, r in enumerate(requests)]
    together = engine.generate(requests)
    alone = [engine.generate([request])[0] for request in requests]
    for one, other in zip(together, alone, strict=True):
        for a, b in zip(one.samples, other.samples, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
            np.testing.assert_allclose(a.sampling_logprobs, b.sampling_logprobs, atol=1e-4)
            assert arrays_agree(a)
    assert together[0].samples[0].token_ids.tolist() == hf_greedy(llama, prompts[0], 3)
    penalised = hf_greedy(llama, prompts[1], 20, repetition_penalty=1.7)
    assert together[1].samples[0].token_ids.tolist() == penalised
    assert [sample.token_ids.size for sample in together[2].samples] == [30] * 3
    assert together[5].samples[0].token_ids.size >= 20


@pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
def test_repetition_penalty_equals_single_row_generate(
    penalty: float, engine: Engine, llama: Any, prompts_of: Any, hf_greedy: Any
) -> None:
    prompts = prompts_of([12, 1, 6], seed=4)
    groups = engine.generate(prompts, with_(repetition_penalty=penalty, n=2))
    for prompt, group in zip(prompts, groups, strict=True):
        expected = hf_greedy(llama, prompt, 20, repetition_penalty=penalty)
        assert [sample.token_ids.tolist() for sample in group.samples] == [expected] * 2
    assert groups[0].samples[0].token_ids.tolist() != hf_greedy(llama, prompts[0], 20)


def test_a_penalty_leaves_no_trace_in_the_slot_for_the_next_request(
    engine: Engine, llama: Any, prompts_of: Any, hf_greedy: Any
) -> None:
    (prompt,) = prompts_of([8], seed=5)
    for penalty in (1.0, 2.0, 1.0, 1.5):
        groups = engine.generate([prompt] * 6, with_(repetition_penalty=penalty))
        expected = hf_greedy(llama, prompt, 20, repetition_penalty=penalty)
        assert all(group.samples[0].token_ids.tolist() == expected for group in groups)


def test_every_eos_id_ends_a_sample(build: Any, small_config: Any, prompts_of: Any, hf_greedy: Any) -> None:
    from transformers import LlamaConfig

    model = build(LlamaConfig(**small_config()))
    prompts = prompts_of([5, 8, 3, 6, 4, 7], seed=9)
    free = [hf_greedy(model, prompt, 16) for prompt in prompts]
    ids = [free[0][5], free[1][3], free[2][9]]
    model.generation_config.eos_token_id = ids
    engine = Engine(model, EngineConfig(num_slots=4, max_length=64))
    groups = engine.generate(prompts, with_(max_new_tokens=16, ignore_eos=False))
    ended_by = set()
    for prompt, group in zip(prompts, groups, strict=True):
        expected = hf_greedy(model, prompt, 16, eos=[*ids, EOS])
        (sample,) = group.samples
        assert sample.token_ids.tolist() == expected
        is_stop = expected[-1] in (*ids, EOS)
        assert sample.finish_reason == ("stop" if is_stop else "length")
        assert sample.stop_match == (expected[-1] if is_stop else None)
        ended_by.add(sample.stop_match)
    assert ended_by >= set(ids)
    assert [
        group.samples[0].token_ids.tolist() for group in engine.generate(prompts, with_(max_new_tokens=16))
    ] == free


def test_a_stop_id_ends_a_sample_and_stays_in_it(
    engine: Engine, llama: Any, prompts_of: Any, hf_greedy: Any
) -> None:
    prompts = prompts_of([5, 8], seed=9)
    free = [hf_greedy(llama, prompt, 20) for prompt in prompts]
    stop = free[0][6]
    groups = engine.generate(prompts, with_(stop_token_ids=(stop, 0)))
    for tokens, group in zip(free, groups, strict=True):
        (sample,) = group.samples
        end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert sample.token_ids.tolist() == tokens[:end]
        assert (sample.finish_reason, sample.stop_match) == (
            ("stop", stop) if stop in tokens else ("length", None)
        )
        assert arrays_agree(sample)


def test_min_new_tokens_blocks_every_end_until_then(
    build: Any, small_config: Any, prompts_of: Any, hf_greedy: Any
) -> None:
    from transformers import LlamaConfig

    model = build(LlamaConfig(**small_config()))
    prompts = prompts_of([5, 8, 3], seed=9)
    early = hf_greedy(model, prompts[0], 3)[0]
    model.generation_config.eos_token_id = [early]
    engine = Engine(model, EngineConfig(num_slots=4, max_length=64))
    sampling = with_(max_new_tokens=30, min_new_tokens=10, ignore_eos=False)
    for prompt, group in zip(prompts, engine.generate(prompts, sampling), strict=True):
        expected = hf_greedy(model, prompt, 30, eos=[early, EOS], min_new_tokens=10)
        assert group.samples[0].token_ids.tolist() == expected
        assert not {early, EOS} & set(expected[:10])


def test_logprobs_of_a_blocked_token_row_are_still_those_of_the_plain_distribution(
    build: Any, small_config: Any, prompts_of: Any
) -> None:
    from transformers import LlamaConfig

    from rollout_pool import verify

    model = build(LlamaConfig(**small_config()))
    engine = Engine(model, EngineConfig(num_slots=4, max_length=64))
    sampling = SamplingParams(
        n=4, max_new_tokens=12, min_new_tokens=8, temperature=1.4, top_k=20, repetition_penalty=1.4
    )
    groups = engine.generate(prompts_of([5, 9]), sampling)
    assert verify(groups, model).max_abs_diff < 1e-3
    drawn = np.concatenate([sample.sampling_logprobs for group in groups for sample in group.samples])
    plain = np.concatenate([sample.logprobs for group in groups for sample in group.samples])
    assert np.isfinite(drawn).all()
    assert (drawn <= 1e-6).all()
    assert drawn.mean() > plain.mean(), "a kept set has more mass on what is drawn"


@pytest.mark.parametrize("n", [1, 3])
def test_one_new_token_is_enough(n: int, engine: Engine, llama: Any, prompts_of: Any, hf_greedy: Any) -> None:
    prompts = prompts_of([1, 7, 4])
    for prompt, group in zip(prompts, engine.generate(prompts, with_(max_new_tokens=1, n=n)), strict=True):
        assert [sample.token_ids.tolist() for sample in group.samples] == [hf_greedy(llama, prompt, 1)] * n


def test_pad_ids_in_a_prompt_are_tokens_like_any_other(engine: Engine, llama: Any, hf_greedy: Any) -> None:
    prompts = [[0, 0, 5, 9], [5, 0, 9, 0], [0], [1, 5, 1, 1]]
    groups = engine.generate(prompts, GREEDY)
    for prompt, group in zip(prompts, groups, strict=True):
        assert group.samples[0].token_ids.tolist() == hf_greedy(llama, prompt, 20)
        assert group.prompt_token_ids.tolist() == prompt


def test_pad_equal_to_eos_hides_no_end(
    build: Any, small_config: Any, prompts_of: Any, hf_greedy: Any
) -> None:
    from transformers import LlamaConfig

    model = build(LlamaConfig(**small_config()))
    prompts = prompts_of([5, 8, 3], seed=9)
    eos = hf_greedy(model, prompts[0], 6)[5]
    model.config.pad_token_id = model.config.eos_token_id = model.generation_config.eos_token_id = eos
    model.generation_config.pad_token_id = eos
    engine = Engine(model, EngineConfig(num_slots=4, max_length=64))
    groups = engine.generate([[*prompt, eos, 5] for prompt in prompts] + prompts, with_(ignore_eos=False))
    sample = groups[3].samples[0]
    assert sample.token_ids.tolist() == hf_greedy(model, prompts[0], 20, eos=[eos])
    assert sample.token_ids[-1] == eos
    for prompt, group in zip(prompts, groups, strict=False):
        assert group.samples[0].token_ids.tolist() == hf_greedy(model, [*prompt, eos, 5], 20, eos=[eos])


# Text


def test_a_stop_string_ends_a_sample_wherever_token_boundaries_fall(texts: Engine) -> None:
    prompts = ["hello there", "this is it", "the test"]
    free = texts.generate(prompts, with_(max_new_tokens=40))
    for prompt, whole in zip(prompts, free, strict=True):
        full = whole.samples[0].text
        assert len(full) >= 20
        stop = full[9:13]  # crosses a boundary: most tokens are one or two characters
        (group,) = texts.generate([prompt], with_(max_new_tokens=40, stop=("never there", stop)))
        (sample,) = group.samples
        assert sample.text == full[: full.index(stop)]
        assert (sample.finish_reason, sample.stop_match) == ("stop", stop)
        assert arrays_agree(sample)
        size = sample.token_ids.size
        assert sample.token_ids.tolist() == whole.samples[0].token_ids[:size].tolist()
        decoded = texts.tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=True)
        assert stop in decoded
        shorter = texts.tokenizer.decode(sample.token_ids[:-1].tolist(), skip_special_tokens=True)
        assert stop not in shorter, "the sample ends with the token that completed the string"


def test_stop_strings_are_watched_in_every_sample_of_a_group(texts: Engine) -> None:
    sampling = SamplingParams(n=12, max_new_tokens=60, stop=("a", "e", "the"), seed=1, ignore_eos=True)
    (group,) = texts.generate(["hello there"], sampling)
    assert {sample.finish_reason for sample in group.samples} == {"stop"}
    for sample in group.samples:
        assert sample.stop_match in ("a", "e", "the")
        assert not any(stop in sample.text for stop in ("a", "e", "the"))
        assert arrays_agree(sample)


def test_text_is_what_the_tokens_say(texts: Engine) -> None:
    groups = texts.generate(["abc", "the end"], SamplingParams(n=3, max_new_tokens=12, seed=2))
    for group in groups:
        for sample in group.samples:
            assert sample.text == texts.tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=True)


def test_a_stop_string_that_is_a_special_token_works_or_is_refused(texts: Engine) -> None:
    """It must not be passed over in silence: the sample would run to its budget."""
    token = texts.tokenizer.convert_tokens_to_ids("<|assistant|>")
    bias = torch.zeros(texts.model.get_output_embeddings().weight.shape[0])
    bias[token] = 1e4
    handle = texts.model.get_output_embeddings().register_forward_hook(lambda module, args, out: out + bias)
    try:
        # A prompt of its own: the logits of one that was there before are not computed again.
        (group,) = texts.generate(["mind the hook"], with_(max_new_tokens=5, stop=("<|assistant|>",)))
    finally:
        handle.remove()
    if group.error is None:
        (sample,) = group.samples
        assert sample.token_ids.tolist() == [token]
        assert (sample.finish_reason, sample.text) == ("stop", "")
    else:
        assert "stop_token_ids" in group.error


def test_an_eos_id_outside_the_vocabulary_is_harmless(
    build: Any, small_config: Any, prompts_of: Any, hf_greedy: Any
) -> None:
    """A tokenizer may know more ids than the model's head, and some configurations keep a default."""
    from transformers import LlamaConfig

    model = build(LlamaConfig(**small_config()))
    model.generation_config.eos_token_id = [EOS, 50_256]
    engine = Engine(model, EngineConfig(num_slots=2, max_length=64))
    (prompt,) = prompts_of([5])
    (group,) = engine.generate([prompt], with_(ignore_eos=False, min_new_tokens=6))
    assert group.samples[0].token_ids.tolist() == hf_greedy(model, prompt, 20, eos=[EOS], min_new_tokens=6)
