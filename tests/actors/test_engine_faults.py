"""Bad requests, broken numbers, cancelled groups, too little memory: what fails, and what does not."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from rollout_pool import (
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
    "float ids": ([3, 4.5], "item 1 .*float"),
    "bool ids": ([3, True], "item 1 .*bool"),
    "nested": ([[3, 4]], "item 0 .*list"),
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


def test_a_callback_that_raises_keeps_the_other_groups(llama: Any) -> None:
    engine, got = Engine(llama, EngineConfig(num_slots=2, max_length=32)), []

    def refuse(group: Any) -> None:
        raise LookupError("not wanted")

    engine.submit(RolloutRequest([3, 4], sampling=GREEDY, request_id="a"), refuse)
    engine.submit(RolloutRequest([5, 6], sampling=GREEDY, request_id="b"), got.append)

    def drain() -> None:
        while engine.has_work():
            engine.step()

    with pytest.raises(LookupError):
        drain()
    drain()
    assert [group.request_id for group in got] == ["b"]
    assert len(got[0].samples) == 1


def test_metadata_comes_back_untouched(engine: Engine) -> None:
    metadata = {"answer": 42, "tags": ["a"]}
    groups = engine.generate(
        [RolloutRequest([5], metadata=metadata), RolloutRequest([], metadata=metadata)], GREEDY
    )
    assert [group.metadata is metadata for group in groups] == [True, True]
