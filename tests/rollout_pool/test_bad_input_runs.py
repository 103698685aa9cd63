"""Bad input that only real processes meet: a pool, a command of its own, a disk that is full."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rollout_pool import ConfigError, EngineConfig, PoolConfig, RequestError, RolloutPool, SamplingParams
from rollout_pool.cli import main
from rollout_pool.results import read_groups

NUM_PROMPTS = 12
BROKEN = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def broken(tiny_model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that only loading finds fault with."""
    folder = tmp_path_factory.mktemp("models") / "broken"
    shutil.copytree(tiny_model_dir, folder)
    state = load_file(folder / "model.safetensors")
    state[BROKEN][0, 0] = float("nan")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_a_pool_raises_what_a_caller_did_wrong_and_serves_the_others(
    cluster: None, tiny_model_dir: str, broken: str
) -> None:
    import ray

    engine = EngineConfig(num_slots=2, max_length=32)
    pools = [
        RolloutPool.remote(PoolConfig(model=model, engine=engine, cpus_per_actor=1))
        for model in (tiny_model_dir, broken)
    ]
    few: Any = SamplingParams(max_new_tokens=2, temperature=0, ignore_eos=True)
    try:
        with pytest.raises(RequestError, match=r"prompts .* a single str; write \[prompt\]"):
            ray.get(pools[0].rollout.remote("text", few))
        with pytest.raises(RequestError, match="sampling must be SamplingParams"):
            ray.get(pools[0].rollout.remote(["text"], {"n": 1}))
        bad: list[Any] = [None, "", [1.5], [500], [5] * 40, [{"role": "user"}]]
        groups = ray.get(pools[0].rollout.remote(["fine", *bad, [5, 6]], few))
        assert [group.error is None for group in groups] == [True, *[False] * len(bad), True]
        assert [len(group.samples) for group in groups] == [1, *[0] * len(bad), 1]
        assert all(str(group.error).startswith(f"prompt {group.index}: ") for group in groups[1:-1])
        stats = ray.get(pools[0].stats.remote())
        assert (stats.submitted, stats.returned, stats.failed) == (8, 2, 6)
        with pytest.raises(ConfigError, match=f"'{broken}': {BROKEN} holds NaN") as caught:
            ray.get(pools[1].ready.remote())
        assert "\n" not in str(getattr(caught.value, "cause", caught.value))
    finally:
        ray.get([pool.shutdown.remote() for pool in pools])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs privileges; test_output.py limits a file's size instead")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_run_on_a_full_disk_keeps_what_is_complete_and_goes_on_when_there_is_room(
    cluster: None, tiny_model_dir: str, small_disk: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts, output = tmp_path / "p.txt", small_disk / "o.jsonl"
    prompts.write_text("\n".join(f"prompt {number}" for number in range(NUM_PROMPTS)))
    keys = (
        "--set",
        "engine={num_slots: 2, max_length: 128}",
        "--set",
        "cpus_per_actor=1",
        "--set",
        "sampling={max_new_tokens: 64, ignore_eos: true}",
    )
    command = [
        "run",
        "--no-trace",
        "--model",
        tiny_model_dir,
        "--prompts",
        str(prompts),
        "--output",
        str(output),
        *keys,
    ]
    assert main([*command, "--set", "gpus_per_actor=64"]) == 2
    assert "1 actor with 1 CPU and 64 GPUs each was asked for; the cluster has" in capfd.readouterr().err
    assert main([*command, "--temperature", "1"]) == 2
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("rollout-pool run: "))
    assert f"cannot write {output}: " in line
    assert re.search("No space left on device|no room for a whole line", line)
    assert line.endswith("; it ends with the group before: make room and --resume")
    complete = output.read_bytes()
    assert complete.endswith(b"\n")
    assert 1 <= complete.count(b"\n") < NUM_PROMPTS
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    assert main([*command, "--temperature", "1", "--resume"]) == 0
    assert output.read_bytes().startswith(complete)
    assert sorted(group.index for group in read_groups(output)) == list(range(NUM_PROMPTS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(["--model", "BROKEN"], f"cannot load model 'BROKEN': {BROKEN} holds NaN or infinity; use an earlier checkpoint", marks=pytest.mark.slow),
        (["--model", "GOOD", "--ray-address", "127.0.0.1:1"], "ray_address: cannot reach Ray at 127.0.0.1:1"),
    ],
    ids=["a model", "no cluster"],
)  # fmt: skip
def test_a_command_of_its_own_ends_with_2_and_one_line(
    options: list[str], message: str, tmp_path: Path, tiny_model_dir: str, broken: str
) -> None:
    """Nothing of what actors log, and no traceback, reaches the user's terminal."""
    (tmp_path / "p.txt").write_text("hello\n")
    words = {"BROKEN": broken, "GOOD": tiny_model_dir}
    given = [words.get(option, option) for option in options]
    command = [sys.executable, "-P", "-m", "rollout_pool", "run", "--prompts", "p.txt", "--output", "o.jsonl"]
    done = subprocess.run(
        [*command, *given],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    *progress, last = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert last.startswith("rollout-pool run: " + message.replace("BROKEN", broken))
    assert all(line.startswith("starting ") for line in progress), done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "o.jsonl").exists()
