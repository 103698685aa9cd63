"""`benchmarks/layouts.py` runs, and says of both layouts what it promises to say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "layouts.py"


def test_the_benchmark_of_layouts_runs_on_a_tiny_model(tiny_model_dir: str, tmp_path: Path) -> None:
    out = tmp_path / "layouts.json"
    command = [sys.executable, str(SCRIPT), "--small", "--rounds", "2", "--threads", "1"]
    done = subprocess.run(
        [*command, "--model", tiny_model_dir, "--json", str(out)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for workload in ("chat", "equal"):
        assert f"{workload}: aligned takes " in done.stdout
    results = json.loads(out.read_text(encoding="utf-8"))
    assert results["chat"]["rounds"]["aligned"][0]["trims"] > 0
    assert results["chat"]["rounds"]["aligned"][0]["trimmed_bytes"] > 0
    for result in results.values():
        assert result["same_samples"] == result["samples"]
        assert len(result["ratios"]) == 2
        rounds = result["rounds"]
        for ragged, aligned in zip(rounds["ragged"], rounds["aligned"], strict=True):
            assert ragged["tokens"] == aligned["tokens"] > 0
            assert ragged["kv_bytes"] == aligned["kv_bytes"] > 0
            assert ragged["trims"] == 0
