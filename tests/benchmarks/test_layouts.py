"""`benchmarks/layouts.py` runs, and says of both layouts what it promises to say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "layouts.py"


@pytest.mark.slow
def test_the_benchmark_of_layouts_runs_on_a_tiny_model(tiny_model_dir: str, tmp_path: Path) -> None:
    out = tmp_path / "layouts.json"
    command = [
        sys.executable,
        str(SCRIPT),
        "--small",
        "--rounds",
        "1",
        "--threads",
        "1",
        "--workloads",
        "chat",
    ]
    done = subprocess.run(
        [*command, "--model", tiny_model_dir, "--json", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "chat: aligned takes " in done.stdout
    result = json.loads(out.read_text(encoding="utf-8"))["chat"]
    assert result["same_samples"] == result["samples"] == 24
    assert len(result["ratios"]) == 1
    (ragged,), (aligned,) = result["rounds"]["ragged"], result["rounds"]["aligned"]
    assert ragged["tokens"] == aligned["tokens"] > 0
    assert ragged["kv_bytes"] == aligned["kv_bytes"] > 0
    assert (ragged["trims"], ragged["trimmed_bytes"]) == (0, 0)
    assert aligned["trims"] > 0
    assert aligned["trimmed_bytes"] > 0
    assert 0 < aligned["peak_bytes"] < 1 << 30
