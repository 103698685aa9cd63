"""Prompts that begin like recent ones are computed from there on, and give the same tokens."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_pool import Engine, EngineConfig, RolloutRequest, SamplingParams, verify
from rollout_pool.actors.model_runner import ModelRunner
from rollout_pool.actors.prefix_cache import LEAST_SHARED, PrefixCache

CONFIG = EngineConfig(num_slots=4, max_length=96)
SAMPLING = SamplingParams(n=2, max_new_tokens=8, seed=2)
HEAD = 40


def tokens(groups: list[Any]) -> list[list[list[int]]]:
    return [[sample.token_ids.tolist() for sample in group.samples] for group in groups]


@pytest.fixture(scope="module")
def family_prompts(prompts_of: Any) -> list[list[int]]:
    """Four prompts with one beginning of 40 tokens, and one of their own."""
    head = prompts_of([HEAD])[0]
    return [[*head, *tail] for tail in prompts_of([3, 9, 1, 14], seed=5)] + prompts_of([20], seed=9)


@pytest.mark.parametrize("layout", ["ragged", "aligned"])
def test_what_begins_alike_is_computed_once(
    layout: Any, llama: Any, family_prompts: Any, poison: Any
) -> None:
    config = CONFIG.model_copy(update={"layout": layout})
    without = Engine(llama, config.model_copy(update={"prefix_cache_tokens": 0}))
    expected = without.generate(family_prompts, SAMPLING)
    engine = poison(Engine(llama, config))
    groups = engine.generate(family_prompts, SAMPLING)

    assert tokens(groups) == tokens(expected)
    assert verify(groups, llama).max_abs_diff < 1e-3
    stats, plain = engine.stats(), without.stats()
    assert plain.prefill_tokens_reused == 0
    assert stats.prefill_tokens_reused == 3 * HEAD
    assert stats.prefill_tokens == plain.prefill_tokens - 3 * HEAD
    assert stats.prefill_tokens_saved == plain.prefill_tokens_saved  # by sharing among samples, as before

    again = engine.generate(family_prompts[-1:], SAMPLING)
    assert engine.stats().prefills == stats.prefills  # it was the last one: nothing is computed
    assert engine.stats().prefill_tokens_reused == stats.prefill_tokens_reused + len(family_prompts[-1])
    assert again[0].prompt_token_ids.tolist() == family_prompts[-1]


def test_a_conversation_costs_its_new_turn(llama: Any, prompts_of: Any) -> None:
    engine = Engine(llama, CONFIG)
    prompt = prompts_of([30])[0]
    sampling = SamplingParams(max_new_tokens=10, seed=1, temperature=0, ignore_eos=True)
    first = engine.generate([prompt], sampling)[0].samples[0]
    turn = [*prompt, *first.token_ids.tolist(), *prompts_of([6], seed=3)[0]]
    before = engine.stats()
    second = engine.generate([turn], sampling)
    assert engine.stats().prefill_tokens - before.prefill_tokens == len(turn) - len(prompt)
    alone = Engine(llama, CONFIG.model_copy(update={"prefix_cache_tokens": 0}))
    assert tokens(second) == tokens(alone.generate([turn], sampling))


def test_new_weights_empty_the_cache(llama: Any, prompts_of: Any) -> None:
    model = copy.deepcopy(llama)
    engine = Engine(model, CONFIG)
    prompts = prompts_of([30])
    old = engine.generate(prompts, SAMPLING)
    with torch.no_grad():
        model.get_output_embeddings().weight.neg_()
    engine.weights_changed()
    before = engine.stats().prefill_tokens_reused
    new = engine.generate(prompts, SAMPLING)
    assert engine.stats().prefill_tokens_reused == before
    assert tokens(new) != tokens(old)
    assert verify(new, model).max_abs_diff < 1e-3


def test_strict_engines_reuse_whole_prompts_only(llama: Any, family_prompts: Any) -> None:
    config = CONFIG.model_copy(update={"deterministic": "strict"})
    engine = Engine(llama, config)
    first = engine.generate(family_prompts, SAMPLING)
    assert engine.stats().prefill_tokens_reused == 0
    named = [RolloutRequest(family_prompts[-1], SAMPLING, request_id=first[-1].request_id)]
    again = engine.generate(named)
    assert engine.stats().prefill_tokens_reused == len(family_prompts[-1])
    assert len(again[0].samples) == 2


def test_memory_is_bounded_and_given_back(llama: Any, prompts_of: Any) -> None:
    engine = Engine(llama, CONFIG.model_copy(update={"prefix_cache_tokens": 50}))
    recent = engine.batch.worker.recent
    for length in (20, 25, 30, 60):
        engine.generate(prompts_of([length], seed=length), SAMPLING)
        assert recent.num_tokens <= 50
    assert recent.num_tokens == 30  # 60 are too many to be kept
    engine.sleep()
    assert recent.num_tokens == 0
    engine.wake()
    assert engine.memory_plan.prefix_bytes == 50 * engine.memory_plan.bytes_per_token


PARTS = st.tuples(st.integers(0, 2), st.integers(0, 30), st.lists(st.integers(3, 5), max_size=4))


@settings(max_examples=40, deadline=None)
@given(parts=st.lists(PARTS, max_size=12), capacity=st.integers(0, 120))
def test_any_sequence_of_prompts_gives_logits_of_whole_ones(
    parts: list[tuple[int, int, list[int]]], capacity: int, tried: ModelRunner
) -> None:
    """Prompts are cut from three texts, with other ends: all kinds of shared beginnings."""
    generator = np.random.default_rng(0)
    texts = generator.integers(3, 100, size=(3, 30))
    recent = PrefixCache(tried, capacity)
    with tried.session():
        for number, size, tail in parts:
            prompt = np.concatenate((texts[number, :size], tail, [7])).astype(np.int64)
            prefix, reused = recent.prefill(prompt)
            whole = tried.prefill(torch.from_numpy(prompt))
            torch.testing.assert_close(prefix.logits, whole.logits, rtol=1e-4, atol=1e-4)
            assert prefix.length == whole.length == prompt.size
            assert reused in (0, prompt.size) or LEAST_SHARED <= reused < prompt.size
            for mine, theirs in zip(prefix.cache.layers, whole.cache.layers, strict=True):
                torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-4)
            assert recent.num_tokens <= capacity


@pytest.fixture(scope="module")
def tried(llama: Any) -> ModelRunner:
    from rollout_pool.actors.support import trial

    runner = ModelRunner(llama)
    with runner.session():
        trial(runner)
    assert runner.goes_on
    return runner
