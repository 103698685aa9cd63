"""`rollout-pool run` and `verify` for real: Ray, actors, a tiny model, a kill in the middle."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rollout_pool.cli import main
from rollout_pool.results import read_groups

pytestmark = pytest.mark.usefixtures("cluster")

NUM_PROMPTS = 24
CONFIG = """
cpus_per_actor: 1
dtype: float32
seed: 11
engine: {num_slots: 2, max_length: 160, deterministic: strict}
sampling: {n: 2, max_new_tokens: 120, ignore_eos: true}
"""
PACED = """
import sys, time
from pathlib import Path
from rollout_pool.cli import main
from rollout_pool.output import OutputFile

limit, append = Path(sys.argv[1]), OutputFile.append

def append_within_limit(self, line, group):
    while len(self.done) >= int(limit.read_text()):
        time.sleep(0.02)
    append(self, line, group)

OutputFile.append = append_within_limit
sys.exit(main(sys.argv[2:]))
"""
"""A run that writes no more groups than a file allows, and so cannot be over before it is stopped."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: str) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "c.yaml").write_text(f"model: {tiny_model_dir}\n{CONFIG}")
    lines: list[Any] = [f"prompt number {number}" for number in range(NUM_PROMPTS - 3)]
    lines.append(
        {"messages": [{"role": "user", "content": "hi"}], "request_id": "chat", "metadata": {"answer": 3}}
    )
    lines.append({"prompt_token_ids": [7, 8, 9], "sampling": {"n": 1, "temperature": 0}, "seed": 5})
    lines.append({"prompt": "", "request_id": "empty"})
    (folder / "p.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return folder


def arguments(folder: Path, output: str, *more: str) -> list[str]:
    paths = ("--config", folder / "c.yaml", "--prompts", folder / "p.jsonl", "--output", folder / output)
    return ["run", *map(str, paths), *more]


def allow(folder: Path, count: int) -> None:
    """How many groups a paced run may have written."""
    (folder / "limit.new").write_text(str(count))
    os.replace(folder / "limit.new", folder / "limit")


def start(folder: Path, output: str, *more: str) -> subprocess.Popen[bytes]:
    """A paced run, which is to be stopped."""
    allow(folder, NUM_PROMPTS - 1)
    command = [sys.executable, "-P", "-c", PACED, str(folder / "limit"), *arguments(folder, output, *more)]
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, "the run ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(folder: Path, cluster: None) -> list[bytes]:
    """The lines of an uninterrupted run, sorted."""
    assert main(arguments(folder, "whole.jsonl")) == 1
    return sorted((folder / "whole.jsonl").read_bytes().splitlines())


def test_a_run_answers_every_prompt_of_the_file(
    folder: Path, whole: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    groups = {group.index: group for group in read_groups(folder / "whole.jsonl")}
    assert sorted(groups) == list(range(NUM_PROMPTS))
    assert all(len(groups[index].samples) == 2 for index in range(NUM_PROMPTS - 2))
    chat, ids, empty = (groups[index] for index in range(NUM_PROMPTS - 3, NUM_PROMPTS))
    assert (chat.request_id, chat.metadata) == ("chat", {"answer": 3})
    assert ids.prompt_token_ids.tolist() == [7, 8, 9]
    assert len(ids.samples) == 1
    assert empty.samples == []
    assert "the prompt is empty" in (empty.error or "")


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_file(folder: Path, whole: list[bytes]) -> None:
    process = start(folder, "killed.jsonl", "--num-actors", "2")
    wait_for_lines(folder / "killed.jsonl", 3, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    left = (folder / "killed.jsonl").read_bytes()
    assert 3 <= left.count(b"\n") < NUM_PROMPTS
    assert main(arguments(folder, "killed.jsonl", "--resume")) == 1
    after = (folder / "killed.jsonl").read_bytes()
    assert after.startswith(left)
    assert sorted(after.splitlines()) == whole


def pool_process(run: subprocess.Popen[bytes], other_than: int = 0) -> int:
    """The process of a run's pool, once there is one."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for child in psutil.Process(run.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.pid != other_than and "PoolActor" in " ".join(child.cmdline()):
                    return child.pid
        time.sleep(0.1)
    raise AssertionError("there is no pool")


@pytest.mark.slow
def test_a_run_goes_on_when_its_pools_process_hangs_and_when_it_is_killed(
    folder: Path, whole: list[bytes]
) -> None:
    output = folder / "lost.jsonl"
    process = start(folder, "lost.jsonl", "--num-actors", "2", "--set", "heartbeat_timeout_s=15")
    allow(folder, 3)
    wait_for_lines(output, 3, process)
    hanging = pool_process(process)
    os.kill(hanging, signal.SIGSTOP)
    allow(folder, NUM_PROMPTS // 2)  # more than were on their way, so that the run waits for the pool
    second = pool_process(process, other_than=hanging)
    lines = output.read_bytes().count(b"\n")
    allow(folder, lines + 1)
    wait_for_lines(output, lines + 1, process)
    os.kill(second, signal.SIGKILL)
    allow(folder, NUM_PROMPTS)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 1  # for the empty prompt
    assert b"the pool gave no answer for 15 s and is ended" in errors
    assert errors.count(b"another process takes over") >= 2
    assert sorted(output.read_bytes().splitlines()) == whole


@pytest.mark.slow
def test_ctrl_c_stops_with_130_and_parquet_resumes(folder: Path, whole: list[bytes]) -> None:
    process = start(folder, "stopped.parquet")
    wait_for_lines(folder / "stopped.parquet.part.jsonl", 3, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"groups are written; continue with --resume" in errors
    assert b"Traceback" not in errors
    assert not (folder / "stopped.parquet").exists()
    assert main(arguments(folder, "stopped.parquet", "--resume")) == 1
    wanted = {group.index: group for group in read_groups(folder / "whole.jsonl")}
    for group in read_groups(folder / "stopped.parquet"):
        for sample, other in zip(group.samples, wanted[group.index].samples, strict=True):
            np.testing.assert_array_equal(sample.token_ids, other.token_ids)
            np.testing.assert_array_equal(sample.logprobs, other.logprobs)


def test_verify_rescores_what_a_run_wrote(
    folder: Path, whole: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["verify", "--config", str(folder / "c.yaml"), str(folder / "whole.jsonl")]
    assert main([*command, "--tolerance", "1e-3"]) == 0
    assert "max |difference| of logprobs" in capsys.readouterr().out
    assert main([*command, "--tolerance", "0"]) == 1
    assert "the tolerance is 0" in capsys.readouterr().err


def test_prompts_from_standard_input_and_a_clean_run_end_with_0(
    folder: Path, tiny_model_dir: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n\ntwo\n")))
    options = [
        "--max-new-tokens",
        "4",
        "--set",
        "engine.num_slots=2",
        "--max-length",
        "32",
        "--temperature",
        "0",
    ]
    command = [
        "run",
        "--model",
        tiny_model_dir,
        "--prompts",
        "-",
        "--output",
        str(folder / "in.jsonl"),
        *options,
    ]
    assert main(command) == 0
    errors = capsys.readouterr().err
    assert "2 groups, 2 samples, " in errors
    assert "prompt tokens: " in errors
    assert [len(group.samples[0].token_ids) for group in read_groups(folder / "in.jsonl")] == [4, 4]


def test_what_only_loading_finds_is_one_line_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "broken").mkdir(exist_ok=True)
    (folder / "broken" / "config.json").write_text('{"model_type": "llama"}')
    command = arguments(folder, "none.jsonl", "--model", str(folder / "broken"))
    assert main(command) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith("rollout-pool run: ")
    assert "cannot load model" in errors[-1]
    assert not (folder / "none.jsonl").exists()
