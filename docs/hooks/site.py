"""What mkdocs calls when it builds the site: tables of the configuration, files of the repository as pages.

Pages link to files outside docs/ as they lie in the repository (``../examples/grpo.py``). Each file that is
linked becomes a page below source/, so that the site is complete without the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import configuration
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()(\.\./[\w./-]+)(?=\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json"}


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for every file of the repository that a page links to."""
    wanted = {"CHANGELOG.md"}
    for file in files.documentation_pages():
        text = Path(file.abs_src_path or "").read_text(encoding="utf-8")
        wanted.update(name for link in LINK.findall(text) if (name := _outside(file.src_uri, link)))
    for name in sorted(wanted):
        files.append(File.generated(config, f"source/{_page(name)}", content=_source(name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fills in the tables, and turns links to the repository to its pages here."""
    here = page.file.src_uri
    up = "../" * here.count("/")

    def turned(link: re.Match[str]) -> str:
        name = _outside(here, link[1])
        return f"{up}source/{_page(name)}" if name else link[1]

    return configuration.fill_in(LINK.sub(turned, markdown))


def _outside(page: str, link: str) -> str | None:
    """The name in the repository of what a page links to, if it is a file outside docs/."""
    name = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    if name.startswith("docs/"):
        return None
    if not (ROOT / name).is_file():
        raise FileNotFoundError(f"docs/{page} links to {link}, which is no file of the repository")
    return name


def _page(name: str) -> str:
    return name if name.endswith(".md") else f"{name}.md"


def _source(name: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".md"):
        return text.replace("](docs/", "](../")
    return f"# {name}\n\n````{LANGUAGES[Path(name).suffix]}\n{text}````\n"
