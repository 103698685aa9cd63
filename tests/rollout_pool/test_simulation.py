"""Virtual time, engines that pretend, and what is said of policies."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_pool.cli import main
from rollout_pool.requests import resolve_requests
from rollout_pool.simulation.clock import StalledError, run_virtually
from rollout_pool.simulation.engine import SimulatedEngine
from rollout_pool.simulation.latency import PRESETS, Latency
from rollout_pool.simulation.policies import POLICIES, Work
from rollout_pool.simulation.study import run_policy
from rollout_pool.simulation.workload import Lengths, tokens_of
from rollout_pool.types import ResolvedRequest, RolloutGroup, RolloutRequest, SamplingParams

LATENCY = Latency(num_slots=3, step_s=1.0, row_s=0.25, prompt_token_s=0.125)
SHORT = Lengths(median=4, sigma_prompt=0.5, sigma_sample=0.5)


def request(name: str | int, n: int = 1, **fields: object) -> ResolvedRequest:
    one = RolloutRequest([0] * 4, SamplingParams(n=n, max_new_tokens=12), request_id=name, **fields)  # type: ignore[arg-type]
    return resolve_requests([one], None, seed=1)[0]


def test_an_hour_passes_in_no_time_and_in_order() -> None:
    seen: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, asyncio.get_running_loop().time()))

    async def play() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1800):
                await asyncio.gather(sleeper("long", 3600), sleeper("short", 1.5), sleeper("none", 0))
        await asyncio.wait_for(sleeper("late", 10), 11)

    began = time.perf_counter()
    run_virtually(play())
    assert time.perf_counter() - began < 60
    assert seen == [("none", 0.0), ("short", 1.5), ("late", 1810.0)]


def test_a_hang_is_an_error() -> None:
    async def wait_for_ever() -> None:
        await asyncio.sleep(3)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(StalledError, match="after 3 s"):
        run_virtually(wait_for_ever())


def step_by_step(groups: list[ResolvedRequest], arrivals: list[float], latency: Latency) -> list[float]:
    """When each group ends, by carrying out every single step."""
    now, waiting, live = 0.0, [], []
    ends, left = [0.0] * len(groups), [group.sampling.n for group in groups]
    computed: set[int] = set()
    to_come = sorted(range(len(groups)), key=lambda number: arrivals[number])
    while to_come or waiting or live:
        if not waiting and not live:
            now = max(now, arrivals[to_come[0]])
        while to_come and arrivals[to_come[0]] <= now:
            number = to_come.pop(0)
            for index in range(groups[number].sampling.n):
                (length,) = SHORT.of_samples(groups[number].seed, groups[number].identity, [index])
                waiting.append([number, min(length, groups[number].sampling.max_new_tokens)])
        for _ in range(min(len(waiting), latency.num_slots - len(live))):
            live.append(waiting.pop(0))
            if live[-1][0] not in computed:
                computed.add(live[-1][0])
                now += 4 * latency.prompt_token_s
        if live:
            now += latency.of_step(len(live))
        for row in live:
            row[1] -= 1
            if not row[1]:
                left[row[0]] -= 1
                ends[row[0]] = now if not left[row[0]] else 0.0
        live = [row for row in live if row[1]]
    return ends


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 40)), min_size=1, max_size=8))
def test_an_engine_ends_its_groups_when_single_steps_would(plan: list[tuple[int, int]]) -> None:
    groups = [request(number, n) for number, (n, _) in enumerate(plan)]
    # Off the times at which steps end: what counts as "in time" there is a matter of rounding.
    arrivals = [when + number / 1000 + 0.0625 for number, (_, when) in enumerate(plan)]
    ends: dict[str | int, float] = {}

    async def play() -> SimulatedEngine:
        loop = asyncio.get_running_loop()
        engine = SimulatedEngine(LATENCY, SHORT)

        def ended(group: RolloutGroup) -> None:
            ends[group.request_id] = loop.time()

        for group, when in zip(groups, arrivals, strict=True):
            loop.call_at(when, engine.submit, group, ended)
        await asyncio.sleep(10_000)
        return engine

    engine = run_virtually(play())
    expected = step_by_step(groups, arrivals, LATENCY)
    assert [ends[number] for number in range(len(groups))] == pytest.approx(expected, abs=1e-6)
    assert engine.progress().samples_ended == sum(n for n, _ in plan)
    assert not engine.progress().is_busy
    assert engine.idle_since == pytest.approx(max(expected), abs=1e-6)


def test_what_was_cut_off_goes_on_to_the_same_end() -> None:
    async def play() -> list[RolloutGroup]:
        engine = SimulatedEngine(LATENCY, Lengths(median=9, sigma_sample=0.1))
        groups: list[RolloutGroup] = []
        engine.submit(request("a", 4), groups.append)
        await asyncio.sleep(9)
        engine.abort("a")
        engine.commit(3, lambda: None)
        await asyncio.sleep(2 * LATENCY.of_step(3))
        engine.submit(request("a", 4, resume=groups[0].samples), groups.append)
        engine.submit(request("a", 4), groups.append)
        await asyncio.sleep(1000)
        return groups

    cut, resumed, whole = run_virtually(play())
    assert {sample.finish_reason for sample in cut.samples} == {"aborted"}
    assert [sample.token_ids.size for sample in cut.samples] == [5, 5, 5, 0]
    for sample, other in zip(resumed.samples, whole.samples, strict=True):
        assert sample.token_ids.tolist() == other.token_ids.tolist()
        assert sample.finish_reason == other.finish_reason in ("stop", "length")
    versions = [sample.token_versions.tolist() for sample in resumed.samples]
    assert all(one[:5] == [0] * 5 and set(one[5:]) == {3} for one in versions[:3])
    assert set(versions[3]) == {3}


def test_lengths_have_the_stated_distribution_and_samples_differ() -> None:
    lengths = Lengths(median=400, sigma_prompt=0.3, sigma_sample=0.4)
    drawn = np.array([lengths.of_samples(0, f"name:{prompt}", range(8)) for prompt in range(1500)])
    logs = np.log(drawn)
    assert np.median(drawn) == pytest.approx(400, rel=0.03)
    assert logs.std() == pytest.approx(0.5, rel=0.03)
    assert logs.std(axis=1, ddof=1).mean() == pytest.approx(0.4, rel=0.05)  # within a prompt
    assert len({tokens_of(0, "name:0", index, 8).tobytes() for index in range(500)}) > 490


WORK = Work(24, 4, 16, 200, seed=3, lengths=Lengths(median=40))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_gives_the_same_row_every_time_and_every_slot_its_due(policy: str) -> None:
    latency = dataclasses.replace(PRESETS["gpu"], num_slots=8)
    rows = [dataclasses.replace(run_policy(policy, WORK, latency, 3), driver_us_per_group=0) for _ in "ab"]
    assert rows[0] == rows[1]
    (row, _) = rows
    lengths = (WORK.lengths.of_samples(3, f"name:{group}", range(4)) for group in range(24))
    wanted = sum(min(200, length) for group in lengths for length in group)
    assert row.new_tokens == wanted or policy.startswith("5/4")
    # The most a pool can do, and the least the longest sample takes alone.
    assert row.tokens_per_s * (1 - row.wasted) <= 3 * 8 / latency.of_step(8)
    longest = max(WORK.longest(one) for one in WORK.requests())
    assert row.makespan_s > longest * latency.of_step(1) or policy.startswith("5/4")
    assert 0 < row.utilisation <= 1
    assert row.p95_s <= row.makespan_s


def test_the_command_prints_a_table_and_keeps_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    arguments = ["simulate", "--actors", "2,3", "--policies", "static split;dynamic", "--json", str(file)]
    work = ["--groups-per-actor", "4", "--median", "50", "--engine", "cpu", "--seed", "5"]
    assert main([*arguments, *work]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("| actors | pools | policy")
    kept = json.loads(file.read_text())
    assert [(row["num_actors"], row["policy"]) for row in kept["rows"]] == [
        (2, "static split"), (2, "dynamic"), (3, "static split"), (3, "dynamic"),
    ]  # fmt: skip
    assert (kept["seed"], kept["lengths"]["median"], kept["latency"]["num_slots"]) == (5, 50.0, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--actors", "8,x"], "--actors: expected numbers above 0 as in 8,64, got '8,x'"),
        (["--actors", "0"], "--actors: expected numbers above 0"),
        (["--policies", "best"], "--policies: no 'best'; there are static split;"),
        (["--pools", "9", "--actors", "8", "--policies", "dynamic"], "--pools: must be from 1 to the number"),
        (["--pools", "2"], "--pools: several pools do not take a part"),
        (["--engine", "tpu"], "--engine: must be one of cpu, gpu, got 'tpu'"),
        (["--median", "0"], "--median: must be above 0, got 0"),
        (["--max-new-tokens", "100000"], "--max-new-tokens: at most 65536, got 100000"),
        (["--json", "/nowhere/figures.json"], "cannot write /nowhere/figures.json: there is no such folder"),
    ],
)
def test_a_wrong_argument_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rollout-pool simulate: {message}")
    assert error.count("\n") == 1
