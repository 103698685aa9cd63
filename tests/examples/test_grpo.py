"""The GRPO example learns its task, from rollouts whose log-probabilities are the trainer's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "grpo.py"


@pytest.mark.slow
def test_reward_rises_and_every_logprob_is_the_trainers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the curve is drawn with it")
    curve = tmp_path / "curve.png"
    command = [sys.executable, "-P", str(SCRIPT), "--steps", "60", "--seed", "0", "--curve", str(curve)]
    # A cluster of its own: `ray.init()` would join any that runs on this machine.
    own = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "RAY_ADDRESS": "local"}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own}, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = map(float, re.findall(r"5 steps (\d\.\d+)", done.stdout))
    assert first < 0.2
    assert last > 0.5
    differences = [float(value) for value in re.findall(r"off by (\S+)", done.stdout)]
    assert len(differences) == 6
    assert max(differences) < 1e-3
    assert curve.read_bytes().startswith(b"\x89PNG")
