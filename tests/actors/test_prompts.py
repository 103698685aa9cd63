"""Every form of a prompt becomes the token ids that the tokenizer itself would give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import transformers

from rollout_pool import ConfigError, RequestError, SamplingParams
from rollout_pool.actors.loading import load_tokenizer
from rollout_pool.actors.prompts import PromptEncoder
from rollout_pool.requests import resolve_requests

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture
def encode(tokenizer: Any) -> Any:
    encoder = PromptEncoder(tokenizer, len(tokenizer), 64)

    def call(prompt: Any, sampling: SamplingParams | None = None) -> Any:
        (request,) = resolve_requests([prompt], sampling or SamplingParams(max_new_tokens=8), seed=0)
        return encoder.encode(request)

    return call


@pytest.mark.parametrize(
    "prompt",
    [
        [3, 7, 9],
        (3, 7, 9),
        np.array([3, 7, 9]),
        np.array([3, 7, 9], dtype=np.int32),
        np.array([3, 7, 9], dtype=np.uint8),
        [np.int64(3), np.int32(7), 9],
    ],
    ids=["list", "tuple", "int64", "int32", "uint8", "numpy-scalars"],
)
def test_token_ids_of_any_kind_are_taken_as_they_are(prompt: Any, encode: Any) -> None:
    ids = encode(prompt)
    assert ids.dtype == np.int64
    assert ids.tolist() == [3, 7, 9]


def test_an_array_of_ids_is_copied(encode: Any) -> None:
    """What the caller does with the array afterwards does not reach the engine."""
    prompt = np.array([3, 7, 9])
    ids = encode(prompt)
    prompt[0] = 100
    assert ids.tolist() == [3, 7, 9]


def test_text_is_encoded_as_the_tokenizer_does(encode: Any, tokenizer: Any) -> None:
    assert encode("the other one").tolist() == tokenizer("the other one")["input_ids"]


def test_messages_go_through_the_chat_template_once(encode: Any, tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert encode(MESSAGES).tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encode(tuple(MESSAGES)).tolist() == encode(MESSAGES).tolist()


def test_a_template_that_opens_the_text_gets_no_second_beginning(tokenizer: Any) -> None:
    """Templates write the first special token themselves; the tokenizer's own would double it."""

    class WithBeginning:
        chat_template = "yes"

        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            assert options == {"tokenize": False, "add_generation_prompt": True}
            return "<|user|>hi"

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            return {"input_ids": [1, *ids] if add_special_tokens else ids}

    encoder = PromptEncoder(WithBeginning(), len(tokenizer), 64)
    requests = resolve_requests([MESSAGES, "hi"], SamplingParams(max_new_tokens=8), seed=0)
    assert encoder.encode(requests[0])[0] == 3
    assert encoder.encode(requests[1])[0] == 1


def test_a_template_that_rejects_the_messages_says_why(encode: Any, tokenizer: Any) -> None:
    before = tokenizer.chat_template
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    try:
        with pytest.raises(RequestError, match=r"chat template.*roles must alternate"):
            encode(MESSAGES)
    finally:
        tokenizer.chat_template = before


@pytest.mark.parametrize(
    ("tokens", "new", "fits"), [(56, 8, True), (57, 8, False), (1, 63, True), (1, 64, False)]
)
def test_prompt_and_budget_share_the_rows_length(tokens: int, new: int, fits: bool, encode: Any) -> None:
    sampling = SamplingParams(max_new_tokens=new)
    if fits:
        assert encode([5] * tokens, sampling).size == tokens
    else:
        with pytest.raises(
            RequestError, match=rf"{tokens} tokens \+ max_new_tokens {new} = {tokens + new} .*64"
        ):
            encode([5] * tokens, sampling)


def test_every_id_of_the_vocabulary_is_allowed_and_no_other(encode: Any, tokenizer: Any) -> None:
    size = len(tokenizer)
    assert encode([0, size - 1]).tolist() == [0, size - 1]
    for outside in (size, -1, 2**62):
        with pytest.raises(RequestError, match=rf"token id {outside} .*0 to {size - 1}"):
            encode([0, outside])


def test_ids_that_do_not_fit_a_signed_word_are_outside_too(encode: Any) -> None:
    with pytest.raises(RequestError):
        encode(np.array([2**64 - 1], dtype=np.uint64))


def test_a_fault_found_earlier_is_the_reason(tokenizer: Any) -> None:
    (request,) = resolve_requests([[3]], SamplingParams(max_new_tokens=8), seed=0)
    with pytest.raises(RequestError, match="known before"):
        PromptEncoder(tokenizer, 128, 64).encode(replace(request, fault="known before"))


@pytest.mark.parametrize("family", ["Qwen3MoeConfig", "LlamaConfig"])
def test_a_folder_without_tokenizer_files_has_no_tokenizer(
    family: str, tmp_path: Any, small_config: Any
) -> None:
    config = getattr(transformers, family)(**small_config())
    config.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), trust_remote_code=False) is None
    with pytest.raises(ConfigError, match="cannot load tokenizer"):
        load_tokenizer(str(tmp_path), trust_remote_code=False, required=True)
