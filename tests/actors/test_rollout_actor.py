"""The rollout actor as a plain object: an engine's thread behind asynchronous calls, without Ray."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import rollout_pool
from rollout_pool import ConfigError, Engine, EngineConfig, PoolClosedError, PoolConfig, SamplingParams
from rollout_pool.actors.rollout_actor import RolloutActor, keep_checkout_off_path
from rollout_pool.requests import call_seed, resolve_requests

ENGINE = EngineConfig(num_slots=4, max_length=128)
SAMPLING = SamplingParams(n=2, max_new_tokens=10)
LONG = SamplingParams(max_new_tokens=120, ignore_eos=True)


def requests(prompts: list, sampling: SamplingParams = SAMPLING) -> list:
    return resolve_requests(prompts, sampling, seed=call_seed(0, 0))


def actor(model: str, threads: int | None = None) -> RolloutActor:
    threads = threads or torch.get_num_threads()
    return RolloutActor(PoolConfig(model=model, engine=ENGINE), "actor-7", threads=threads, device="cpu")


def rest_until_told(served: RolloutActor) -> None:
    """Once a sample has a slot, the engine makes a step only when a command comes: it is never done too soon."""

    def wrap(engine: Any) -> None:
        step, commands = engine.step, served._engine._commands

        def rest_and_step() -> Any:
            end = time.monotonic() + 60
            while engine.stats().live_rows and commands.empty() and time.monotonic() < end:
                time.sleep(0.005)
            return step()

        engine.step = rest_and_step

    served._engine.call(wrap)


def test_concurrent_runs_equal_the_engine_and_are_signed_by_the_actor(tiny_model_dir: str) -> None:
    prompts = ["hello", [5, 6], "", "the end", [9]]

    async def run() -> list:
        served = actor(tiny_model_dir)
        groups = await asyncio.gather(*map(served.run, requests(prompts)))
        stats = await served.stats()
        assert (stats.submitted, stats.finished, stats.failed) == (5, 4, 1)
        assert (await served.progress()).samples_ended == 2 * 5  # the failed group's samples are over, too
        await served.shutdown()
        return groups

    groups = asyncio.run(run())
    expected = Engine(tiny_model_dir, ENGINE).generate(prompts, SAMPLING)
    assert {group.timing.actor for group in groups} == {"actor-7"}
    assert groups[2].error == "prompt 2: the prompt is empty; it needs at least one token"
    for ours, theirs in zip(groups, expected, strict=True):
        assert [s.token_ids.tolist() for s in ours.samples] == [s.token_ids.tolist() for s in theirs.samples]


def test_progress_runs_ahead_of_the_group(tiny_model_dir: str) -> None:
    go_on = threading.Event()

    def halt_halfway(engine: Any) -> None:
        step = engine.step

        def wait_and_step() -> Any:
            if engine.stats().samples_finished >= 4:
                go_on.wait(60)
            return step()

        engine.step = wait_and_step

    async def run() -> None:
        served = actor(tiny_model_dir)
        await served.ready()
        served._engine.call(halt_halfway)
        wide = SamplingParams(n=8, max_new_tokens=100, ignore_eos=True)  # twice as many samples as slots
        group = asyncio.create_task(served.run(requests(["x"], wide)[0]))
        async with asyncio.timeout(30):
            while (ended := (await served.progress()).samples_ended) < 4:
                await asyncio.sleep(0.01)
        assert ended <= (await served.stats()).samples_finished
        assert not group.done()
        go_on.set()
        assert len((await group).samples) == 8
        await served.shutdown()

    asyncio.run(run())


def test_progress_tells_a_thread_that_hangs_from_one_that_works_or_waits(
    tiny_model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load, load = threading.Event(), RolloutActor._load
    monkeypatch.setattr(RolloutActor, "_load", lambda served: may_load.wait(60) and load(served))

    async def run() -> None:
        served = actor(tiny_model_dir)
        async with asyncio.timeout(30):
            while not (loading := await served.progress()).is_busy:
                await asyncio.sleep(0.01)
        assert (loading.steps, loading.doing) == (0, "load")
        may_load.set()
        await served.ready()
        async with asyncio.timeout(30):
            while (idle := await served.progress()).is_busy:
                await asyncio.sleep(0.01)
        go_on = threading.Event()
        hanging = served._engine.call(lambda engine: go_on.wait(60), "weights")
        async with asyncio.timeout(30):
            while not (stuck := await served.progress()).is_busy:
                await asyncio.sleep(0.01)
        assert (stuck.steps, stuck.doing) == (idle.steps, "weights")
        go_on.set()
        await asyncio.wrap_future(hanging)
        group = await served.run(requests(["x"], SamplingParams(max_new_tokens=5, ignore_eos=True))[0])
        assert group.error is None
        async with asyncio.timeout(30):  # a group comes within its last step
            while (await served.progress()).is_busy:
                await asyncio.sleep(0.01)
        # The command, the submission, a prefill and at least four more steps.
        assert (await served.progress()).steps >= idle.steps + 7
        await served.shutdown()

    asyncio.run(run())


def test_ready_tells_the_threads_that_torch_uses_in_the_engine(tiny_model_dir: str) -> None:
    before = torch.get_num_threads()

    async def run() -> None:
        served = actor(tiny_model_dir, threads=3)
        place = await served.place()
        info = await served.ready()
        assert (info.name, info.threads, info.device) == ("actor-7", 3, "cpu")
        assert info.ranks == (place,)
        assert (place.rank, place.pid, place.device) == (0, os.getpid(), "cpu")
        assert "4 slots" in info.memory_plan
        await served.shutdown()

    try:
        asyncio.run(run())
    finally:
        torch.set_num_threads(before)


def test_loading_error_is_raised_by_ready_and_by_run(tmp_path: Path) -> None:
    async def run() -> None:
        served = actor(str(tmp_path))
        for call in (served.ready(), served.run(requests(["x"])[0])):
            with pytest.raises(ConfigError, match="cannot load model"):
                await call

    asyncio.run(run())


def test_cancelled_run_frees_the_slots(tiny_model_dir: str) -> None:
    async def run() -> None:
        served = actor(tiny_model_dir)
        await served.ready()
        rest_until_told(served)
        call = asyncio.create_task(served.run(requests(["x"], LONG)[0]))
        async with asyncio.timeout(30):
            while (await served.stats()).live_rows == 0:
                await asyncio.sleep(0.01)
            call.cancel()
            while (await served.stats()).cancelled == 0:
                await asyncio.sleep(0.01)
        assert (await served.stats()).live_rows == 0
        served._engine.call(lambda engine: delattr(engine, "step"))
        assert (await served.run(requests(["y"])[0])).error is None
        await served.shutdown()

    asyncio.run(run())


def test_shutdown_returns_unfinished_groups_failed_and_refuses_more(tiny_model_dir: str) -> None:
    async def run() -> None:
        served = actor(tiny_model_dir)
        await served.ready()
        rest_until_told(served)
        calls = [asyncio.create_task(served.run(request)) for request in requests(["x", "y"], LONG)]
        async with asyncio.timeout(30):
            while (await served.stats()).live_rows < 2:
                await asyncio.sleep(0.01)
        await served.shutdown()
        assert [group.error for group in await asyncio.gather(*calls)] == [
            f"prompt {index}: actor-7 was shut down" for index in range(2)
        ]
        with pytest.raises(PoolClosedError, match="actor-7 was shut down"):
            await served.run(requests(["x"])[0])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("actor._engine.call(lambda engine: setattr(engine, 'step', None))", "TypeError: 'NoneType' object"),
        ("actor._engine.submit(request, lambda group: sys.exit('a callback'))", "SystemExit: a callback"),
    ],
    ids=["in a step", "in a callback"],
)
def test_process_exits_when_its_engines_thread_fails(tiny_model_dir: str, fault: str, error: str) -> None:
    program = f"""
        import asyncio, sys
        import rollout_pool.actors.engine_thread
        from rollout_pool import EngineConfig, PoolConfig
        from rollout_pool.actors.rollout_actor import RolloutActor
        from rollout_pool.requests import resolve_requests

        rollout_pool.actors.engine_thread.LAST_WORDS_S = 30  # enough for a log on a busy machine

        async def main():
            config = PoolConfig(model={tiny_model_dir!r}, engine=EngineConfig(num_slots=2, max_length=128))
            actor = RolloutActor(config, "actor-7", threads=1, device="cpu")
            await actor.ready()
            request = resolve_requests([[5]], None, seed=0)[0]
            {fault}
            await actor.run(request)
            await asyncio.sleep(180)

        asyncio.run(main())
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 1
    assert "the engine of actor-7 failed; its process exits" in ended.stderr
    assert error in ended.stderr


def test_checkout_leaves_the_path_and_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = Path(rollout_pool.__file__).resolve().parent
    root = (package / "kernels").resolve().parent
    if root == package:
        pytest.skip("installed from a wheel: there is no checkout")
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "path", ["", str(root), str(tmp_path), str(root / "tests")])
    keep_checkout_off_path()
    assert sys.path == [str(tmp_path), str(root / "tests")]
