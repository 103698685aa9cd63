"""Tables of every key of the configuration: type and default from the models, meaning from their docstrings.

A page asks for one by a comment, ``<!-- keys: EngineConfig -->``.
"""

from __future__ import annotations

import functools
import re
import types
import typing
from typing import Any

import griffe
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rollout_pool.config import EngineConfig, PoolConfig
from rollout_pool.types import SamplingParams

MODELS: dict[str, type[BaseModel]] = {
    model.__name__: model for model in (PoolConfig, EngineConfig, SamplingParams)
}
MARK = re.compile(r"<!-- keys: (\w+) -->")
NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null"}
BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


def fill_in(markdown: str) -> str:
    """``markdown`` with a table in place of every mark."""
    return MARK.sub(lambda mark: table(MODELS[mark[1]]), markdown)


def table(model: type[BaseModel]) -> str:
    """One row per key, in the order of the model."""
    rows = ["| key | type | default | |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        meaning = cell(meaning_of(model, name))
        rows.append(f"| `{name}` | {type_of(field)} | {default_of(field)} | {meaning} |")
    return "\n".join(rows)


def meaning_of(model: type[BaseModel], name: str) -> str:
    """The docstring below the field, in this model or the one that it comes from."""
    for place in model.__mro__:
        if name in vars(place).get("__annotations__", {}):
            documented = _source(place.__module__)[place.__name__][name]
            if documented.docstring is None:
                raise LookupError(f"{place.__module__}.{place.__name__}.{name} has no docstring")
            return str(documented.docstring.value)
    raise LookupError(f"{model.__name__} has no field {name}")


@functools.cache
def _source(module: str) -> Any:
    return griffe.load(module, search_paths=["."])


def type_of(field: FieldInfo) -> str:
    """In words: what may stand there in YAML, and its bounds."""
    bounds = []
    for item in field.metadata:
        found = [(words, getattr(item, key)) for key, words in BOUNDS.items() if hasattr(item, key)]
        bounds += [words.format("2^63" if bound == 2**63 else bound) for words, bound in found]
        if hasattr(item, "min_length"):
            bounds.append("not empty")
    return ", ".join([in_words(field.annotation), *bounds])


def in_words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(in_words(argument) for argument in arguments)
    if origin is tuple:
        return f"one or a list: {in_words(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section"
    return NAMES[annotation]


def default_of(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return ""
    if field.default is PydanticUndefined:
        return "required"
    plain = {None: "null", True: "true", False: "false", (): "none"}
    is_plain = isinstance(field.default, (bool, tuple, type(None)))
    return f"`{plain[field.default] if is_plain else field.default}`"


def cell(text: str) -> str:
    """A docstring as the cell of a table."""
    return " ".join(text.replace("|", r"\|").split())
