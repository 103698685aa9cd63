"""Groups in parts: the same samples, whoever draws which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from rollout_pool import EngineConfig, PoolConfig, RolloutGroup, RolloutPool, RolloutRequest, SamplingParams
from rollout_pool.parts import join, num_parts, split
from rollout_pool.report.timeline import timeline_of
from rollout_pool.requests import resolve_requests
from rollout_pool.run_config import RunConfig
from rollout_pool.trace import TraceFile, read_trace
from rollout_pool.types import ResolvedRequest, Sample, Timing

ENGINE = EngineConfig(num_slots=4, max_length=128, deterministic="strict")


def request_of(n: int, offset: int = 0, resume: tuple[Sample, ...] = ()) -> ResolvedRequest:
    wanted = RolloutRequest([1], SamplingParams(n=n), sample_offset=offset, resume=resume)
    return resolve_requests([wanted], None, seed=0)[0]


def sample(index: int) -> Sample:
    ids, logprobs = np.array([5]), np.zeros(1, np.float32)
    return Sample(ids, "", logprobs, logprobs, "aborted", None, 0, np.array([0]), 0, index)


def group_of(part: ResolvedRequest, error: str | None = None, actor: str = "") -> RolloutGroup:
    samples = [sample(part.sample_offset + number) for number in range(part.sampling.n)]
    timing = Timing(1.0, 2.0, 3, actor)
    return RolloutGroup("name", 0, np.array([1]), samples, error, sampling=part.sampling, timing=timing)


@given(st.integers(1, 60), st.integers(0, 9), st.integers(1, 9), st.randoms())
def test_parts_ask_for_what_the_whole_asks_for(n: int, offset: int, count: int, chance: Any) -> None:
    resume = tuple(sample(offset + number) for number in range(n) if chance.random() < 0.5)
    count = min(n, count)
    whole = request_of(n, offset, resume)
    parts = split(whole, count)
    asked = [part.sample_offset + number for part in parts for number in range(part.sampling.n)]
    assert asked == list(range(offset, offset + n))
    sizes = [part.sampling.n for part in parts]
    assert max(sizes) - min(sizes) <= 1
    for part in parts:
        mine = range(part.sample_offset, part.sample_offset + part.sampling.n)
        assert part.resume == tuple(one for one in resume if one.sample_index in mine)
        assert (part.seed, part.identity, part.prompt) == (whole.seed, whole.identity, whole.prompt)
    groups = [group_of(part) for part in parts]
    chance.shuffle(groups)
    joined = join(whole, groups)
    assert [one.sample_index for one in joined.samples] == asked
    assert (joined.error, joined.sampling, joined.timing.prefill_tokens) == (None, whole.sampling, 3 * count)


def test_a_part_that_failed_makes_the_group_fail_and_one_that_was_cancelled_cancelled() -> None:
    whole = request_of(3)
    first, second, third = split(whole, 3)
    cancelled, failed = group_of(second, "cancelled"), group_of(third, "bad")
    assert join(whole, [group_of(first), cancelled]).is_cancelled
    assert join(whole, [cancelled, failed]).error == "bad"


@pytest.mark.parametrize(
    ("samples", "least", "idle", "waiting", "expected"),
    [
        (64, 16, 2, 0, 2),
        (64, 16, 8, 0, 4),  # by samples
        (64, 16, 8, 3, 2),  # four groups share eight
        (64, 16, 2, 1, 1),
        (31, 16, 8, 0, 1),
        (64, None, 8, 0, 1),
        (8, 1, 3, 0, 3),
        (1, 1, 3, 0, 1),
    ],
)
def test_a_group_is_split_among_its_share_of_the_idle(
    samples: int, least: int | None, idle: int, waiting: int, expected: int
) -> None:
    assert num_parts(samples, least, idle, waiting) == expected


def test_a_pool_gives_the_same_samples_in_parts(cluster: None, tiny_model_dir: str, tmp_path: Path) -> None:
    prompts = [RolloutRequest([7, 8, 9], SamplingParams(n=10, max_new_tokens=24, seed=5), sample_offset=3)]

    def rolled_out(num_actors: int, least: int | None) -> RolloutGroup:
        config = PoolConfig(
            model=tiny_model_dir,
            num_actors=num_actors,
            cpus_per_actor=1,
            engine=ENGINE,
            min_part_samples=least,
        )
        pool = RolloutPool.remote(config)
        (group,) = ray.get(pool.rollout.remote(prompts), timeout=180)
        ray.kill(pool)
        return group

    whole, parts = rolled_out(1, 1), rolled_out(2, 4)
    assert parts.error is None
    assert [one.sample_index for one in parts.samples] == list(range(3, 13))
    for one, other in zip(whole.samples, parts.samples, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()
    assert {stay.actor for stay in whole.timing.stays} == {""}
    assert {stay.actor for stay in parts.timing.stays} == {"actor-0", "actor-1"}
    assert parts.timing.prefill_tokens == 2 * whole.timing.prefill_tokens

    with TraceFile(tmp_path / "trace.jsonl") as trace:
        trace.begin(RunConfig(model=tiny_model_dir), num_prompts=1)
        trace.add_group(parts)
    timeline = timeline_of(read_trace(tmp_path / "trace.jsonl"))
    drawn = [(timeline.actors[int(where)]["name"], sample) for where, _, sample, *_ in timeline.stays]
    assert drawn == [(stay.actor, stay.sample_index) for stay in parts.timing.stays]
