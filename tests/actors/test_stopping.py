"""Stop strings as text grows: with characters split over tokens, spaces that move, and late matches."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rollout_pool.actors.stopping import StopWatch

quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def byte_level() -> Any:
    """GPT-2's kind: every token is some bytes, characters may be split, a space belongs to its word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["<eos>", *alphabet])}
    merges = []
    for left, right in [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ã", "©"), ("ð", "Ł"), ("s", "t")]:
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    core = Tokenizer(models.BPE(vocab, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def sentence_piece() -> Any:
    """Llama 2's kind: words begin with a mark, the first space of a text is dropped, bytes fall back."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = [
        "<eos>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁the",
        "▁a",
        "s",
        "t",
        "o",
        "p",
        "▁st",
        "op",
        "é",
    ]
    core = Tokenizer(
        models.BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


@pytest.fixture(scope="module", params=["characters", "byte-level", "sentence-piece"])
def tokenizer(request: Any, tiny_model_dir: str) -> Any:
    if request.param == "characters":
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(tiny_model_dir)
    return byte_level() if request.param == "byte-level" else sentence_piece()


def text_of(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.fixture(scope="module")
def pieces(tokenizer: Any) -> list[list[int]]:
    """Token sequences that are whole characters: single tokens, and characters that take several."""
    single = [[token] for token in range(1, len(tokenizer)) if REPLACEMENT not in text_of(tokenizer, [token])]
    return (
        single
        + [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("é", "🙂", "é 🙂s")] * 20
    )


@quick
@given(data=st.data())
def test_growing_text_is_the_text_of_all_tokens(data: Any, tokenizer: Any, pieces: list[list[int]]) -> None:
    """Incremental text equals the whole text, except while a character is not whole."""
    tokens = [token for piece in data.draw(st.lists(st.sampled_from(pieces), max_size=25)) for token in piece]
    watch = StopWatch(tokenizer, ("\x00never\x00",))
    for number, token in enumerate(tokens, start=1):
        assert watch.push(token) is False
        whole = text_of(tokenizer, tokens[:number])
        if not whole.endswith(REPLACEMENT):
            assert watch.text == whole
    assert watch.match is None


@quick
@given(data=st.data())
def test_bytes_that_are_no_text_do_no_harm(data: Any, tokenizer: Any) -> None:
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    watch = StopWatch(tokenizer, ("\x00never\x00",))
    assert not any(watch.push(token) for token in tokens)
    assert len(watch.text) <= len(text_of(tokenizer, tokens))


@quick
@given(data=st.data())
def test_a_match_comes_with_the_token_that_completes_it(
    data: Any, tokenizer: Any, pieces: list[list[int]]
) -> None:
    tokens = [
        token
        for piece in data.draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=20))
        for token in piece
    ]
    whole = text_of(tokenizer, tokens)
    assume(whole)
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[start : start + data.draw(st.integers(1, 6))]
    other = data.draw(st.sampled_from(["\x00never\x00", whole[-3:], whole[:1]]))
    watch = StopWatch(tokenizer, (other, stop))
    for number, token in enumerate(tokens, start=1):
        so_far = text_of(tokenizer, tokens[:number])
        complete = not so_far.endswith(REPLACEMENT)
        places = {text: so_far.find(text) for text in (other, stop) if complete and text in so_far}
        matched = watch.push(token)
        assert matched == bool(places)
        if matched:
            first = min(places.values())
            assert watch.text == so_far[:first]
            longest = max((text for text, at in places.items() if at == first), key=len)
            assert watch.match == longest
            return
    pytest.fail("the whole text holds the string")


def feed(watch: StopWatch, tokenizer: Any, text: str) -> bool:
    """Push a text's tokens until there is a match, as the engine does."""
    return any(watch.push(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def letters(tiny_model_dir: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)


def test_a_character_in_two_tokens_is_waited_for() -> None:
    tokenizer = byte_level()
    watch = StopWatch(tokenizer, ("é!",))
    ids = [*tokenizer("caf", add_special_tokens=False)["input_ids"]]
    split = [tokenizer.convert_tokens_to_ids(piece) for piece in ("Ã", "©", "!")]
    assert [watch.push(token) for token in [*ids, *split]] == [False] * (len(ids) + 2) + [True]
    assert watch.text == "caf"


@pytest.mark.parametrize(
    ("stop", "text", "match"),
    [
        (("ab", "abc"), "xabc", "ab"),
        (("abc", "xa"), "xabc", "xa"),
        (("q", "abc"), "aabcq", "abc"),
        ((" end",), "the end", " end"),
        (("\n\n",), "a\nb\n\nc", "\n\n"),
    ],
)
def test_the_earliest_match_counts(stop: tuple[str, ...], text: str, match: str, letters: Any) -> None:
    watch = StopWatch(letters, stop)
    assert feed(watch, letters, text)
    assert watch.match == match
    assert watch.text == text[: text.index(match)]


def test_no_string_counts_that_is_complete_before_min_new_tokens(letters: Any) -> None:
    watch = StopWatch(letters, ("ab", "a long string"), min_new_tokens=4)
    ids = [letters.convert_tokens_to_ids(character) for character in "xabyzab"]
    assert [watch.push(token) for token in ids] == [False] * 6 + [True]
    assert watch.text == "xabyz"
    assert watch.match == "ab"


def test_a_string_that_is_completed_by_the_token_number_min_new_counts(letters: Any) -> None:
    watch = StopWatch(letters, ("bcd",), min_new_tokens=4)
    ids = [letters.convert_tokens_to_ids(character) for character in "abcd"]
    assert [watch.push(token) for token in ids] == [False, False, False, True]


def test_special_tokens_are_not_text(letters: Any) -> None:
    watch = StopWatch(letters, ("ab",))
    eos = letters.eos_token_id
    a, b = (letters.convert_tokens_to_ids(character) for character in "ab")
    assert [watch.push(token) for token in (a, eos, eos, b)] == [False, False, False, True]
