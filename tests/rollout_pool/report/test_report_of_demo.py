"""The demo, as a user runs it, and the page that it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).resolve().parents[3] / "examples" / "demo.py"


@pytest.mark.slow
@pytest.mark.demo_model
def test_the_demo_leaves_a_report_with_rewards(tmp_path: Path, visit: Callable[..., Any]) -> None:
    command = [sys.executable, "-P", str(DEMO), "--problems", "1", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the report is in" in done.stdout
    samples = [
        sample for line in (tmp_path / "samples.jsonl").open() for sample in json.loads(line)["samples"]
    ]
    page = visit(tmp_path / "samples.html")
    assert page.locator("#count").text_content() == f"{len(samples)} of {len(samples)}" == "32 of 32"
    rewards = [sample["reward"] for sample in samples if "reward" in sample]
    tiles = page.locator(".tile").all_text_contents()
    assert f"{sum(rewards) / len(rewards):.3f}mean reward" in tiles
    page.fill("#search", "capital of France")
    page.wait_for_function("document.getElementById('count').textContent.startsWith('4 of')")
    page.locator(".row").first.click()
    for place in range(4):  # drawn when it comes into view
        page.locator(".sibling").nth(place).locator(".text").wait_for(state="attached")
    texts = page.locator(".sibling .text").all_text_contents()
    assert len(texts) == 4
    assert all("<|im_end|>" in text or len(text) > 20 for text in texts)
