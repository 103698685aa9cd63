"""A group whose samples go to several actors: who gets which, and the one group that comes of it.

Every draw is determined by seed, identity and sample index, so parts have the samples of the whole. Each part
computes the prompt for itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

from rollout_pool.types import CANCELLED, ResolvedRequest, RolloutGroup, Sample, Stay, Timing


def num_parts(num_samples: int, least: int | None, num_idle: int, num_waiting: int) -> int:
    """In how many parts a group goes out, to as many idle actors.

    num_idle: actors with nothing to do, the one that the group goes to anyway among them. num_waiting: groups
    that wait behind it; each is an actor's work, so that only a share of the idle ones is left for this one.
    least: samples in a part; None: groups stay whole.
    """
    if least is None:
        return 1
    return max(1, min(num_samples // least, num_idle // (num_waiting + 1)))


def split(request: ResolvedRequest, count: int) -> list[ResolvedRequest]:
    """Requests for the same samples, in ``count`` parts as equal as can be."""
    n = request.sampling.n
    bounds = [n * number // count for number in range(count + 1)]
    return [_part(request, *bound) for bound in pairwise(bounds)]


def join(request: ResolvedRequest, groups: Sequence[RolloutGroup]) -> RolloutGroup:
    """The group of ``request``, of what came of its parts. One that failed makes it fail; one that was
    cancelled, cancelled."""
    if len(groups) == 1:
        return groups[0]
    errors = [group.error for group in groups if group.error is not None]
    samples = [sample for group in groups for sample in group.samples]
    return groups[0].replace(
        samples=sorted(samples, key=lambda sample: sample.sample_index),
        error=next((error for error in errors if error != CANCELLED), CANCELLED) if errors else None,
        sampling=request.sampling,
        timing=_timing([group.timing for group in groups]),
    )


def with_samples(request: ResolvedRequest, samples: Sequence[Sample]) -> ResolvedRequest:
    """The same request, to go on with these instead of what it had of them."""
    new = {sample.sample_index for sample in samples}
    kept = [sample for sample in request.resume if sample.sample_index not in new]
    return dataclasses.replace(request, resume=(*kept, *samples))


def _part(request: ResolvedRequest, begin: int, end: int) -> ResolvedRequest:
    first, last = request.sample_offset + begin, request.sample_offset + end - 1
    return dataclasses.replace(
        request,
        sampling=request.sampling.model_copy(update={"n": end - begin}),
        sample_offset=first,
        resume=tuple(sample for sample in request.resume if first <= sample.sample_index <= last),
    )


def _timing(timings: Sequence[Timing]) -> Timing:
    """From when the first part was in to when the last was over, as far as parts know of one another."""
    return Timing(
        queue_s=min(timing.queue_s for timing in timings),
        run_s=max(timing.run_s for timing in timings),
        prefill_tokens=sum(timing.prefill_tokens for timing in timings),
        actor=timings[0].actor,
        stays=tuple(_signed(stay, timing.actor) for timing in timings for stay in timing.stays),
    )


def _signed(stay: Stay, actor: str) -> Stay:
    return dataclasses.replace(stay, actor=actor)
