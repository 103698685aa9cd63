"""This package: one engine, and a pool of one or of two actors on the same cores."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import Any

from rollout_pool import Engine, EngineConfig, RolloutPool, RolloutRequest, SamplingParams
from rollout_pool.config import PoolConfig
from speed.work import Done, Unavailable, Work


def sampling(work: Work) -> SamplingParams:
    """The work's sampling. Ids that end samples come from the work, not from the model."""
    return SamplingParams(
        n=work.n,
        temperature=work.temperature,
        max_new_tokens=work.max_new,
        ignore_eos=True,
        stop_token_ids=tuple(work.eos),
    )


def engine_config(work: Work, rows: int) -> EngineConfig:
    """Rows of just the length that the work needs. No prompt is known from an earlier round."""
    return EngineConfig(num_slots=rows, max_length=work.max_length, prefix_cache_tokens=0)


def engine(work: Work, rows: int) -> Callable[[Work], Done]:
    """One engine in this process."""
    ours = Engine(work.model, engine_config(work, rows), dtype=work.dtype, trust_remote_code=work.own_code)

    def run(work: Work) -> Done:
        begin, first = time.perf_counter(), 0.0
        groups: list[Any] = []
        params = sampling(work)
        for prompt in work.prompts:
            ours.submit(request(prompt, params), groups.append)
        while ours.has_work():
            ours.step()
            if groups and not first:
                first = time.perf_counter() - begin
        return done(work, groups, first)

    return run


def request(prompt: list[int], params: SamplingParams) -> RolloutRequest:
    """One prompt under a name of its own: no two draw alike, and each draws alike in every way of ours."""
    name = zlib.crc32(repr(prompt).encode())
    return RolloutRequest(prompt, params, request_id=name, seed=0)


def done(work: Work, groups: list[Any], first: float) -> Done:
    """What groups hold. Raises RuntimeError when one of them failed."""
    faults = [group.error for group in groups if group.error]
    if faults:
        raise RuntimeError(faults[0])
    samples = [sample for group in groups for sample in group.samples]
    return Done(len(samples), sum(work.count(sample.token_ids.tolist()) for sample in samples), first)


def pool(work: Work, rows: int, num_actors: int) -> Callable[[Work], Done]:
    """A pool whose actors share the cores and the rows; groups come as they finish."""
    import ray

    if work.threads < num_actors:
        raise Unavailable(f"{num_actors} actors need {num_actors} threads")
    start_ray(work.threads)
    config = PoolConfig(
        model=work.model,
        dtype=work.dtype,
        num_actors=num_actors,
        cpus_per_actor=work.threads // num_actors,
        engine=engine_config(work, rows // num_actors),
        trust_remote_code=work.own_code,
    )
    handle = RolloutPool.remote(config)
    ray.get(handle.ready.remote())

    def run(work: Work) -> Done:
        begin, first = time.perf_counter(), 0.0
        groups: list[Any] = []
        params = sampling(work)
        for reference in handle.stream.remote([request(prompt, params) for prompt in work.prompts]):
            groups.append(ray.get(reference))
            first = first or time.perf_counter() - begin
        return done(work, groups, first)

    return run


def pool_of_one(work: Work, rows: int) -> Callable[[Work], Done]:
    """One actor with all threads."""
    return pool(work, rows, 1)


def pool_of_two(work: Work, rows: int) -> Callable[[Work], Done]:
    """Two actors with half of the threads and of the rows each."""
    return pool(work, rows, 2)


def start_ray(threads: int) -> None:
    """A cluster of this process's own, with as many cores as it may use."""
    import ray

    ray.init(
        address="local", num_cpus=threads, include_dashboard=False, log_to_driver=False, logging_level="error"
    )
