"""Prompts without end, drawn a few at a time, in the process of the caller.

:func:`stream_prompts` feeds a pool, or an engine, from an iterator. :func:`oversample` does it until enough
groups have passed the caller's own test, which therefore needs not be known to any other process.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout_pool.errors import ConfigError, RequestError
from rollout_pool.requests import call_seed, resolve_requests
from rollout_pool.terms import Rest, Terms
from rollout_pool.types import Prompt, ResolvedRequest, RolloutGroup, RolloutRequest, SamplingParams

IN_FLIGHT = 64


@dataclass(frozen=True, slots=True)
class Oversampled:
    """What :func:`oversample` found. Groups are in the order in which they finished."""

    wanted: int
    kept: list[RolloutGroup] = field(default_factory=list)
    """Those that passed, at most ``wanted``."""
    num_dropped: int = 0
    """How many did not."""
    failed: list[RolloutGroup] = field(default_factory=list)
    """Those with an ``error``; they were not tested."""
    cut: list[RolloutGroup] = field(default_factory=list)
    """With ``rest="partial"``: what was on its way when there were enough. Whole groups are among them, which
    finished meanwhile; the others can be gone on with, by ``RolloutRequest(resume=group.samples)``."""

    @property
    def is_complete(self) -> bool:
        """Whether as many passed as were wanted. If not, the prompts ran out."""
        return len(self.kept) == self.wanted


def stream_prompts(
    source: Any,
    prompts: Iterable[Prompt | RolloutRequest],
    sampling: SamplingParams | None = None,
    *,
    in_flight: int = IN_FLIGHT,
    max_staleness: int | None = None,
) -> Iterator[RolloutGroup]:
    """Roll out an iterator of prompts, yielding groups as they finish; ``index`` is the place of the prompt.

    A prompt is read when there is room: no more than ``in_flight`` groups are queued, running, or finished
    and not taken. That should be enough to fill all slots of the pool. A prompt without a ``request_id`` gets
    its place as one, so with an explicit seed its samples do not depend on ``in_flight``.

    Args:
        source: the handle of a pool, or an ``Engine``.
        max_staleness: see ``pool.rollout``; for a pool only.

    What is in flight is cancelled when the iterator raises, or the generator is closed.
    """
    numbered = _numbered(prompts)
    with _Flight(source, sampling, _at_least_one("in_flight", in_flight), max_staleness) as flight:
        while True:
            flight.fill(numbered)
            if not flight.is_empty:
                yield flight.land()
            else:
                return


def oversample(
    source: Any,
    prompts: Iterable[Prompt | RolloutRequest],
    sampling: SamplingParams | None = None,
    *,
    take: int,
    accept: Callable[[RolloutGroup], bool],
    in_flight: int | None = None,
    rest: Rest = "cancel",
    max_staleness: int | None = None,
) -> Oversampled:
    """Draw until ``take`` groups have passed ``accept``, as DAPO's dynamic sampling does.

    ::

        done = oversample(pool, prompts, sampling, take=64, accept=lambda group: len(set(rewards(group))) > 1)

    Args:
        source, prompts, sampling, max_staleness: see :func:`stream_prompts`. ``prompts`` may be endless; no
            more of it is read than was in flight at some time.
        accept: called here, once for every group without an ``error``, one after the other. What it raises
            cancels all that is in flight and comes out of this call.
        in_flight: how many groups at once; by default twice ``take``.
        rest: what becomes of the surplus when there are enough: cancelled, or returned in ``cut``.

    When the prompts run out first, the result has what there is, and ``is_complete`` is False. Raises
    :class:`RequestError` when ``in_flight`` groups in a row have failed.
    """
    _at_least_one("take", take)
    in_flight = 2 * take if in_flight is None else _at_least_one("in_flight", in_flight)
    Terms(rest=rest)
    if not callable(accept):
        raise RequestError(f"accept must be callable, got {type(accept).__name__}")
    numbered, result, dropped, in_a_row = _numbered(prompts), Oversampled(take), 0, 0
    with _Flight(source, sampling, in_flight, max_staleness) as flight:
        while not result.is_complete:
            flight.fill(numbered)
            if flight.is_empty:
                break
            group = flight.land()
            in_a_row = 0 if group.error is None else in_a_row + 1
            if group.error is not None:
                result.failed.append(group)
                if in_a_row >= in_flight:
                    raise RequestError(f"{in_a_row} groups in a row failed, the last one: {group.error}")
            elif accept(group):
                result.kept.append(group)
            else:
                dropped += 1
        if rest == "partial":
            result.cut.extend(flight.recall())
    return dataclasses.replace(result, num_dropped=dropped)


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"{name} must be an integer of at least 1, got {value!r}")
    return value


def _numbered(prompts: Iterable[Prompt | RolloutRequest]) -> Iterator[tuple[int, RolloutRequest]]:
    if isinstance(prompts, (str, bytes, Mapping, RolloutRequest)) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be an iterable of prompts, got a single {type(prompts).__name__}")
    return enumerate(item if isinstance(item, RolloutRequest) else RolloutRequest(item) for item in prompts)


class _Runway(Protocol):
    """Where single requests are rolled out."""

    def start(self, number: int, request: RolloutRequest) -> None: ...
    def next(self) -> tuple[int, RolloutGroup]: ...
    def recall(self) -> None: ...
    def cancel(self) -> None: ...


class _Flight:
    """A bounded number of groups on their way. Leaving the context cancels what is left of them."""

    def __init__(
        self, source: Any, sampling: SamplingParams | None, limit: int, max_staleness: int | None
    ) -> None:
        self._runway = _runway(source, sampling, max_staleness)
        self._limit = limit
        self._count = 0

    def __enter__(self) -> _Flight:
        return self

    def __exit__(self, *_: object) -> None:
        if self._count:
            self._runway.cancel()

    @property
    def is_empty(self) -> bool:
        return not self._count

    def fill(self, numbered: Iterator[tuple[int, RolloutRequest]]) -> None:
        while self._count < self._limit and (item := next(numbered, None)) is not None:
            number, request = item
            if request.request_id is None:
                request = dataclasses.replace(request, request_id=number)
            self._runway.start(number, request)
            self._count += 1

    def land(self) -> RolloutGroup:
        number, group = self._runway.next()
        self._count -= 1
        return group.replace(index=number)

    def recall(self) -> list[RolloutGroup]:
        """All that is left comes back with what it has."""
        self._runway.recall()
        return [self.land() for _ in range(self._count)]


def _runway(source: Any, sampling: SamplingParams | None, max_staleness: int | None) -> _Runway:
    if callable(getattr(source, "step", None)):
        if max_staleness is not None:
            raise ConfigError(
                "max_staleness is for pools: the weights of an engine change between its steps only"
            )
        return _OnEngine(source, sampling)
    if not hasattr(getattr(source, "rollout", None), "remote"):
        raise ConfigError(
            f"rollouts come from an Engine or from the handle of a pool, got {type(source).__name__}"
        )
    return _OnPool(source, sampling, max_staleness)


class _OnPool:
    def __init__(self, pool: Any, sampling: SamplingParams | None, max_staleness: int | None) -> None:
        self._pool = pool
        self._call_id = f"flight-{uuid.uuid4().hex}"
        self._arguments = {"sampling": sampling, "max_staleness": max_staleness, "call_id": self._call_id}
        self._numbers: dict[Any, int] = {}

    def start(self, number: int, request: RolloutRequest) -> None:
        self._numbers[self._pool.rollout.remote([request], **self._arguments)] = number

    def next(self) -> tuple[int, RolloutGroup]:
        import ray

        (ready, *_), _ = ray.wait(list(self._numbers), num_returns=1)
        (group,) = ray.get(ready)
        return self._numbers.pop(ready), group

    def recall(self) -> None:
        import ray

        ray.get(self._pool.cancel.remote(call_id=self._call_id))

    def cancel(self) -> None:
        import ray

        for reference in self._numbers:
            ray.cancel(reference)


class _OnEngine:
    def __init__(self, engine: Any, sampling: SamplingParams | None) -> None:
        self._engine, self._sampling = engine, sampling
        self._asked: dict[str, tuple[int, ResolvedRequest]] = {}
        self._finished: list[RolloutGroup] = []

    def start(self, number: int, request: RolloutRequest) -> None:
        seed = call_seed(self._engine.seed, number)
        (resolved,) = resolve_requests([request], self._sampling, seed=seed)
        name = uuid.uuid4().hex  # two prompts may have one id, and others use the engine too
        self._asked[name] = number, resolved
        self._engine.submit(dataclasses.replace(resolved, request_id=name), self._finished.append)

    def next(self) -> tuple[int, RolloutGroup]:
        while not self._finished:
            self._engine.step()
        group = self._finished.pop(0)
        number, resolved = self._asked.pop(str(group.request_id))
        return number, group.replace(request_id=resolved.request_id)

    def recall(self) -> None:
        for name in self._asked:
            self._engine.abort(name)

    def cancel(self) -> None:
        self.recall()
