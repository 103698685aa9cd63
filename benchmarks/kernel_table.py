"""Print what every kernel variant needs on every architecture, as a Markdown table. Needs no GPU.

python benchmarks/kernel_table.py                        # print it
python benchmarks/kernel_table.py --update docs/kernels.md   # put it into the page
"""

from __future__ import annotations

import argparse
from pathlib import Path

import triton

from rollout_pool.kernels.ahead_of_time import Resources, kernels_of, resources
from rollout_pool.kernels.variants import launches

CAPABILITIES = (80, 90, 100)
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def needs_of(capability: int) -> dict[tuple[str, str], list[Resources]]:
    """By (variant, kernel): one entry for each time the variant launches the kernel."""
    needs: dict[tuple[str, str], list[Resources]] = {}
    for name, call in launches():
        for kernel in kernels_of(capability, call):
            needs.setdefault((name, kernel.metadata.name), []).append(resources(kernel))
    return needs


def cell(found: list[Resources]) -> str:
    """Registers / shared memory / spilled bytes; the most demanding launch."""
    worst = max(found)
    return f"{worst.registers} / {worst.shared} / {worst.spilled}"


def table() -> str:
    columns = [needs_of(capability) for capability in CAPABILITIES]
    lines = [
        f"Triton {triton.__version__}. Each cell: registers per thread / bytes of shared memory per program",
        "/ bytes spilled per thread.",
        "",
        "| variant | kernel | threads | " + " | ".join(f"sm_{c}" for c in CAPABILITIES) + " |",
        "| --- | --- | --- | " + " | ".join("---" for _ in CAPABILITIES) + " |",
    ]
    for name, kernel in columns[0]:
        cells = " | ".join(cell(column[name, kernel]) for column in columns)
        lines.append(f"| {name} | `{kernel}` | {columns[0][name, kernel][0].threads} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", type=Path, metavar="PAGE", help="replace the table in this page")
    page = parser.parse_args().update
    made = table()
    if page is None:
        print(made)
        return
    text = page.read_text()
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    page.write_text(f"{text[:before]}\n\n{made}\n\n{text[after:]}")


if __name__ == "__main__":
    main()
