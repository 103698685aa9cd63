"""The ZeRO-3 example: a pool that is synced after every step samples from the trainer's distribution."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "deepspeed_zero3.py"


@pytest.mark.slow
def test_every_step_learns_from_samples_of_the_present_weights() -> None:
    pytest.importorskip("deepspeed")
    command = [sys.executable, "-P", str(SCRIPT), "--steps", "3"]
    # A cluster of its own: `ray.init()` would join any that runs on this machine.
    own = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "RAY_ADDRESS": "local"}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own}, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    differences = [float(value) for value in re.findall(r"off by (\S+)", done.stdout)]
    assert len(differences) == 3
    assert max(differences) < 1e-3
    assert re.findall(r"version (\d+)", done.stdout) == ["1", "2", "3"]
