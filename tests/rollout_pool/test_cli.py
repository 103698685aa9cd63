"""The command line: answers at once, and tells a mistake in one line with exit status 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import rollout_pool
from rollout_pool.cli import main
from rollout_pool.commands.summary import Summary
from rollout_pool.prompt_file import read_prompts
from rollout_pool.requests import resolve_requests
from rollout_pool.run_config import RunConfig
from rollout_pool.types import EngineStats, PoolStats, Sample


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"rollout-pool {rollout_pool.__version__}\n"


@pytest.mark.parametrize("command", [[], ["run"], ["verify"], ["fetch-demo-model"]])
def test_help_is_there_for_every_command(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert "usage: rollout-pool" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["run"], ["run", "--n", "many"], ["verify", "x"]])
def test_wrong_arguments_end_with_status_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("rollout-pool")
    assert errors.endswith("--help\n")
    assert errors.count("\n") == 1


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rollout_pool", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"rollout-pool {rollout_pool.__version__}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a good prompt file, a good model folder and a good configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("hello\n")
    (tmp_path / "bad.jsonl").write_text('"ok"\n{"prompt":\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    save_file({}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "c.yaml").write_text("model: model\n")
    (tmp_path / "typo.yaml").write_text("model: model\nengine: {num_slot: 2}\n")
    (tmp_path / "there.jsonl").write_text("something\n")
    return tmp_path


GOOD = "--config c.yaml --prompts p.txt --output o.jsonl"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--prompts p.txt --output o.jsonl",
            "nothing says which model to run: give --config FILE or --model DIR",
        ),
        (
            "--config no.yaml --prompts p.txt --output o.jsonl",
            "cannot read configuration no.yaml: No such file",
        ),
        (
            "--config typo.yaml --prompts p.txt --output o.jsonl",
            "typo.yaml: engine.num_slot: unknown key; did you mean",
        ),
        (
            f"{GOOD} --n 0",
            "c.yaml with sampling.n from the command line: sampling.n: Input should be greater",
        ),
        (f"{GOOD} --set engine.slots=1", "engine.slots: unknown key"),
        (f"{GOOD} --set engine", "--set engine: expected KEY=VALUE"),
        (f"{GOOD} --set engine=[", "--set engine=[: the value is not valid YAML"),
        (f"{GOOD} --model ./nowhere", "model: there is no directory './nowhere'"),
        (
            "--config c.yaml --prompts no.txt --output o.jsonl",
            "cannot read no.txt: No such file or directory",
        ),
        (
            "--config c.yaml --prompts bad.jsonl --output o.jsonl",
            "bad.jsonl, line 2: not valid JSON: Expecting value",
        ),
        (
            "--config c.yaml --prompts p.txt --output o.csv",
            "o.csv: expected a name that ends in .jsonl or .parquet",
        ),
        (
            "--config c.yaml --prompts p.txt --output no/o.jsonl",
            "cannot write no/o.jsonl: No such file or directory",
        ),
        (
            "--config c.yaml --prompts p.txt --output there.jsonl",
            "there.jsonl exists; continue it with --resume",
        ),
        (
            "--config c.yaml --prompts p.txt --output there.jsonl --resume",
            "there.jsonl, line 1: not written by",
        ),
    ],
)
def test_a_mistake_in_a_run_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert main(["run", *arguments.split()]) == 2
    output, errors = capsys.readouterr()
    assert errors.startswith("rollout-pool run: ")
    assert message in errors
    assert errors.count("\n") == 1
    assert output == ""
    assert not (folder / "o.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model ./nowhere there.jsonl", "there is no directory './nowhere'"),
        ("--config c.yaml none.jsonl", "there is no file none.jsonl"),
        ("--config c.yaml there.jsonl", "there.jsonl, line 1: not valid JSON"),
        ("--model model --dtype int3 there.jsonl", "dtype: Input should be"),
    ],
)
def test_a_mistake_in_verify_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert main(["verify", *arguments.split()]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def test_the_summary_names_the_first_failures(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("\n".join("abcde"))
    lines = read_prompts(str(tmp_path / "p.txt"), RunConfig.load(None, {"model": "m"}))
    summary = Summary()
    for line in lines:
        (request,) = resolve_requests([line.request], None, seed=0)
        summary.add(line, rollout_pool.requests.failed_group(request, "the prompt is empty"))
    summary.finish(PoolStats(actors=(EngineStats(prefill_tokens=10, prefill_tokens_saved=30),)))
    text = "\n".join(summary.lines())
    assert text.startswith("5 groups, 0 samples, 0 new tokens in 0.0 s")
    assert "prompt tokens: 10 computed, 30 saved by sharing" in text
    assert "5 groups failed:\n  prompt 0: request '0': the prompt is empty\n" in text
    assert text.endswith("... and 2 more")


def test_summary_says_why_an_instruction_model_answers_a_plain_text_with_nothing(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('"What is this?"\n[{"role": "user", "content": "hi"}]\n')
    ids, logprobs = np.array([2]), np.array([-0.1], dtype=np.float32)
    sample = Sample(ids, "", logprobs, logprobs, "stop", 2, 0, ids, seed=0, sample_index=0)
    lines = read_prompts(str(tmp_path / "p.jsonl"), RunConfig(model="m"))
    for is_text in (True, False):
        summary = Summary()
        line = lines[0 if is_text else 1]
        (request,) = resolve_requests([line.request], None, seed=0)
        failed = rollout_pool.requests.failed_group(request, "")
        summary.add(line, failed.replace(samples=[sample] * 4, error=None))
        summary.finish(PoolStats())
        text = "\n".join(summary.lines())
        assert ("4 of 4 samples of plain texts ended with their first token" in text) is is_text
