"""Expected lengths: learned from what prompts gave, and used so that long groups do not start last."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rollout_pool.actors.versions import VersionLog
from rollout_pool.config import EngineConfig, PoolConfig
from rollout_pool.length_estimates import LengthEstimates
from rollout_pool.requests import resolve_requests
from rollout_pool.simulation.clock import run_virtually
from rollout_pool.simulation.cluster import Cluster
from rollout_pool.simulation.latency import Latency
from rollout_pool.simulation.samples import PendingGroup
from rollout_pool.simulation.workload import Lengths
from rollout_pool.types import ResolvedRequest, RolloutGroup, RolloutRequest, SamplingParams


def request(prompt: object, name: str | None = None, budget: int = 100) -> ResolvedRequest:
    one = RolloutRequest(prompt, SamplingParams(n=2, max_new_tokens=budget), request_id=name)  # type: ignore[arg-type]
    return resolve_requests([one], None, seed=1)[0]


def group_of(asked: ResolvedRequest, *lengths: int, reason: str = "stop") -> RolloutGroup:
    pending = PendingGroup(asked, lambda group: None)
    model = Lengths(median=4, sigma_prompt=0, sigma_sample=0)
    for row, length in zip(pending.rows(model), lengths, strict=True):
        row.length = length
        pending.samples.append(row.sample(length, reason, VersionLog()))  # type: ignore[arg-type]
    return pending.result()


def test_what_was_never_met_is_expected_to_take_the_usual_share() -> None:
    estimates = LengthEstimates()
    assert estimates.expected(request("new")) == 100
    for number in range(400):
        met = request(f"prompt {number}")
        estimates.learn(met, group_of(met, 20, 30))
    assert 24 <= estimates.expected(request("new")) <= 26
    assert 48 <= estimates.expected(request("new", budget=200)) <= 52


@pytest.mark.parametrize(
    "prompt", ["a text", [1, 2, 3], np.array([1, 2, 3]), [{"role": "user", "content": "a"}]]
)
def test_a_prompt_is_expected_to_do_as_before(prompt: object) -> None:
    estimates = LengthEstimates()
    for _ in range(8):
        estimates.learn(request(prompt), group_of(request(prompt), 9, 11))
    for _ in range(8):
        estimates.learn(request(prompt, "other"), group_of(request(prompt, "other"), 60, 80))
    assert estimates.expected(request(prompt)) == 10
    assert estimates.expected(request(prompt, "other")) == 70
    assert estimates.expected(request(prompt, budget=6)) == 6
    assert estimates.expected(request("another text")) > 10


def test_samples_that_did_not_end_say_nothing() -> None:
    estimates = LengthEstimates()
    estimates.learn(request("a"), group_of(request("a"), 3, 3, reason="aborted"))
    assert estimates.expected(request("a")) == 100


def test_prompts_met_long_ago_are_forgotten() -> None:
    estimates = LengthEstimates(kept=2)
    for text in "abc":
        estimates.learn(request(text), group_of(request(text), 5, 5))
    assert estimates.expected(request("a")) > 90
    assert estimates.expected(request("c")) == 5


def test_the_second_time_long_groups_start_first() -> None:
    async def two_epochs(are_same_prompts: bool) -> list[float]:
        latency = Latency(num_slots=4, step_s=0.01, row_s=0.001, prompt_token_s=0.0)
        lengths = Lengths(median=60, sigma_prompt=1.2, sigma_sample=0.2)
        cluster = Cluster(latency, lengths)
        engine = EngineConfig(num_slots=4, max_length=4096)
        pool = cluster.start_pool(PoolConfig(model="simulated", num_actors=2, engine=engine))
        await pool.ready()
        sampling = SamplingParams(n=4, max_new_tokens=2000, seed=5)
        times = []
        for epoch in range(2):
            prompts = [
                RolloutRequest([number, 0 if are_same_prompts else epoch], request_id=number)
                for number in range(30)
            ]
            began = asyncio.get_running_loop().time()
            groups = await pool.rollout(prompts, sampling)
            times.append(asyncio.get_running_loop().time() - began)
            assert all(group.error is None for group in groups)
        await pool.shutdown()
        return times

    first, second = run_virtually(two_epochs(are_same_prompts=True))
    assert second < 0.95 * first
    first, second = run_virtually(two_epochs(are_same_prompts=False))
    assert second == pytest.approx(first, rel=0.02)
