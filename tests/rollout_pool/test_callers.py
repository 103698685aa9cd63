"""Callers of one pool, in several processes: those who are slow, who change their mind, and who die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import count
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM
from waiting import stats_of_all, wait_until

from rollout_pool import (
    EngineConfig,
    PoolConfig,
    RequestError,
    RolloutGroup,
    RolloutPool,
    RolloutRequest,
    SamplingParams,
    oversample,
    stream_prompts,
)
from rollout_pool.callers import HAS_BACK_PRESSURE, STREAM_AHEAD
from rollout_pool.weight_sync import ship

pytestmark = pytest.mark.usefixtures("cluster")

ENGINE = EngineConfig(num_slots=4, max_length=128, deterministic="strict")
SAMPLING = SamplingParams(n=2, max_new_tokens=20, ignore_eos=True, seed=7)
LONG = SamplingParams(n=4, max_new_tokens=120, ignore_eos=True, seed=7)
ENDLESS = SamplingParams(n=1000, max_new_tokens=120, ignore_eos=True)
"""Goes on until it is cancelled, however late that is."""
PROMPTS = [RolloutRequest([5 + number], request_id=f"p{number}") for number in range(12)]
NUM_LONG = 1000
WINDOW = 6

VICTIM = """
import sys, ray
from rollout_pool import SamplingParams
ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False)
pool = ray.get_actor("shared")
long = SamplingParams(n=4, max_new_tokens=120, ignore_eos=True)
prompts = [[5 + number] for number in range(int(sys.argv[3]))]
call, stream = pool.rollout.remote(prompts, long), pool.stream.remote(prompts, long)
print("got", ray.get(next(stream)).index, flush=True)
ray.get(call)
"""


@pytest.fixture(scope="module")
def pool(tiny_model_dir: str, cluster: None):
    config = PoolConfig(
        model=tiny_model_dir, num_actors=2, cpus_per_actor=1, engine=ENGINE, stream_window=WINDOW
    )
    handle = RolloutPool.options(name="shared", lifetime="detached").remote(config)
    ray.get(handle.ready.remote(), timeout=180)
    yield handle
    ray.kill(handle)


def wait_until_idle(pool) -> Any:
    def is_idle() -> bool:
        now = stats_of_all(pool)
        return not now.in_flight and not any(engine.live_rows for engine in now.actors)

    wait_until(is_idle, "somebody's work goes on")
    return stats_of_all(pool)


def wait_until_running(pool, *calls: Any) -> None:
    """Until something runs, or a call is over already."""

    def is_running() -> bool:
        return any(e.live_rows for e in stats_of_all(pool).actors) or bool(ray.wait([*calls], timeout=0)[0])

    wait_until(is_running, "nothing runs")


def rollout(
    pool, prompts: Any = PROMPTS, sampling: SamplingParams = SAMPLING, **terms: Any
) -> list[RolloutGroup]:
    groups: list[RolloutGroup] = ray.get(pool.rollout.remote(prompts, sampling, **terms), timeout=120)
    return groups


def tokens(groups: list[RolloutGroup]) -> dict[Any, list[list[int]]]:
    return {group.request_id: [s.token_ids.tolist() for s in group.samples] for group in groups}


def test_a_driver_that_is_killed_has_its_work_cancelled_and_no_other_notices(pool) -> None:
    undisturbed, before = rollout(pool), wait_until_idle(pool)
    context = ray.get_runtime_context()
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, context.gcs_address, context.namespace, str(NUM_LONG)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert victim.stdout is not None
    assert victim.stdout.readline().startswith("got ")
    call = pool.rollout.remote(PROMPTS, SAMPLING)
    os.kill(victim.pid, signal.SIGKILL)
    assert tokens(ray.get(call, timeout=120)) == tokens(undisturbed)  # it has its share, whoever else waits
    victim.wait(timeout=60)
    after = wait_until_idle(pool)
    taken = after.returned - before.returned - len(PROMPTS)
    assert 1 <= taken <= (1 + STREAM_AHEAD if HAS_BACK_PRESSURE else NUM_LONG)
    assert after.cancelled - before.cancelled == 2 * NUM_LONG - taken
    assert after.failed == before.failed


def test_a_stream_that_is_dropped_is_cancelled(pool) -> None:
    before = stats_of_all(pool)
    stream = pool.stream.remote([[5]] * NUM_LONG, LONG)
    ray.get(next(stream))
    del stream
    after = wait_until_idle(pool)
    assert after.cancelled - before.cancelled >= NUM_LONG // 2


@pytest.mark.skipif(not HAS_BACK_PRESSURE, reason="Ray's streams do not wait for their callers here")
def test_a_slow_caller_stops_only_what_it_asked_for(pool) -> None:
    before, short = stats_of_all(pool), SamplingParams(max_new_tokens=2, ignore_eos=True)
    stream = pool.stream.remote([[5]] * 60, short)
    done = lambda: sum(engine.finished for engine in stats_of_all(pool).actors)  # noqa: E731
    seen = [-1, done()]
    while seen[-1] != seen[-2]:  # until it stands still
        time.sleep(0.3)
        seen.append(done())
    assert stats_of_all(pool).returned - before.returned <= STREAM_AHEAD
    assert seen[-1] - seen[1] <= STREAM_AHEAD + 1 + WINDOW + 2 * (4 + 1)  # window, and what actors had
    assert len(rollout(pool)) == len(PROMPTS)
    assert sorted(ray.get(reference).index for reference in stream) == list(range(60))


def test_the_first_k_of_a_stream_and_the_rest_as_it_is(pool) -> None:
    whole = tokens(rollout(pool, sampling=LONG))
    before = stats_of_all(pool)
    groups = [ray.get(r) for r in pool.stream.remote(PROMPTS, LONG, take=3)]
    assert [group.error for group in groups] == [None] * 3
    after = wait_until_idle(pool)
    assert (after.returned - before.returned, after.cancelled - before.cancelled) == (3, len(PROMPTS) - 3)
    partial: list[RolloutGroup] = []
    deadline = time.monotonic() + 90
    while not partial:  # until some have begun when there is enough
        assert time.monotonic() < deadline
        stream = pool.stream.remote(PROMPTS, LONG, take=4, unit="samples", rest="partial")
        groups = [ray.get(r) for r in stream]
        assert sorted(group.request_id for group in groups) == sorted(whole)
        assert groups[0].error is None
        partial = [group for group in groups if group.is_cancelled and group.samples]
    assert {s.finish_reason for group in partial for s in group.samples} <= {"aborted", "length"}
    again = [
        RolloutRequest(g.prompt_token_ids, LONG, request_id=g.request_id, resume=g.samples) for g in partial
    ]
    for request_id, resumed in tokens(rollout(pool, again)).items():
        assert resumed == whole[request_id]
    with pytest.raises(RequestError, match="unit must be one of"):
        rollout(pool, unit="tokens")


def test_one_request_of_a_call_is_cancelled(pool) -> None:
    call = pool.rollout.remote([*PROMPTS, RolloutRequest([9], ENDLESS, request_id="unwanted")], SAMPLING)
    assert ray.get(pool.cancel.remote("unwanted")) == 1
    groups = ray.get(call, timeout=120)
    assert [group.is_cancelled for group in groups] == [False] * len(PROMPTS) + [True]
    assert ray.get(pool.cancel.remote("unwanted")) == 0


def test_a_cancel_never_comes_before_the_call_that_it_is_meant_for(pool) -> None:
    process = ray.get_runtime_context().get_worker_id()

    def number() -> int:
        return ray.get(pool.__ray_call__.remote(lambda self: self._callers._order._lines[process].next))

    before = number()
    for _ in range(20):
        call = pool.rollout.remote([RolloutRequest([9], ENDLESS, request_id="unwanted")])
        assert ray.get(pool.cancel.remote("unwanted")) == 1
        assert ray.get(call, timeout=120)[0].is_cancelled
    assert number() == before + 2 * 20  # Ray alone fails in a few of a hundred
    sampling = ray.put(SAMPLING)
    assert len(ray.get(pool.rollout.remote(PROMPTS, sampling), timeout=120)) == len(PROMPTS)
    assert number() == before + 2 * 20


def test_a_call_is_cancelled_while_its_pool_still_starts(tiny_model_dir: str) -> None:
    pool = RolloutPool.remote(PoolConfig(model=tiny_model_dir, num_actors=1, cpus_per_actor=1, engine=ENGINE))
    call = pool.rollout.remote([RolloutRequest([9], ENDLESS, request_id="unwanted")])
    assert ray.get(pool.cancel.remote("unwanted"), timeout=180) == 1
    assert ray.get(call, timeout=120)[0].is_cancelled
    ray.kill(pool)


def test_no_token_is_older_than_asked_for_when_weights_change_in_flight(pool, tiny_model_dir: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    before, span_of_lax = stats_of_all(pool).restarted, 0

    def spans(call: Any) -> list[int]:  # of weight versions in each sample
        samples = (sample for group in ray.get(call, timeout=120) for sample in group.samples)
        return [int(sample.token_versions.max() - sample.token_versions.min()) for sample in samples]

    deadline = time.monotonic() + 90
    while span_of_lax < 2 or stats_of_all(pool).restarted == before:  # until both outlast two syncs
        assert time.monotonic() < deadline
        shipped = [ship(model) for _ in range(2)]
        lax, strict = (pool.rollout.remote(PROMPTS[:4], LONG, max_staleness=limit) for limit in (None, 1))
        wait_until_running(pool, lax, strict)
        ray.get(
            [pool.sync_weights.remote(weights, policy="in_flight", kv="keep") for weights in shipped],
            timeout=120,
        )
        span_of_lax = max(span_of_lax, *spans(lax))
        assert max(spans(strict)) <= 1
    wait_until_idle(pool)


def test_oversampling_draws_from_an_endless_stream_until_enough_pass(pool) -> None:
    before = wait_until_idle(pool)
    prompts = (RolloutRequest([5 + number % 50], LONG if number % 4 == 3 else SAMPLING) for number in count())
    done = oversample(
        pool, prompts, take=5, accept=lambda group: group.index % 2 == 0, in_flight=8, rest="partial"
    )
    assert done.is_complete
    assert all(group.index % 2 == 0 and group.error is None for group in done.kept)
    after = wait_until_idle(pool)
    assert after.submitted - before.submitted == 5 + done.num_dropped + len(done.cut)
    assert after.cancelled - before.cancelled == sum(group.is_cancelled for group in done.cut)
    assert any(group.samples for group in done.cut)

    def fail(group: RolloutGroup) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        oversample(pool, ([5] for _ in count()), LONG, take=3, accept=fail)
    wait_until_idle(pool)


def test_an_iterator_of_prompts_is_streamed(pool) -> None:
    expected = rollout(pool)
    groups = list(stream_prompts(pool, iter(PROMPTS), SAMPLING, in_flight=5))
    assert sorted(group.index for group in groups) == list(range(len(PROMPTS)))
    assert tokens(groups) == tokens(expected)
