"""Put measured tables into a page, between its markers.

    python benchmarks/render.py docs/performance.md bench=main.json quick=quick.json breakdown=steps.json

A page has pairs of lines `<!-- bench -->` and `<!-- end bench -->`; what stands between them is replaced by
the tables of the file given under that name. Nobody types figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out

from speed import table
from speed.steps import step_tables


def rendered(page: str, name: str, text: str) -> str:
    """The page with ``text`` between the markers of ``name``. Raises SystemExit when it has none."""
    begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"the page has no lines {begin} and {end}")
    return f"{head}{begin}\n\n{text}\n\n{end}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path)
    parser.add_argument("results", nargs="*", help="NAME=FILE.json")
    arguments = parser.parse_args()
    page = arguments.page.read_text(encoding="utf-8")
    for pair in arguments.results:
        name, _, file = pair.partition("=")
        results = json.loads(Path(file).read_text(encoding="utf-8"))
        text = step_tables(results) if "steps" in results else table.tables(results)
        page = rendered(page, name, text)
    arguments.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
