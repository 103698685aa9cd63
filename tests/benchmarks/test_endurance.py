"""`benchmarks/endurance.py` runs, and a pool that has answered many calls is as small as before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "endurance.py"


@pytest.mark.slow
def test_a_pool_does_not_grow_with_its_calls(tiny_model_dir: str, tmp_path: Path) -> None:
    out, picture = tmp_path / "endurance.json", tmp_path / "endurance.png"
    command = [sys.executable, str(SCRIPT), "--model", tiny_model_dir, "--calls", "120", "--every", "4"]
    done = subprocess.run(
        [*command, "--json", str(out), "--plot", str(picture)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "720 groups in, 0 in flight" in done.stdout
    lines = json.loads(out.read_text(encoding="utf-8"))["report"]
    assert {line["process"] for line in lines} == {"driver", "pool", "actor-0", "actor-1", "all nodes"}
    for line in lines:
        slack = {"resident": 30.0, "files": 4.0, "threads": 4.0}.get(line["quantity"], 1.0)
        assert line["last"] <= line["first"] + slack, line
    assert picture.read_bytes().startswith(b"\x89PNG")
