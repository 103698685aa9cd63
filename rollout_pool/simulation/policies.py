"""Ways to spread one batch of prompts over actors, all on the same work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rollout_pool.pool import PoolActor
from rollout_pool.requests import resolve_requests
from rollout_pool.simulation.cluster import Cluster
from rollout_pool.simulation.workload import Lengths
from rollout_pool.types import RolloutGroup, RolloutRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Work:
    """A batch of prompts, n samples each, and what is known of their lengths."""

    num_groups: int
    n: int
    prompt_tokens: int
    max_new_tokens: int
    seed: int
    lengths: Lengths

    def sampling(self) -> SamplingParams:
        """Of all prompts."""
        return SamplingParams(n=self.n, max_new_tokens=self.max_new_tokens, seed=self.seed)

    def requests(self, num_groups: int | None = None) -> list[RolloutRequest]:
        """In no order that has to do with lengths."""
        prompt = [0] * self.prompt_tokens
        count = self.num_groups if num_groups is None else num_groups
        return [RolloutRequest(prompt, request_id=index) for index in range(count)]

    def estimate(self, request: RolloutRequest) -> float:
        """The median length of this prompt's samples, as somebody knows it who has rolled it out before."""
        return self.lengths.of_prompt(self.seed, f"name:{request.request_id}")

    def longest(self, request: RolloutRequest) -> int:
        """How long the longest sample will be."""
        name = f"name:{request.request_id}"
        return min(self.max_new_tokens, max(self.lengths.of_samples(self.seed, name, range(self.n))))


Policy = Callable[[PoolActor, Cluster, Work], Awaitable[list[RolloutGroup]]]


async def static_split(pool: PoolActor, cluster: Cluster, work: Work) -> list[RolloutGroup]:
    """Dealt out to the actors beforehand; the pool only starts them."""
    actors = [cluster.alive[name].leader for name in sorted(cluster.alive)]
    requests = resolve_requests(work.requests(), work.sampling(), seed=0)
    running = [actors[number % len(actors)].run.remote(one) for number, one in enumerate(requests)]
    return list(await asyncio.gather(*running))


async def dynamic(pool: PoolActor, cluster: Cluster, work: Work) -> list[RolloutGroup]:
    """``pool.rollout``: the next group goes to the actor with the fewest tokens left."""
    return await pool.rollout(work.requests(), work.sampling())


async def longest_first_estimated(pool: PoolActor, cluster: Cluster, work: Work) -> list[RolloutGroup]:
    """Sorted by the caller, by what they took before; under equal budgets the pool keeps the order."""
    requests = sorted(work.requests(), key=work.estimate, reverse=True)
    return await pool.rollout(requests, work.sampling())


async def longest_first_known(pool: PoolActor, cluster: Cluster, work: Work) -> list[RolloutGroup]:
    """Each group's budget is the length of its longest sample: what nobody knows, as a bound."""
    sampling = work.sampling()
    requests = [
        RolloutRequest(one.prompt, sampling.model_copy(update={"max_new_tokens": work.longest(one)}),
                       request_id=one.request_id)
        for one in work.requests()
    ]  # fmt: skip
    return await pool.rollout(requests)


async def halves(pool: PoolActor, cluster: Cluster, work: Work) -> list[RolloutGroup]:
    """Every group as two requests with n/2 samples, which may go to two actors; each computes the prompt."""
    return await _in_parts(pool, work, work.requests(), [])


async def split_tail(pool: PoolActor, cluster: Cluster, work: Work) -> list[RolloutGroup]:
    """Sorted as above; of the last batch, every sample is a request of its own."""
    requests = sorted(work.requests(), key=work.estimate, reverse=True)
    last = max(1, len(cluster.alive) * cluster.latency.num_slots // work.n)
    return await _in_parts(pool, work, [], requests, singles=last)


async def oversampled(pool: PoolActor, cluster: Cluster, work: Work) -> list[RolloutGroup]:
    """A quarter more prompts than needed, ``take`` as many as needed; the rest is cancelled."""
    requests = work.requests(work.num_groups * 5 // 4)
    groups = await pool.rollout(requests, work.sampling(), take=work.num_groups)
    return [group for group in groups if group.error is None]


async def _in_parts(
    pool: PoolActor,
    work: Work,
    halved: list[RolloutRequest],
    whole: list[RolloutRequest],
    singles: int = 0,
) -> list[RolloutGroup]:
    """Requests cut into parts of fewer samples; a part has the samples that the whole would have."""
    sizes = [(one, max(1, work.n // 2)) for one in halved]
    sizes += [(one, work.n) for one in whole[: len(whole) - singles]]
    sizes += [(one, 1) for one in whole[len(whole) - singles :]] if singles else []
    sampling = work.sampling()
    parts = [
        RolloutRequest(one.prompt, sampling.model_copy(update={"n": min(size, work.n - offset)}),
                       request_id=one.request_id, sample_offset=offset)
        for one, size in sizes
        for offset in range(0, work.n, size)
    ]  # fmt: skip
    return await pool.rollout(parts)


POLICIES: dict[str, Policy] = {
    "static split": static_split,
    "dynamic": dynamic,
    "longest first, estimated": longest_first_estimated,
    "longest first, known": longest_first_known,
    "all groups in halves": halves,
    "longest first, tail split": split_tail,
    "5/4 asked, 4/5 taken": oversampled,
}
