"""Those who ask a pool for groups, and do not give up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollout_pool.errors import RolloutPoolError
from rollout_pool.pool import PoolActor
from rollout_pool.simulation.workload import tokens_of
from rollout_pool.types import RolloutGroup, RolloutRequest, SamplingParams

GROUPS_PER_CALL = 8
SAMPLING = SamplingParams(n=3, max_new_tokens=60, seed=7)


class Caller:
    """Calls ``rollout`` and ``stream`` in turn, until ``is_ending``, and at least ``num_calls`` times.

    faults: what should not have come back is written there.
    """

    def __init__(self, pool: PoolActor, name: str, num_calls: int, faults: list[str]) -> None:
        self.name = name
        self.is_ending = False
        self.num_complete = 0
        self.results: dict[tuple[str, int], tuple[bytes, str]] = {}
        """Tokens and finish reason of every sample."""
        self.ended_by: RolloutPoolError | None = None
        """Why the pool took no more calls."""
        self._pool = pool
        self._faults = faults
        self._asking: asyncio.Task[None] | None = None
        self._wanted = num_calls
        self._num_asked = 0

    def cancel(self) -> None:
        """Leave in the middle of a call, if there is one."""
        if self._asking is not None:
            self._asking.cancel()

    async def run(self) -> None:
        """One call after the other, each repeated until all its groups are there."""
        while not self.is_ending or self.num_complete < self._wanted:
            number = self.num_complete
            missing = {
                f"{self.name}-{number}-{index}": RolloutRequest(
                    [index], request_id=f"{self.name}-{number}-{index}"
                )
                for index in range(GROUPS_PER_CALL)
            }
            while missing:
                self._asking = asyncio.ensure_future(self._ask(missing))
                (end,) = await asyncio.gather(self._asking, return_exceptions=True)
                if isinstance(end, RolloutPoolError):
                    self.ended_by = end
                    return
                if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
                    raise end
            self.num_complete += 1

    async def _ask(self, missing: dict[str, RolloutRequest]) -> None:
        """Ask for what is missing, once; what comes complete is no longer missing."""
        self._num_asked += 1
        requests = list(missing.values())
        if self._num_asked % 2:
            for index, group in enumerate(await self._pool.rollout(requests, SAMPLING)):
                self._take(group, index, requests, missing)
            return
        seen = set()
        async for group in self._pool.stream(requests, SAMPLING):
            if group.index in seen:
                self._faults.append(f"{group.request_id} came twice")
            seen.add(group.index)
            self._take(group, group.index, requests, missing)
        if len(seen) != len(requests):
            self._faults.append(f"a stream of {len(requests)} groups gave {len(seen)}")

    def _take(
        self,
        group: RolloutGroup,
        index: int,
        requests: Sequence[RolloutRequest],
        missing: dict[str, RolloutRequest],
    ) -> None:
        name = str(group.request_id)
        if (group.index, name) != (index, requests[index].request_id):
            self._faults.append(f"{name} came as number {group.index} in place of {requests[index]}")
        if group.error is not None:
            return
        if len(group.samples) != SAMPLING.n:
            self._faults.append(f"{name} has {len(group.samples)} samples")
        if any(sample.finish_reason == "aborted" for sample in group.samples):
            missing[name] = RolloutRequest(requests[index].prompt, request_id=name, resume=group.samples)
            return
        del missing[name]
        for sample in group.samples:
            key = (name, sample.sample_index)
            if key in self.results:
                self._faults.append(f"{key} came twice")
            whole = tokens_of(sample.seed, sample.identity, sample.sample_index, sample.token_ids.size)
            if (
                not (sample.token_ids == whole).all()
                or (sample.token_versions[1:] < sample.token_versions[:-1]).any()
            ):
                self._faults.append(f"{key} is not what its request gives")
            self.results[key] = sample.token_ids.tobytes(), sample.finish_reason
