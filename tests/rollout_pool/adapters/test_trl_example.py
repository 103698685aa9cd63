"""The TRL example learns something while its rollouts agree with the trainer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs rollout-pool[trl]")

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "trl_grpo.py"


@pytest.mark.slow
def test_the_trl_example_raises_its_reward() -> None:
    command = [sys.executable, "-P", str(EXAMPLE), "--steps", "8", "--learning-rate", "6e-3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    steps = re.findall(r"step +(\d+)  reward ([\d.]+)  max \|difference\| of logprobs (\S+)", done.stdout)
    assert [int(number) for number, _, _ in steps] == list(range(1, 9))
    rewards = [float(reward) for _, reward, _ in steps]
    assert min(rewards[-2:]) > 4 * rewards[0] > 0
    assert max(float(apart) for _, _, apart in steps) < 1e-4
