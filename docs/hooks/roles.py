"""Docstrings name things by Sphinx's roles, which Markdown does not know."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`~?([\w.]+)`")
PAGE = re.compile(r"`{0,2}docs/([\w/]+)\.md`{0,2}")


class Roles(griffe.Extension):
    """Turns roles into code, names of pages into links, and the double colon before an example into one."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(_code, obj.docstring.value)
            obj.docstring.value = PAGE.sub(r"[docs/\1.md](../\1.md)", obj.docstring.value)
            obj.docstring.value = re.sub(r"(?m)^(.*)::$", r"\1:", obj.docstring.value)


def _code(role: re.Match[str]) -> str:
    return f"`{role[1].rpartition('.')[2]}`"
