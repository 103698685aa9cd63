"""Bad requests, broken numbers, cancelled groups, too little memory: what fails, and what does not."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from rollout_pool import (
    CapacityError,
    ConfigError,
    Engine,
    EngineConfig,
    RequestError,
    RolloutRequest,
    SamplingParams,
)
from rollout_pool.types import EngineStats

GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
VOCAB = 160


@pytest.fixture(scope="module")
def engine(llama: Any) -> Engine:
    return Engine(llama, EngineConfig(num_slots=3, max_length=32))


@pytest.fixture(scope="module")
def texts(tiny_model_dir: str) -> Engine:
    return Engine(tiny_model_dir, EngineConfig(num_slots=3, max_length=64))


def balanced(stats: EngineStats) -> bool:
    inside = stats.waiting_groups + stats.running_groups
    return stats.submitted == stats.finished + stats.failed + stats.cancelled + inside


BAD: dict[str, tuple[Any, str]] = {
    "empty": ([], "empty"),
    "too long": (list(range(3, 33)), "max_length 32"),
    "id outside": ([3, VOCAB], f"token id {VOCAB} .*vocabulary"),
    "negative id": ([3, -1], "token id -1 .*vocabulary"),
    "huge id": ([3, 2**70], "64 bits"),
    "none": (None, "NoneType"),
    "number": (RolloutRequest(7), "int"),  # type: ignore[arg-type]
    "bytes": (b"abc", "bytes"),
    "float ids": ([3, 4.5], "item 1 .*4.5"),
    "bool ids": ([3, True], "item 1 .*True"),
    "nested": ([[3, 4]], r"item 0 .*\[3, 4\]"),
    "text without a tokenizer": ("hello", "tokenizer"),
    "messages without a tokenizer": ([{"role": "user", "content": "hi"}], "tokenizer"),
    "float array": (np.array([3.0, 4.0]), "integers"),
    "two-dimensional array": (np.zeros((2, 2), dtype=np.int64), "one-dimensional"),
    "not sampling": (RolloutRequest([3], sampling={"n": 2}), "SamplingParams"),  # type: ignore[arg-type]
    "bad seed": (RolloutRequest([3], seed=-1), "seed"),
    "bad offset": (RolloutRequest([3], sample_offset=1.5), "sample_offset"),  # type: ignore[arg-type]
    "stop string without a tokenizer": (
        RolloutRequest([3], SamplingParams(max_new_tokens=4, stop=("a",))),
        "stop_token_ids",
    ),
    "stop id outside": (
        RolloutRequest([3], SamplingParams(max_new_tokens=4, stop_token_ids=(VOCAB,))),
        "stop_token_ids",
    ),
    "named": (RolloutRequest([], request_id="job-7"), "job-7.*empty"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_request_fails_its_own_group_only(
    kind: str, engine: Engine, llama: Any, hf_greedy: Any
) -> None:
    bad, message = BAD[kind]
    good = [[5, 6, 7], [8], [9, 10]]
    before = engine.stats()
    groups = engine.generate([good[0], good[1], bad, good[2]], GREEDY)
    assert [group.index for group in groups] == [0, 1, 2, 3]
    assert groups[2].samples == []
    assert groups[2].error is not None
    assert re.search(message, groups[2].error), groups[2].error
    assert "\n" not in groups[2].error
    if not isinstance(bad, RolloutRequest) or bad.request_id is None:
        assert "prompt 2" in groups[2].error
    del groups[2]
    for prompt, group in zip(good, groups, strict=True):
        assert group.error is None
        assert group.samples[0].token_ids.tolist() == hf_greedy(llama, prompt, 8)
    after = engine.stats()
    assert (after.failed - before.failed, after.finished - before.finished) == (1, 3)
    assert balanced(after)


@pytest.mark.parametrize(
    "bad",
    [
        "\ud800 half a character",
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user"}],
        [{"content": "hi"}],
        [{"role": "user", "content": "hi"}, 5],
        "",
    ],
    ids=["surrogate", "surrogate-message", "no-content", "no-role", "mixed", "empty-text"],
)
def test_bad_text_fails_its_own_group_only(bad: Any, texts: Engine) -> None:
    groups = texts.generate(["abc", bad, [{"role": "user", "content": "hi"}]], GREEDY)
    assert [group.error is None for group in groups] == [True, False, True]
    assert "prompt 1" in str(groups[1].error)


def test_messages_need_a_chat_template(tiny_model_dir: str) -> None:
    engine = Engine(tiny_model_dir, EngineConfig(num_slots=2, max_length=64))
    engine.tokenizer.chat_template = None
    groups = engine.generate([[{"role": "user", "content": "hi"}], "abc"], GREEDY)
    assert "chat template" in str(groups[0].error)
    assert groups[1].error is None


@pytest.mark.parametrize(
    "prompts", ["abc", [3, 4, 5], {"role": "user", "content": "x"}, 7, RolloutRequest([3])]
)
def test_one_prompt_in_place_of_a_list_is_an_error_of_the_call(prompts: Any, engine: Engine) -> None:
    with pytest.raises(RequestError, match="list|prompts"):
        engine.generate(prompts, GREEDY)
    assert engine.generate([], GREEDY) == []


def test_the_books_balance_at_every_step(llama: Any, prompts_of: Any) -> None:
    engine = Engine(llama, EngineConfig(num_slots=3, max_length=64))
    prompts = prompts_of([4, 9, 1, 7, 5, 3, 6])
    delivered = []
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(n=1 + number % 4, max_new_tokens=3 + number, ignore_eos=True)
        engine.submit(RolloutRequest(prompt, sampling, request_id=number), delivered.append)
    engine.submit(RolloutRequest([], request_id="bad"), delivered.append)
    assert engine.stats().waiting_groups == 7
    finished: list[Any] = []
    for step in range(200):
        if not engine.has_work():
            break
        finished += engine.step()
        stats = engine.stats()
        assert balanced(stats)
        assert stats.live_rows <= stats.num_slots == 3
        assert stats.rows_decoded <= stats.rows_computed <= 3 * stats.decode_steps
        assert stats.finished + stats.failed + stats.cancelled >= len(finished)
        if step == 2:
            assert engine.abort(6) == 1
            assert balanced(engine.stats())
        if step == 4:
            assert engine.abort("nobody") == 0
    stats = engine.stats()
    assert (stats.submitted, stats.finished, stats.failed, stats.cancelled) == (8, 6, 1, 1)
    assert (stats.waiting_groups, stats.running_groups, stats.live_rows, stats.waiting_samples) == (
        0,
        0,
        0,
        0,
    )
    assert sorted(map(str, (g.request_id for g in finished))) == sorted(map(str, [*range(7), "bad"]))
    assert [id(group) for group in delivered] == [id(group) for group in finished]
    tokens = sum(sample.token_ids.size for group in finished for sample in group.samples)
    assert stats.new_tokens == tokens


def test_an_aborted_group_comes_with_what_it_has_and_the_others_go_on(
    llama: Any, prompts_of: Any, hf_greedy: Any
) -> None:
    engine = Engine(llama, EngineConfig(num_slots=3, max_length=64))
    long, other, never = prompts_of([4, 9, 5])
    greedy = SamplingParams(n=2, temperature=0, max_new_tokens=20, ignore_eos=True)
    engine.submit(RolloutRequest(long, greedy.model_copy(update={"max_new_tokens": 40}), request_id="long"))
    engine.submit(RolloutRequest(other, greedy.model_copy(update={"n": 1}), request_id="other"))
    engine.submit(RolloutRequest(never, greedy.model_copy(update={"max_new_tokens": 5}), request_id="never"))
    for _ in range(4):
        assert engine.step() == []
    assert engine.abort("long") == 1
    assert engine.abort("never") == 1
    assert engine.has_work()
    groups = {group.request_id: group for group in engine.step()}
    assert set(groups) == {"long", "never"}
    assert groups["never"].samples == []
    expected = hf_greedy(llama, long, 40)
    assert len(groups["long"].samples) == 2
    for sample in groups["long"].samples:
        assert sample.finish_reason == "aborted"
        assert sample.token_ids.tolist() == expected[: sample.token_ids.size]
        assert sample.token_ids.size == sample.logprobs.size == 5
    rest = []
    while engine.has_work():
        rest += engine.step()
    assert [group.request_id for group in rest] == ["other"]
    assert rest[0].samples[0].token_ids.tolist() == hf_greedy(llama, other, 20)
    (again,) = engine.generate([long], greedy)
    assert again.samples[0].token_ids.tolist() == expected[:20]


def test_a_group_submitted_before_a_call_is_delivered_after_it(llama: Any, prompts_of: Any) -> None:
    engine = Engine(llama, EngineConfig(num_slots=2, max_length=64))
    mine, prompt = prompts_of([4, 6])
    got: list[Any] = []
    engine.submit(RolloutRequest(mine, GREEDY, request_id="mine"))
    engine.submit(RolloutRequest(mine, GREEDY, request_id="told"), got.append)
    (group,) = engine.generate([prompt], SamplingParams(max_new_tokens=30, ignore_eos=True))
    assert group.error is None
    rest = []
    while engine.has_work():
        rest += engine.step()
    assert sorted(g.request_id for g in rest) == ["mine", "told"]
    assert [g.request_id for g in got] == ["told"]


def test_metadata_comes_back_untouched(engine: Engine) -> None:
    metadata = {"answer": 42, "tags": ["a"]}
    groups = engine.generate(
        [RolloutRequest([5], metadata=metadata), RolloutRequest([], metadata=metadata)], GREEDY
    )
    assert [group.metadata is metadata for group in groups] == [True, True]


# Numbers that are not finite


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
    assert (stats.failed, stats.finished) == (2, 4)
    assert balanced(stats)


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
    model.model.embed_tokens.weight.data[0] = float("nan")
    engine = Engine(model, EngineConfig(num_slots=3, max_length=64, deterministic="strict"))
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


# Capacity and configuration


def test_slots_that_do_not_fit_are_refused_with_the_remedy(llama: Any) -> None:
    with pytest.raises(
        CapacityError, match=r"num_slots 65536 .*max_length 100000.*lower engine\.num_slots"
    ) as caught:
        Engine(llama, EngineConfig(num_slots=65_536, max_length=100_000))
    assert "\n" not in str(caught.value)


def test_the_remedy_fits(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    per_token = 3 * 2 * 2 * 16 * 4  # layers, keys and values, kv heads, head dim, bytes
    free = type("Free", (), {"available": 100 * 64 * per_token})()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(CapacityError) as caught:
        Engine(llama, EngineConfig(num_slots=200, max_length=64))
    slots, length = map(int, re.findall(r"to at most (\d+)", str(caught.value)))
    assert slots < 100
    for config in (
        EngineConfig(num_slots=slots, max_length=64),
        EngineConfig(num_slots=200, max_length=length),
    ):
        plan = Engine(llama, config).memory_plan
        assert plan.kv_bytes <= 0.9 * free.available
        assert plan.bytes_per_token == per_token
    with pytest.raises(CapacityError):
        Engine(llama, EngineConfig(num_slots=slots + 1, max_length=64))


def test_the_plan_names_what_the_cache_really_takes(llama: Any) -> None:
    engine = Engine(llama, EngineConfig(num_slots=5, max_length=40))
    held = sum(tensor.nbytes for tensor in engine.cache.tensors())
    assert engine.stats().kv_bytes == held
    assert engine.memory_plan.kv_bytes == held // 5 * 6  # and one prompt that is held
    assert "5 slots x 40 tokens" in engine.memory_plan.describe()


def test_a_model_that_is_not_there_is_a_configuration_error(tmp_path: Any) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConfigError, match="cannot load model") as caught:
            Engine(str(path))
        assert "\n" not in str(caught.value)


def test_loading_options_are_not_for_a_loaded_model(llama: Any) -> None:
    with pytest.raises(ConfigError, match="loaded already"):
        Engine(llama, dtype="bfloat16")
