"""Short prompts are computed in one forward, and come out as if each had been computed alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig

from rollout_pool import Engine, EngineConfig, SamplingParams, verify
from rollout_pool.actors.prefix_cache import LEAST_FILLED, MOST_TOGETHER, batches

GREEDY = SamplingParams(max_new_tokens=10, temperature=0.0, ignore_eos=True)
SIZES = [9, 8, 21, 10, 24, 9, 1, 60, 22, 7]


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[tuple[int, int]]]:
    """``forwards(model)``: the shapes (rows, tokens) of its forwards that compute prompts, from now on."""

    def watch(model: Any) -> list[tuple[int, int]]:
        shapes: list[tuple[int, int]] = []
        forward = model.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            shape = tuple(kwargs["input_ids"].shape)
            if shape[1] > 1:
                shapes.append(shape)
            return forward(*args, **kwargs)

        monkeypatch.setattr(model, "forward", watched)
        return shapes

    return watch


def tokens(groups: list[Any]) -> list[Any]:
    return [group.samples[0].token_ids.tolist() for group in groups]


@pytest.mark.parametrize("window", [None, 23])
def test_tokens_are_those_of_generate_in_fewer_forwards(
    window: int | None, build: Any, small_config: Any, prompts_of: Any, hf_greedy: Any, forwards: Any
) -> None:
    kind: Any = LlamaConfig if window is None else MistralConfig
    model = build(kind(**small_config(), **({} if window is None else {"sliding_window": window})))
    prompts = prompts_of(SIZES)
    expected = [hf_greedy(model, prompt, 10) for prompt in prompts]
    engine = Engine(model, EngineConfig(num_slots=16, max_length=96))
    shapes = forwards(model)
    groups = engine.generate(prompts, GREEDY)
    assert tokens(groups) == expected
    assert sum(rows for rows, _ in shapes) == len(prompts) - 1  # a prompt of one token is a step of its own
    assert len(shapes) == (3 if window is None else 4)  # no prompt that reaches past the window shares one
    assert (engine.stats().prefills, engine.stats().prefill_tokens) == (len(prompts), sum(SIZES))
    assert verify(groups, model).max_abs_diff < 1e-4


def test_every_prompt_is_kept_alone(llama: Any, prompts_of: Any, forwards: Any) -> None:
    engine = Engine(llama, EngineConfig(num_slots=16, max_length=96, prefix_cache_tokens=1000))
    shapes = forwards(llama)
    first = engine.generate(prompts_of(SIZES), GREEDY)
    computed = list(shapes)
    assert tokens(engine.generate(prompts_of(SIZES), GREEDY)) == tokens(first)
    assert shapes == computed
    kept = [one.prefix for one in engine.batch.worker.recent._stored.values()]
    assert sorted(prefix.length for prefix in kept) == sorted(SIZES)
    for prefix in kept:  # and its memory is its own, not that of all that were computed with it
        layer = prefix.cache.layers[0]
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes


@pytest.mark.parametrize("kept", [None, 0])
def test_what_prompts_begin_with_is_computed_once(
    kept: int | None, llama: Any, prompts_of: Any, hf_greedy: Any, forwards: Any
) -> None:
    (head,), (other,) = prompts_of([20]), prompts_of([19], seed=3)
    tails = prompts_of([3, 4, 5, 6], seed=8)
    prompts = [*(head + tail for tail in tails), [*other, 5, 6], [*other, 7, 6], *prompts_of([22], seed=4)]
    expected = [hf_greedy(llama, prompt, 10) for prompt in prompts]
    engine = Engine(llama, EngineConfig(num_slots=8, max_length=64, prefix_cache_tokens=kept))
    shapes = forwards(llama)
    groups = engine.generate(prompts, GREEDY)
    assert tokens(groups) == expected
    assert sorted(shapes) == [(1, 19), (1, 20), (1, 22), (2, 2), (2, 4), (2, 6)]
    stats = engine.stats()
    assert stats.prefill_tokens_reused == 3 * 20 + 19
    assert stats.prefill_tokens + stats.prefill_tokens_reused == sum(map(len, prompts))
    assert [group.timing.prefill_tokens for group in groups] == [23, 4, 5, 6, 21, 2, 22]
    # In the next call the beginning is there, if anything was kept.
    more = [head + tail for tail in prompts_of([4, 5], seed=9)]
    expected = [hf_greedy(llama, prompt, 10) for prompt in more]
    del shapes[:]
    assert tokens(engine.generate(more, GREEDY)) == expected
    assert shapes == ([(2, 5)] if kept is None else [(1, 20), (2, 5)])


def test_prompts_go_on_from_the_nearest_that_is_kept(llama: Any, prompts_of: Any, forwards: Any) -> None:
    """The turns of two conversations that begin with the same system prompt."""
    (head,), turns = prompts_of([20]), prompts_of([30, 30], seed=5)
    first = [head + turn for turn in turns]
    second = [[*one, 9, 8, 7] for one in first]
    engine = Engine(llama, EngineConfig(num_slots=8, max_length=96, prefix_cache_tokens=500))
    shapes = forwards(llama)
    engine.generate(first, GREEDY)
    engine.generate(second, GREEDY)
    assert shapes == [(1, 20), (2, 30), (1, 3), (1, 3)]


def test_strict_engines_compute_every_prompt_alone(llama: Any, prompts_of: Any, forwards: Any) -> None:
    engine = Engine(llama, EngineConfig(num_slots=8, max_length=64, deterministic="strict"))
    shapes = forwards(llama)
    engine.generate(prompts_of([5, 6, 7]), GREEDY)
    assert sorted(shapes) == [(1, 5), (1, 6), (1, 7)]


def test_memory_that_runs_out_there_costs_no_tokens(llama: Any, prompts_of: Any, monkeypatch: Any) -> None:
    expected = tokens(
        Engine(llama, EngineConfig(num_slots=8, max_length=96)).generate(prompts_of(SIZES), GREEDY)
    )
    engine = Engine(llama, EngineConfig(num_slots=8, max_length=96))
    forward = llama.forward

    def limited(*args: Any, **kwargs: Any) -> Any:
        rows, columns = kwargs["input_ids"].shape
        if rows > 2 and columns > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(*args, **kwargs)

    monkeypatch.setattr(llama, "forward", limited)
    assert tokens(engine.generate(prompts_of(SIZES), GREEDY)) == expected
    assert engine.stats().shortages >= 1


@given(st.lists(st.integers(1, 2 * MOST_TOGETHER), max_size=40))
def test_batches_take_prompts_that_fill_them(lengths: list[int]) -> None:
    lengths.sort()
    found = batches(lengths)
    taken = [index for batch in found for index in batch]
    assert taken == sorted(set(taken))
    for batch in found:
        assert len(batch) > 1
        assert len(batch) * lengths[batch[-1]] <= MOST_TOGETHER
        assert lengths[batch[0]] >= LEAST_FILLED * lengths[batch[-1]]
    for index in range(len(lengths) - 1):  # neighbours that could go together are not both left alone
        if index not in taken and index + 1 not in taken:
            fits = 2 * lengths[index + 1] <= MOST_TOGETHER
            assert not (fits and lengths[index] >= LEAST_FILLED * lengths[index + 1])
