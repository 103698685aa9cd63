"""The documentation site builds without a warning, is complete, and asks nothing of a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_pool.config import EngineConfig, PoolConfig
from rollout_pool.types import SamplingParams

pytest.importorskip("mkdocs", reason="needs rollout-pool[docs]")

ROOT = Path(__file__).resolve().parents[2]
# What a browser fetches to show a page; links that a reader may follow are something else.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?([^\"' >]+)|<link\b[^>]*\bhref=[\"']?([^\"' >]+)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does: mkdocs.yml makes errors of warnings."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "Documentation built" in done.stderr
    )  # with less than that shown, mkdocs does not count warnings either
    return folder


def test_every_page_is_built_and_fetches_from_itself_alone(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    written = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert written <= {page.relative_to(site).with_suffix(".md") for page in pages}
    for page in pages:
        for script, link in FETCHED.findall(page.read_text(encoding="utf-8")):
            assert not re.match(r"https?:|//", script or link), f"{page.name}: {script or link}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style.name


@pytest.mark.parametrize(
    "model", [PoolConfig, EngineConfig, SamplingParams], ids=lambda model: model.__name__
)
def test_every_key_stands_in_the_reference_with_its_meaning(site: Path, model: type) -> None:
    page = (site / "configuration.html").read_text(encoding="utf-8")
    rows = dict(re.findall(r"<tr>\s*<td><code>(\w+)</code></td>(.*?)</tr>", page, re.DOTALL))
    for name in model.model_fields:
        cells = [
            re.sub("<.*?>", "", cell).strip() for cell in re.findall(r"<td>(.*?)</td>", rows[name], re.DOTALL)
        ]
        kind, _, meaning = cells
        assert kind, name
        assert len(meaning) > 15, f"{name} has no docstring"


def test_every_public_name_stands_in_the_api_reference(site: Path) -> None:
    import rollout_pool

    pages = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    pages += (site / "configuration.html").read_text(encoding="utf-8")
    for name in set(rollout_pool.__all__) - {"__version__"}:
        assert re.search(rf'id="rollout_pool[\w.]*\.{name}"|<code>{name}</code>', pages), name
