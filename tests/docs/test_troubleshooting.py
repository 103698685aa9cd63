"""Every message that the troubleshooting page explains is one that the code can say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOLE = "…"
"""What a page writes for a name or a number, and what stands here for a part that the code fills in."""


def messages() -> list[str]:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^### `(.*)`$", page, re.MULTILINE)


def template(node: ast.AST) -> str | None:
    """The text of a string in the source, with a hole for each part that is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub("%[sd]", HOLE, text)  # of a log line
        case ast.JoinedStr(values=values):
            return "".join(template(value) or HOLE for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (template(left) or HOLE) + (template(right) or HOLE)
        case _:
            return None


def templates() -> Iterator[str]:
    for package in ("rollout_pool", "actors"):
        for path in sorted((ROOT / package).rglob("*.py")):
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            said = (template(node) for node in nodes if id(node) not in docstrings)
            yield from (text for text in said if text and " " in text)


@pytest.fixture(scope="module")
def said() -> str:
    """All that the code can say, a text per line."""
    return "\n".join(re.sub(f"{HOLE}+", HOLE, " ".join(text.split())) for text in set(templates()))


@pytest.mark.parametrize("message", messages())
def test_the_code_says_so(message: str, said: str) -> None:
    words = re.sub(f"[^a-z]|{HOLE}", "", message)
    assert len(words) >= 8, "too little to know a message by"
    assert message.strip(HOLE) in said


def test_a_message_that_was_reworded_is_noticed(said: str) -> None:
    assert "the pool was closed down" not in said
    assert len(set(messages())) == len(messages()) > 50
