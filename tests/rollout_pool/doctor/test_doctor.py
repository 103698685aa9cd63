"""The doctor on a Ray cluster: rings and engines that are really started, and what it prints."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout_pool import PoolConfig
from rollout_pool.actors.memory import MemoryPlan
from rollout_pool.actors.ring_rank import COMPARED, RingTimes
from rollout_pool.actors.rollout_actor import RankInfo
from rollout_pool.actors.tensor_parallel import RankActors
from rollout_pool.cli import main
from rollout_pool.doctor.check import Check
from rollout_pool.doctor.report import lines
from rollout_pool.doctor.ring import verdict, versions
from rollout_pool.planning.machine import boundless_machine
from rollout_pool.planning.pool_plan import make_plan

VERSIONS = dict.fromkeys(COMPARED, "1.0")


def places(*hosts: str) -> list[tuple[RankInfo, dict[str, str]]]:
    return [(RankInfo(rank, 1, host, "cpu"), VERSIONS) for rank, host in enumerate(hosts)]


@pytest.fixture
def doctor(tmp_path: Path) -> Callable[..., tuple[int, dict[str, dict[str, str]]]]:
    """``doctor(model=..., ...)``: the exit status, and all records by name."""

    def run(**settings: Any) -> tuple[int, dict[str, dict[str, str]]]:
        values = {"engine": {"num_slots": 2, "max_length": 64}, "start_timeout_s": 900, **settings}
        (tmp_path / "c.yaml").write_text(json.dumps(values))
        figures = tmp_path / "found.json"
        # Joined, so that the four cores of the cluster count and not those of this machine.
        options = ["--json", str(figures), "--ray-address", "auto"]
        status = main(["doctor", "--config", str(tmp_path / "c.yaml"), *options])
        return status, {check["name"]: check for check in json.loads(figures.read_text())["checks"]}

    return run


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_split_engines_are_started_where_they_would_run(
    doctor: Callable[..., tuple[int, dict[str, dict[str, str]]]],
    tiny_model_dir: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {"model": tiny_model_dir, "tensor_parallel_size": 2}
    status, found = doctor(**settings)
    assert status == 0, found
    assert found["Ray"]["status"] == "ok"
    assert found["versions on nodes"]["status"] == "ok"
    assert found["ring"]["found"].startswith("gloo over 2 ranks on 1 host: sums right to the bit on each")
    config = PoolConfig(engine={"num_slots": 2, "max_length": 64}, **settings)
    plan = make_plan(config, boundless_machine(config.model_copy(update={"gpus_per_actor": 0})))
    assert found["engine"]["found"].endswith(plan.memory.describe())
    shown = capsys.readouterr().out
    assert "  ok       ring" in shown
    assert "0 failed" not in shown
    assert shown.splitlines()[-1].count(" ok") == 1

    def memory_plan_of(actor: Any) -> Any:  # in here, for its process cannot import this module
        found: list[Any] = []
        actor._engine.call(lambda engine: found.append(engine.memory_plan)).result(60)
        return found[0]

    async def loaded() -> MemoryPlan:
        """What a rank says of itself when it has its shard."""
        ranks = RankActors(config, "plan", {"CPU": 1}, threads=1, device="cpu")
        try:
            await ranks.start()
            plan: MemoryPlan = await ranks.leader.__ray_call__.remote(memory_plan_of)
            return plan
        finally:
            ranks.kill()

    rank = asyncio.run(loaded())
    assert replace(plan.memory, free_bytes=0) == replace(rank, free_bytes=0)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_what_only_loading_finds_is_named(
    doctor: Callable[..., tuple[int, dict[str, dict[str, str]]]], tiny_model_dir: str, tmp_path: Path
) -> None:
    import ray
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    model.mkdir()
    for file in Path(tiny_model_dir).iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) < 4:  # actors of another test may not be gone yet
        assert time.monotonic() < deadline
        time.sleep(0.1)
    status, found = doctor(model=str(model), num_actors=2)
    assert status == 1
    assert [name for name, check in found.items() if check["status"] == "failed"] == ["engine"]
    assert "model.norm.weight holds NaN or infinity" in found["engine"]["found"]
    assert found["ring"]["found"].startswith("gloo over 2 ranks")  # of the two actors


def test_a_wrong_sum_fails_and_says_where() -> None:
    right = RingTimes(0, True, 4096, 1e-3, 1e-5)
    (good,) = verdict("NCCL", 2, places("a", "b"), [right, right], is_split=True)
    assert (good.status, good.remedy[:4]) == ("warning", "slow")
    (good,) = verdict("gloo", 2, places("a", "b"), [right, right], is_split=True)
    assert good.found.startswith(
        "gloo over 2 ranks on 2 hosts: sums right to the bit on each, 0.00 GB/s, 10 us"
    )
    (bad,) = verdict(
        "gloo", 2, places("a", "b"), [right, replace(right, rank=1, is_exact=False)], is_split=True
    )
    assert bad.status == "failed"
    assert "wrong on process 1" in bad.found


def test_other_versions_on_another_node_fail() -> None:
    (same,) = versions(places("a", "b"))
    assert same.status == "ok"
    other = (RankInfo(1, 1, "b", "cpu"), {**VERSIONS, "ray": "2.0"})
    (differing,) = versions([*places("a"), other])
    assert differing.status == "failed"
    assert differing.found == "ray 1.0 on a, ray 2.0 on b"


def test_a_log_gets_one_line_for_each_and_a_terminal_gets_wrapped_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = Check("memory", "failed", "word " * 40, "do " * 40)
    plain = list(lines(check, is_terminal=False))
    assert len(plain) == 2
    assert plain[0].startswith("  failed   memory             word word")
    assert plain[1].strip().startswith("-> do do")
    monkeypatch.setenv("COLUMNS", "80")
    wrapped = list(lines(check, is_terminal=True))
    assert len(wrapped) > 6
    assert "\x1b[31;1mfailed   \x1b[0mmemory" in wrapped[0]
    assert max(len(line.replace("\x1b[31;1m", "").replace("\x1b[0m", "")) for line in wrapped) <= 80
