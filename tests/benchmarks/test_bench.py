"""The benchmark suite on a tiny model: who is compared, what is counted, and where the time of a step goes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *arguments: str) -> str:
    """The output of a script; it must succeed."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_workload_with_drawn_ends_counts_tokens_up_to_the_end_for_every_peer(
    tiny_model_dir: str, tmp_path: Path
) -> None:
    """8 prompts x 4 samples: each has 4 or 32 tokens, whoever made it."""
    file, page = tmp_path / "bench.json", tmp_path / "page.md"
    sizes = ["num_prompts=8", "n=4", "max_new=32", "max_rows=16"]
    common = ["--model", tiny_model_dir, "--threads", "1", "--rounds", "2", "--json", str(file)]
    out = run(
        "bench.py", "main", *common, "--workloads", "long-tail", "--peers", "generate", "--change", *sizes
    )
    found = json.loads(file.read_text(encoding="utf-8"))["workloads"]["long-tail"]
    assert set(found["peers"]) == {"engine", "generate"}
    assert found["work"]["samples"] == 32
    assert set(found["peers"]["generate"]["tried"]) == {"16", "8"}
    for peer in found["peers"].values():
        assert len(peer["rates"]) == 2
        for tokens in peer["tokens"]:
            long_samples, rest = divmod(tokens - 32 * 4, 28)
            assert rest == 0
            assert 0 <= long_samples <= 16
        assert min(peer["first_group_s"], peer["cold_start_s"]) > 0
    assert sum(tokens > 32 * 4 for peer in found["peers"].values() for tokens in peer["tokens"]) > 0
    ours, theirs = found["peers"]["engine"]["speeds"], found["peers"]["generate"]["speeds"]
    for rate, speed, tokens in zip(
        *(found["peers"]["engine"][k] for k in ("rates", "speeds", "tokens")), strict=True
    ):
        assert speed == pytest.approx(
            32 * rate / tokens
        )  # of samples, for who draws long ones makes more tokens
    assert found["ratios"]["generate"] == [a / b for a, b in zip(ours, theirs, strict=True)]
    assert "Transformers `generate` | **" in out

    page.write_text("before\n<!-- main -->\nformer figures\n<!-- end main -->\nafter\n", encoding="utf-8")
    for _ in range(2):  # the second time replaces what the first wrote
        run("render.py", str(page), f"main={file}")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- main -->\n\n")
    assert text.endswith("\n\n<!-- end main -->\nafter\n")
    assert "former figures" not in text
    assert text.count("| workload | against | one engine |") == 1


@pytest.mark.slow
def test_the_parts_of_a_step_add_up_and_the_trace_nests(tiny_model_dir: str, tmp_path: Path) -> None:
    file, trace = tmp_path / "steps.json", tmp_path / "trace.json"
    options = ["--rows", "8", "--new", "64", "--threads", "1", "--rounds", "1", "--no-pool"]
    for _ in range(3):  # what other processes take between two spans is in none of them
        run("breakdown.py", "--model", tiny_model_dir, *options, "--json", str(file), "--trace", str(trace))
        (step,) = json.loads(file.read_text(encoding="utf-8"))["steps"]
        in_spans = step["steps"] * sum(step["parts"].values()) + step["prompts_ms"]
        if in_spans > 0.9 * 1e3 * step["whole_s"]:
            break
    assert step["tokens"] == 8 * 64
    assert step["steps"] == 63  # the first tokens come with the prompts
    assert 0.9 * 1e3 * step["whole_s"] < in_spans <= 1e3 * step["whole_s"]
    assert all(step["parts"][part] > 0 for part in ("matrix products", "attention", "KV written", "sampling"))
    limits = step["limits"]
    assert 0 < limits["best"] <= min(limits["native"], limits["transposed"])

    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event["name"] == "attention" for event in events) == 2 * step["steps"]  # one a layer
    open_until: list[float] = []
    for event in events:
        assert event["ph"] == "X"
        start, end = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1] <= start + 0.2:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 0.2  # microseconds are rounded to tenths
        open_until.append(end)
