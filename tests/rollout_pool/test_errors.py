"""The page of errors, the tree at the top of the module, and what the command line makes of each agree."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path

import pytest

import rollout_pool
from rollout_pool import cli, errors

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.RolloutPoolError)
}


def rows() -> dict[str, list[str]]:
    """The cells of every class that the page's table lists."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    return {cells[0].strip("`"): cells[1:] for cells in lines if cells[0].strip("`") in CLASSES}


def test_every_error_is_on_the_page_with_when_and_the_way_out() -> None:
    table = rows()
    assert list(table) == list(CLASSES)
    for name, (when, way_out, _) in table.items():
        assert when, name
        assert way_out, name
        (parent,) = (
            base for base in CLASSES[name].__bases__ if base.__name__ in CLASSES or base is Exception
        )
        if parent is not errors.RolloutPoolError and parent is not Exception:
            assert f"`{parent.__name__}`:" in when, name


@pytest.mark.parametrize("name", CLASSES)
def test_the_command_line_ends_with_the_status_on_the_page(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise CLASSES[name]("what is wrong; the way out")

    monkeypatch.setattr(cli._COMMANDS["verify"], "run", fail)
    assert cli.main(["verify", "--model", "m", "o.jsonl"]) == int(rows()[name][2])
    assert capsys.readouterr().err == "rollout-pool verify: what is wrong; the way out\n"


@pytest.mark.parametrize("name", CLASSES)
def test_an_error_is_public_stands_in_the_tree_and_crosses_processes(name: str) -> None:
    assert f"── {name}" in (errors.__doc__ or "") or name == "RolloutPoolError"
    assert getattr(rollout_pool, name) is CLASSES[name]
    copy = pickle.loads(pickle.dumps(CLASSES[name]("a message")))
    assert (type(copy), str(copy)) == (CLASSES[name], "a message")
