"""A short storm over real engines; `make chaos` runs long ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("storm.py")


@pytest.mark.slow
def test_a_short_storm_loses_nothing_and_changes_nothing(tmp_path: Path) -> None:
    report = tmp_path / "storm.json"
    command = [
        sys.executable,
        str(SCRIPT),
        "--seeds",
        "1",
        "--first",
        "2",
        "--events",
        "5",
        "--json",
        str(report),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found = json.loads(report.read_text())
    assert sum(line["events"] for line in found["events"]) == 5
    assert found["calls"] >= 2
    struck = [line for line in found["events"] if line["recovered"] is not None]
    assert struck
    assert all(line["recovered"] == line["events"] for line in struck)
