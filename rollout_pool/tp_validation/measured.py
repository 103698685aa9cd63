"""The ranks of one size, taken through all checks in the order in which every rank must be called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from rollout_pool.actors.rank_records import Checked, Rolled, RollPlan, Share, States, TopTwo, Usage
from rollout_pool.actors.rollout_actor import RankInfo
from rollout_pool.config import PoolConfig
from rollout_pool.errors import CapacityError, ConfigError, RolloutPoolError, UnsupportedModelError
from rollout_pool.types import RolloutGroup
from rollout_pool.verification import Verification, verify

Say = Callable[[str], None]
AfterLoad = Callable[[Any, int], None]
"""Called on every rank with what it has loaded and its number, before anything is checked."""


class Ranks(Protocol):
    """The processes of one size. Every wait has a deadline, and a lost rank ends all of them."""

    places: Sequence[RankInfo]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What :class:`~rollout_pool.actors.rank_checks.RankChecks` answers on each rank."""

    def call_and_keep(self, method: str, *arguments: Any) -> tuple[list[Any], Callable[[], Any]]:
        """Of pairs: the first parts of all ranks, and how to get rank 0's second part, at any later time."""


Launch = Callable[[PoolConfig], AbstractContextManager[Ranks]]
"""Starts the ranks of a configuration and loads them; ends them when left."""


@dataclass(frozen=True)
class Measured:
    """What the ranks of one size told."""

    places: Sequence[RankInfo]
    shares: list[list[Share]]
    all_reduce: list[Checked]
    prompts: list[tuple[list[Checked], Callable[[], States]]]
    rolled: Rolled
    top_two: dict[int, TopTwo]
    """Of the greedy tokens, by prompt."""
    usage: list[Usage]


@dataclass(frozen=True)
class Outcome:
    """One size in one dtype: what was measured, or why it was not."""

    size: int
    dtype: str
    measured: Measured | None = None
    rescored: Verification | None = None
    refused: str | None = None
    """The model cannot be split, or there is no room for the ranks."""
    failed: str | None = None
    """The ranks were started and did not get through."""

    @property
    def label(self) -> str:
        return f"size {self.size}, {self.dtype}"


def measure(
    config: PoolConfig, plan: RollPlan, launch: Launch, say: Say, after_load: AfterLoad | None
) -> Outcome:
    """Run ``config.tensor_parallel_size`` ranks through all checks; a failure is an outcome, too."""
    empty = Outcome(config.tensor_parallel_size, config.dtype)
    return _outcome(empty, config, launch, lambda ranks: _measure(ranks, plan, say, empty, after_load))


def measure_and_rescore(
    config: PoolConfig,
    plan: RollPlan,
    launch: Launch,
    say: Say,
    after_load: AfterLoad | None,
    others: Sequence[Outcome],
) -> tuple[Outcome, dict[int, Verification]]:
    """Of the single rank. It also rescores the samples of the others' engines, by their size, and its own."""
    rescored: dict[int, Verification] = {}
    single = Outcome(1, config.dtype)

    def work(ranks: Ranks) -> Measured:
        measured = _measure(ranks, plan, say, single, after_load)
        rolled = {other.size: other.measured.rolled for other in others if other.measured is not None}
        for size, one in {**rolled, 1: measured.rolled}.items():
            say(f"{single.label}: rescoring the samples of size {size}")
            (rescored[size],) = ranks.call("apply", rescore, [*one.greedy, *one.shared])
        return measured

    return _outcome(single, config, launch, work), rescored


def rescore(model: Any, groups: list[RolloutGroup]) -> Verification:
    """Runs on the rank with the whole model."""
    return verify(groups, model)


def _outcome(
    empty: Outcome, config: PoolConfig, launch: Launch, work: Callable[[Ranks], Measured]
) -> Outcome:
    size, dtype = empty.size, empty.dtype
    try:
        with launch(config) as ranks:
            return Outcome(size, dtype, work(ranks))
    except (UnsupportedModelError, CapacityError) as error:
        return Outcome(size, dtype, refused=str(error))
    except ConfigError:
        raise  # what was given is wrong: no size would get further
    except RolloutPoolError as error:
        return Outcome(size, dtype, failed=str(error))


def _measure(
    ranks: Ranks, plan: RollPlan, say: Say, empty: Outcome, after_load: AfterLoad | None
) -> Measured:
    def at(what: str) -> None:
        say(f"{empty.label}: {what}")

    if after_load is not None:
        for rank in range(len(ranks.places)):
            ranks.call("apply_on", rank, after_load)
    at("comparing every rank's tensors with the checkpoint")
    shares = ranks.call("shares")
    all_reduce = ranks.call("all_reduce")
    at(f"plain forwards of {len(plan.prompts)} prompts")
    prompts = [ranks.call_and_keep("states", prompt) for prompt in plan.prompts]
    at("rolling out")
    rolled: Rolled = ranks.call("roll", plan)[0]
    top_two = {}
    for index, (prompt, group) in enumerate(zip(plan.prompts, rolled.greedy, strict=True)):
        if group.samples:
            completion = group.samples[0].token_ids.tolist()
            top_two[index] = ranks.call("top_two", prompt, completion)[0]
    return Measured(ranks.places, shares, all_reduce, prompts, rolled, top_two, ranks.call("usage"))
