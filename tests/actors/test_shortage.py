"""Memory that runs out in a step costs rows, not samples."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_pool import Engine, EngineConfig, SamplingParams, verify
from rollout_pool.actors.elastic_batch import is_out_of_memory

CONFIG = EngineConfig(num_slots=8, max_length=64)
SAMPLING = SamplingParams(n=3, max_new_tokens=14, seed=5)
SIZES = [5, 9, 3, 12]

Fits = Callable[[int, int], bool]


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Fits], list[tuple[int, int]]]:
    """``limited(model, fits)``: forwards of (rows, tokens) that do not fit raise what a full GPU raises."""

    def limit(model: Any, fits: Fits) -> list[tuple[int, int]]:
        forward, refused = model.forward, []

        @functools.wraps(forward)
        def limited_forward(*args: Any, **kwargs: Any) -> Any:
            rows, tokens = kwargs["input_ids"].shape
            if not fits(rows, tokens):
                refused.append((rows, tokens))
                # Some layers have run by the time it happens: their writes must not count.
                model.model.layers[0].self_attn.register_forward_hook(fail)
            try:
                return forward(*args, **kwargs)
            finally:
                model.model.layers[0].self_attn._forward_hooks.clear()

        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        monkeypatch.setattr(model, "forward", limited_forward)
        return refused

    return limit


def tokens(groups: list[Any]) -> list[list[list[int]]]:
    return [[sample.token_ids.tolist() for sample in group.samples] for group in groups]


@pytest.mark.parametrize("layout", ["ragged", "aligned"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decode_goes_on_with_the_rows_that_fit(
    layout: Any, temperature: float, llama: Any, prompts_of: Any, limited: Any, caplog: Any
) -> None:
    config = CONFIG.model_copy(update={"layout": layout})
    sampling = SAMPLING.model_copy(update={"temperature": temperature})
    expected = Engine(llama, config).generate(prompts_of(SIZES), sampling)
    engine = Engine(llama, config)
    refused = limited(llama, lambda rows, _: rows <= 3)
    with caplog.at_level(logging.WARNING):
        groups = engine.generate(prompts_of(SIZES), sampling)

    assert [rows for rows, _ in refused] == [8, 4]
    assert "out of memory with 8 slots, going on with 4" in caplog.text
    assert tokens(groups) == tokens(expected)
    for group, other in zip(groups, expected, strict=True):
        assert group.error is None
        for sample, twin in zip(group.samples, other.samples, strict=True):
            np.testing.assert_allclose(sample.logprobs, twin.logprobs, atol=1e-4)
            assert (sample.finish_reason, sample.text) == (twin.finish_reason, twin.text)
    assert verify(groups, llama).max_abs_diff < 1e-3
    stats = engine.stats()
    assert (stats.shortages, stats.num_slots, stats.finished) == (2, 2, 4)
    assert stats.new_tokens == sum(len(one) for group in tokens(groups) for one in group)
    assert stats.kv_bytes * 4 == Engine(llama, config).stats().kv_bytes
    assert tokens(engine.generate(prompts_of(SIZES), sampling)) == tokens(expected)


def test_a_prompt_that_never_fits_fails_alone_and_by_its_numbers(
    llama: Any, prompts_of: Any, limited: Any
) -> None:
    prompts = prompts_of([5, 9, 30, 12])
    expected = Engine(llama, CONFIG).generate(prompts, SAMPLING)
    engine = Engine(llama, CONFIG)
    limited(llama, lambda _, length: length < 30)
    groups = engine.generate(prompts, SAMPLING)

    assert [group.error is None for group in groups] == [True, True, False, True]
    assert "out of memory at its prompt of 30 tokens with up to 14 new ones" in groups[2].error
    assert "\n" not in groups[2].error
    assert "max_length" in groups[2].error
    others = [group for group in groups if group.error is None]
    assert tokens(others) == tokens([one for index, one in enumerate(expected) if index != 2])
    stats = engine.stats()
    assert (stats.submitted, stats.finished, stats.failed) == (4, 3, 1)
    assert stats.num_slots == CONFIG.num_slots  # it was this prompt, not the number of rows


def test_strict_batches_keep_their_size(llama: Any, prompts_of: Any, limited: Any) -> None:
    config = CONFIG.model_copy(update={"deterministic": "strict"})
    expected = Engine(llama, config).generate(prompts_of(SIZES), SAMPLING)
    engine = Engine(llama, config)
    left = iter([True] * 6 + [False, False])  # memory in pieces: the third try succeeds
    limited(llama, lambda *_: next(left, True))
    assert tokens(engine.generate(prompts_of(SIZES), SAMPLING)) == tokens(expected)
    assert (engine.stats().shortages, engine.stats().num_slots) == (2, 8)

    limited(llama, lambda rows, _: rows < 8)
    groups = engine.generate(prompts_of([4]), SAMPLING)
    assert "lower engine.num_slots" in groups[0].error


@settings(max_examples=15, deadline=None)
@given(failing=st.sets(st.integers(0, 60), max_size=8), readback=st.sampled_from([1, 3]))
def test_whenever_it_happens_tokens_stay_the_same(failing: set[int], readback: int, trio: Any) -> None:
    model, prompts, expected = trio
    config = CONFIG.model_copy(update={"readback_every": readback})
    engine = Engine(model, config)
    calls = iter(range(10_000))
    with pytest.MonkeyPatch.context() as patch:
        forward = model.forward

        def sometimes(*args: Any, **kwargs: Any) -> Any:
            if next(calls) in failing:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(*args, **kwargs)

        patch.setattr(model, "forward", sometimes)
        groups = engine.generate(prompts, SAMPLING)
    failed = [group for group in groups if group.error is not None]
    assert all("out of memory" in group.error for group in failed)
    if len(failing) < 4:  # 8, 4, 2, 1: so many before a group can fail
        assert not failed
    for group, other in zip(groups, expected, strict=True):
        if group.error is None:
            assert tokens([group]) == tokens([other])
    stats = engine.stats()
    assert stats.submitted == stats.finished + stats.failed == len(prompts)


@pytest.fixture(scope="module")
def trio(llama: Any, prompts_of: Any) -> Any:
    prompts = prompts_of(SIZES)
    return llama, prompts, Engine(llama, CONFIG).generate(prompts, SAMPLING)


def test_a_shortage_is_told_from_other_failures(llama: Any, prompts_of: Any, monkeypatch: Any) -> None:
    with pytest.raises(RuntimeError) as host:
        torch.empty(2**60)
    assert is_out_of_memory(host.value)
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))

    engine = Engine(llama, CONFIG)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(llama, "forward", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        engine.generate(prompts_of([3]), SAMPLING)
