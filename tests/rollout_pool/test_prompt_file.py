"""Prompt files: every form of a line, and the place of every mistake."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout_pool.errors import InputFileError
from rollout_pool.prompt_file import PromptFormat, PromptLine, read_prompts
from rollout_pool.run_config import RunConfig
from rollout_pool.types import SamplingParams

CONFIG = RunConfig.load(None, {"model": "m", "seed": 7, "sampling.n": 2, "sampling.temperature": 0.5})


def read(
    folder: Path, data: str | bytes, name: str = "p.jsonl", form: PromptFormat = "auto"
) -> list[PromptLine]:
    file = folder / name
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    return read_prompts(str(file), CONFIG, form)


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ('"a \\"text\\""', 'a "text"'),
        ("[1, 2, 3]", [1, 2, 3]),
        ('[{"role": "user", "content": "hi"}]', [{"role": "user", "content": "hi"}]),
        ('{"prompt": "text"}', "text"),
        ('{"prompt": [4, 5]}', [4, 5]),
        ('{"messages": [{"role": "user", "content": "hi"}]}', [{"role": "user", "content": "hi"}]),
        ('{"prompt_token_ids": [6]}', [6]),
        ('{"prompt_token_ids": []}', []),  # the engine says what is wrong with an empty prompt
        ('""', ""),
        ('"caf\u00e9 \u2028 \\ud83d\\ude00"', "caf\u00e9 \u2028 \U0001f600"),
    ],
)
def test_every_form_of_a_json_line(tmp_path: Path, line: str, prompt: Any) -> None:
    (found,) = read(tmp_path, line)
    assert found.request.prompt == prompt


def test_a_line_may_say_everything_about_its_request(tmp_path: Path) -> None:
    line = (
        '{"prompt": "x", "request_id": "a", "seed": 3, "sample_offset": 2, "metadata": {"answer": "4"}, '
        '"sampling": {"n": 5, "stop": ["\\n"]}}'
    )
    (found,) = read(tmp_path, line)
    assert found.sampling == SamplingParams(n=5, temperature=0.5, stop=("\n",))
    request = found.request
    assert (request.request_id, request.seed, request.sample_offset) == ("a", 3, 2)
    assert (request.metadata, request.sampling) == ({"answer": "4"}, found.sampling)


def test_what_a_line_leaves_open_comes_from_the_run(tmp_path: Path) -> None:
    first, second, third = read(tmp_path, '"x"\n\n  \n{"prompt": "y", "sampling": {"seed": 4}}\n"z"')
    assert [line.index for line in (first, second, third)] == [0, 1, 2]
    assert [line.request.request_id for line in (first, second, third)] == [0, 1, 2]
    assert [line.request.seed for line in (first, second, third)] == [7, 4, 7]
    assert first.sampling == CONFIG.sampling


@pytest.mark.parametrize(
    ("name", "form", "data", "expected"),
    [
        ("p.txt", "auto", "one\r\n\n two \n", ["one", " two "]),
        ("p.txt", "auto", '\n"one"\n', ["one"]),
        ("p.txt", "auto", '{"prompt": "one"}', ["one"]),
        ("p.txt", "text", '"one"', ['"one"']),
        ("prompts", "auto", "[1, 2]", [[1, 2]]),
        ("p.jsonl", "text", "[1, 2]", ["[1, 2]"]),
        ("p.txt", "auto", "\ufeffone\ntwo\u2028still two\x0cand here\n", ["one", "two\u2028still two\x0cand here"]),
        ("p.txt", "auto", "not json\n[1, 2]\n", ["not json", "[1, 2]"]),
    ],
)  # fmt: skip
def test_the_form_comes_from_name_or_first_line(
    tmp_path: Path, name: str, form: PromptFormat, data: str, expected: list[Any]
) -> None:
    assert [line.request.prompt for line in read(tmp_path, data, name, form)] == expected


def test_prompts_come_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    assert [line.request.prompt for line in read_prompts("-", CONFIG)] == ["one", "two"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('"x"\n\n{"prompt": \n', "p.jsonl, line 3: not valid JSON: Expecting value (column 12)"),
        ("plain text\n", "line 1: not valid JSON"),
        ('{"prompt": "x"} extra', "line 1: not valid JSON: Extra data"),
        ('{"prompt": NaN}', "line 1: not valid JSON: NaN is no JSON number"),
        ('"\\ud800"', "line 1: holds half of a surrogate pair"),
        ("[" * 100_000, "line 1: not valid JSON: nested too deeply"),
        ("12", "line 1: expected a string, a list of token ids or a list of chat messages, got 12"),
        ("null", "line 1: expected a string, a list of token ids or a list of chat messages, got null"),
        ('["a", 1]', "got a list of int and str"),
        ("[true]", "got a list of bool"),
        ("[1.5]", "got a list of float"),
        ('[{"content": "no role"}]', "got a list of dict"),
        ("{}", "line 1: expected one of prompt, messages and prompt_token_ids, found none"),
        ('{"prompt": "x", "messages": []}', "found prompt and messages"),
        ('{"messages": "x"}', 'messages: expected a list of objects with a role each, got a string'),
        ('{"messages": []}', "messages: expected a list of objects with a role each, got an empty list"),
        ('{"prompt_token_ids": "x"}', "prompt_token_ids: expected a list of integers"),
        ('{"prompt": "x", "metdata": 1}', "metdata: unknown key; did you mean 'metadata'?"),
        ('{"prompt": "x", "zzz": 1}', "zzz: unknown key; known keys: prompt, messages"),
        ('{"prompt": "x", "seed": -1}', "seed: expected an integer from 0 to 2**63 - 1, got -1"),
        ('{"prompt": "x", "seed": 9223372036854775808}', "seed: expected an integer"),
        ('{"prompt": "x", "sample_offset": true}', "sample_offset: expected an integer"),
        ('{"prompt": "x", "request_id": [1]}', "request_id: expected a string or an integer, got a list of int"),
        ('{"prompt": "x", "sampling": 3}', "sampling: expected an object, got 3"),
        ('{"prompt": "x", "sampling": {"n": 0}}', "sampling.n: Input should be greater than or equal to 1, got 0"),
        ('{"prompt": "x", "sampling": {"topp": 1}}', "sampling.topp: unknown key; did you mean 'top_p'?"),
        ('{"prompt": "x", "request_id": "1"}\n"y"', "line 2: request_id '1' is that of line 1 already"),
        ("\n \n", "p.jsonl holds no prompts"),
        ("", "p.jsonl holds no prompts"),
        (b'"ok"\n"\xff"', "p.jsonl, line 2: not UTF-8 text"),
    ],
)  # fmt: skip
def test_a_mistake_names_file_and_line(tmp_path: Path, data: str | bytes, message: str) -> None:
    with pytest.raises(InputFileError) as caught:
        read(tmp_path, data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="cannot read .*: No such file or directory"):
        read_prompts(str(tmp_path / "none.jsonl"), CONFIG)
    with pytest.raises(InputFileError, match="cannot read .*: Is a directory"):
        read_prompts(str(tmp_path), CONFIG)


def test_one_request_may_be_split_by_sample_offset(tmp_path: Path) -> None:
    data = '{"prompt": "x", "request_id": "a"}\n{"prompt": "x", "request_id": "a", "sample_offset": 2}'
    assert [line.request.sample_offset for line in read(tmp_path, data)] == [0, 2]


def test_the_hash_of_a_line_changes_with_what_it_says_only(tmp_path: Path) -> None:
    hashes = [
        line.prompt_hash for line in read(tmp_path, '"x"\n{"prompt":"x"}\n{"prompt":"x","seed":1}\n"y"')
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
