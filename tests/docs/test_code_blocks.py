"""What pages show runs: every fenced block of the README and of the pages that say how to do something.

A page's python blocks run in order, in one namespace and one folder, where ``path/to/model`` and the demo model's
folder are a tiny random model. A comment before a block changes that, invisibly for readers:

    <!-- setup ... -->          python that runs at this place and is not shown
    <!-- not run: reason -->    the next block is checked (compiled, parsed) and not run;
                                "as in docs/x.md": its commands are run with that page

Commands: ``rollout-pool`` runs in this process, plain shell in a shell; of others it is checked that what they name
exists (targets of make, files, extras).
"""

from __future__ import annotations

import ast
import gc
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_pool.cli import _parser, main
from rollout_pool.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PIECE = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->"
    r"|^<!-- not run: (?P<reason>[^>]+?) -->"
    r"|^(?P<fence>```+)(?P<language>\S*)\n(?P<code>.*?)^(?P=fence)$",
    re.DOTALL | re.MULTILINE,
)
PROGRAMS = {"curl", "kubectl", "nvidia-smi", "ray", "torchrun", "vllm"}  # of others: what they take is theirs
SHELL = {"echo", "printf", "export", "cat", "head", "mkdir"}
DEMO = Path(".cache/rollout-pool/SmolLM2-135M-Instruct")


@dataclass(frozen=True)
class Block:
    """One fenced block, or hidden python (``is_setup``)."""

    page: Path
    line: int
    language: str
    code: str
    reason: str | None = None
    is_setup: bool = False

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def compiled(self) -> Any:
        """With the lines of the page, so that a traceback shows them."""
        return compile("\n" * (self.line - 1) + self.code, str(self.page), "exec")


def blocks_of(page: Path) -> list[Block]:
    text, found, reason = page.read_text(encoding="utf-8"), [], None
    for piece in PIECE.finditer(text):
        if piece["reason"]:
            reason = " ".join(piece["reason"].split())
            continue
        is_setup = piece["setup"] is not None
        start = piece.start("setup" if is_setup else "code")
        line = text.count("\n", 0, start) + 1
        language, code = ("python", piece["setup"]) if is_setup else (piece["language"], piece["code"])
        found.append(Block(page, line, language, code, reason, is_setup))
        reason = None
    assert reason is None, f"{page}: a comment 'not run' without a block behind it"
    return found


def how_to_pages() -> list[Path]:
    """The README and those under "Get started" and "How to" in the navigation of the site."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    sections = {title: pages for entry in nav if isinstance(entry, dict) for title, pages in entry.items()}
    names = [
        name for title in ("Get started", "How to") for entry in sections[title] for name in entry.values()
    ]
    return [
        ROOT / "README.md",
        DOCS / "configuration.md",
        DOCS / "colocated.md",
        *(DOCS / name for name in names),
    ]


PAGES = how_to_pages()
OTHERS = sorted(set(DOCS.rglob("*.md")) - set(PAGES))


def is_run(block: Block) -> bool:
    return block.reason is None and block.language in ("python", "bash")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)
def test_every_block_is_what_it_says(page: Path) -> None:
    for block in blocks_of(page):
        match block.language:
            case "python":
                ast.parse(block.code)
            case "yaml":
                described = yaml.safe_load(block.code)
                if page in PAGES:
                    RunConfig.parse(described, block.place)
            case "json":
                json.loads(block.code)
            case "bash":
                for command in commands_of(block):
                    check_command(command, block)
            case "text":
                pass
            case _:
                raise AssertionError(
                    f"{block.place}: nobody checks {block.language!r}; text is checked by none"
                )


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)
def test_every_line_that_is_indented_as_a_command_is_one(page: Path) -> None:
    """Older pages indent their commands; forms like ``[--resume]`` and ``FILE`` describe, and do not stand here."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        words = line.strip().removeprefix("$ ").split("   ")[0].split(" #")[0]
        if line.startswith("    rollout-pool ") and not re.search(r"\[|\b[A-Z]{4,}\b", words):
            check_command(shlex.split(words), Block(page, number, "bash", line))


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of every command; a line that ends with a backslash goes on."""
    for line in block.code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_left_to_another_page_is_run_there(page: Path) -> None:
    for block in blocks_of(page):
        if (block.reason or "").startswith("as in "):
            other = ROOT / str(block.reason).removeprefix("as in ")
            assert other in PAGES
            there = [words for run in filter(is_run, blocks_of(other)) for words in commands_of(run)]
            assert [
                words for words in commands_of(block) if words not in there and words[0] != "source"
            ] == []


def check_command(words: list[str], block: Block) -> None:
    while "=" in words[0]:  # variables before a command
        words = words[1:]
    match words:
        case ["rollout-pool", *arguments]:
            try:
                _parser().parse_args(arguments)
            except SystemExit as end:
                if end.code:  # 0 after --help and --version
                    raise AssertionError(f"{block.place}: {' '.join(words)}") from end
        case ["make", *targets]:
            known = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert {target for target in targets if "=" not in target} <= set(known), block.place
        case ["pip", "install", *what]:
            project = (ROOT / "pyproject.toml").read_text()
            for extra in re.findall(r"\[(.*?)\]", " ".join(what)):
                assert all(f"\n{name} = [" in project for name in extra.split(",")), block.place
        case ["python" | "torchrun", *arguments]:
            (script,) = (word for word in arguments if word.endswith(".py"))
            source = (ROOT / script).read_text()
            for option in re.findall(r" (--[\w-]+)", " ".join(arguments).partition(script)[2]):
                assert f'"{option}"' in source, f"{block.place}: {option}"
        case ["source", ".venv/bin/activate"]:
            pass
        case [program, *_]:
            assert program in PROGRAMS | SHELL, f"{block.place}: {program}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: str) -> Path:
    """What every page's folder starts as."""
    folder = tmp_path_factory.mktemp("pages") / "model"
    shutil.copytree(tiny_model_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 4096  # rotary: there is no table of positions
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for one page: the model where pages have it, and what a checkout has."""
    for link, target in {Path("path/to/model"): place, DEMO: place}.items():
        (tmp_path / link).parent.mkdir(parents=True)
        (tmp_path / link).symlink_to(target)
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("page", [page for page in PAGES if any(map(is_run, blocks_of(page)))], ids=name_of)
def test_every_block_runs(page: Path, here: Path) -> None:
    environment = dict(os.environ)
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for block in blocks_of(page):
            if block.language == "python" and is_run(block):
                exec(block.compiled(), names)
            elif is_run(block):
                for words in commands_of(block):
                    run_command(words, block)
    finally:
        end_pools(names)
        os.environ.clear()
        os.environ.update(environment)


def run_command(words: list[str], block: Block) -> None:
    if words[0] == "rollout-pool":
        assert main(words[1:]) == 0, f"{block.place}: {' '.join(words)}"
    elif words[0] in SHELL:
        line = next(line for line in block.code.splitlines() if shlex.split(line, comments=True) == words)
        subprocess.run(["bash", "-euc", line], check=True)


def end_pools(names: dict[str, Any]) -> None:
    """The next page wants the cores."""
    import ray

    for value in names.values():
        if isinstance(value, ray.actor.ActorHandle):
            ray.kill(value)
    names.clear()
    gc.collect()
