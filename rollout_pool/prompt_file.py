"""Prompts from a file or from standard input: JSONL, or plain text with one prompt per line.

A JSONL line is a string, a list of token ids, a list of chat messages, or an object with one of
``prompt``, ``messages`` and ``prompt_token_ids`` and, as it likes, ``request_id``, ``seed``,
``sampling`` (single keys over those of the run), ``sample_offset`` and ``metadata``. Blank lines
are skipped. A name that ends in ``.jsonl`` means JSONL; otherwise the file is JSONL when its
first line starts with ``{``, ``[`` or ``"``, and text when it does not.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollout_pool.errors import ConfigError, InputFileError
from rollout_pool.run_config import RunConfig, short_hash
from rollout_pool.types import MAX_SEED, RolloutRequest, SamplingParams

PromptFormat = Literal["auto", "jsonl", "text"]
_PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
_KEYS = (*_PROMPT_KEYS, "request_id", "seed", "sampling", "sample_offset", "metadata")


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One prompt of a file, with everything that its result depends on made explicit."""

    index: int
    """Counts prompts from 0; blank lines do not count."""
    request: RolloutRequest
    sampling: SamplingParams
    prompt_hash: str
    """Of what the line says, so that a resumed run notices a changed line."""


class _Fault(Exception):
    """What is wrong with a line, before file and line number are added."""


def read_prompts(path: str, config: RunConfig, form: PromptFormat = "auto") -> list[PromptLine]:
    """Read all prompts of ``path`` (``-``: standard input) under the run's sampling and seed.

    Raises :class:`InputFileError` with file and line of the first fault.
    """
    name = "standard input" if path == "-" else path
    lines = [(number, line) for number, line in _lines(path, name) if line.strip()]
    if not lines:
        raise InputFileError(f"{name} holds no prompts; write one per line")
    if form == "auto":
        is_jsonl = path.endswith(".jsonl") or lines[0][1].lstrip()[0] in '{["'
        form = "jsonl" if is_jsonl else "text"
    prompts: list[PromptLine] = []
    taken: dict[tuple[str, int], int] = {}
    for index, (number, line) in enumerate(lines):
        try:
            value = line if form == "text" else _json(line)
            prompt = _prompt_line(value, index, config)
            key = (str(prompt.request.request_id), prompt.request.sample_offset)
            if key in taken:
                name_there = f"request_id {_cut(repr(key[0]))}"
                raise _Fault(f"{name_there} is that of line {taken[key]} already; each may occur once")
        except _Fault as fault:
            raise InputFileError(f"{name}, line {number}: {fault}") from None
        taken[key] = number
        prompts.append(prompt)
    return prompts


def _lines(path: str, name: str) -> Iterator[tuple[int, str]]:
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise InputFileError(
            f"cannot read {name}: {error.strerror}; name a file with one prompt per line"
        ) from None
    # Not splitlines(): that also splits at characters which may stand inside a prompt (U+2028).
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            yield number, raw.removesuffix(b"\r").decode()
        except UnicodeDecodeError:
            raise InputFileError(f"{name}, line {number}: not UTF-8 text; save the file as UTF-8") from None


def _json(line: str) -> Any:
    def refuse(constant: str) -> None:
        raise _Fault(f"not valid JSON: {constant} is no JSON number")

    try:
        value = json.loads(line, parse_constant=refuse)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _Fault(
            f"not valid JSON: {error.msg} (column {error.colno}); each line holds one JSON value"
        ) from None
    except UnicodeEncodeError:
        raise _Fault("holds half of a surrogate pair, which is no character; write both halves") from None
    except RecursionError:
        raise _Fault("not valid JSON: nested too deeply; each line holds one prompt") from None
    return value


def _prompt_line(value: Any, index: int, config: RunConfig) -> PromptLine:
    fields = value if isinstance(value, dict) else {"prompt": value}
    for key in fields:
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(_KEYS)}"
            raise _Fault(f"{_cut(key)}: unknown key; {hint}")
    sampling = _sampling(fields.get("sampling"), config.sampling)
    seed = _integer(fields, "seed")
    request_id = fields.get("request_id")
    if isinstance(request_id, bool) or not isinstance(request_id, (str, int, type(None))):
        raise _Fault(f"request_id: expected a string or an integer, got {_kind(request_id)}")
    request = RolloutRequest(
        prompt=_prompt(fields),
        sampling=sampling,
        seed=next(s for s in (seed, sampling.seed, config.seed) if s is not None),
        request_id=index if request_id is None else request_id,
        sample_offset=_integer(fields, "sample_offset") or 0,
        metadata=fields.get("metadata"),
    )
    return PromptLine(index, request, sampling, short_hash(fields))


def _prompt(fields: dict[str, Any]) -> Any:
    given = [key for key in _PROMPT_KEYS if key in fields]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise _Fault(f"expected one of prompt, messages and prompt_token_ids, found {found}")
    key, value = given[0], fields[given[0]]
    is_ids = isinstance(value, list) and all(type(item) is int for item in value)
    is_chat = (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in value)
    )
    if key == "prompt" and not (isinstance(value, str) or is_ids or is_chat):
        raise _Fault(f"expected a string, a list of token ids or a list of chat messages, got {_kind(value)}")
    if key == "messages" and not is_chat:
        raise _Fault(f"messages: expected a list of objects with a role each, got {_kind(value)}")
    if key == "prompt_token_ids" and not is_ids:
        raise _Fault(f"prompt_token_ids: expected a list of integers, got {_kind(value)}")
    return value


def _sampling(value: Any, default: SamplingParams) -> SamplingParams:
    if value is None:
        return default
    if not isinstance(value, dict):
        raise _Fault(f"sampling: expected an object, got {_kind(value)}")
    try:
        return SamplingParams(**{**default.model_dump(), **value})
    except ConfigError as error:
        raise _Fault(f"sampling.{error}") from None


def _integer(fields: dict[str, Any], key: str) -> int | None:
    value = fields.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < MAX_SEED):
        raise _Fault(f"{key}: expected an integer from 0 to 2**63 - 1, got {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    """What a JSON value is, in words and short enough for one line."""
    if isinstance(value, list):
        inner = sorted({type(item).__name__ for item in value})
        return f"a list of {' and '.join(inner)}" if inner else "an empty list"
    if isinstance(value, dict):
        return "an object"
    return "a string" if isinstance(value, str) else _cut(json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
