"""What a group tells about its slots is where its samples sat, at every moment."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from rollout_pool import Engine, EngineConfig, RolloutGroup, RolloutRequest, SamplingParams

CONFIG = EngineConfig(num_slots=6, max_length=64)
BUDGETS = [30, 6, 17, 25, 3, 21]

Occupancy = dict[int, tuple[Any, int]]
"""Slot: request and sample."""


def watch(engine: Engine) -> tuple[list[tuple[float, Occupancy]], list[RolloutGroup]]:
    """Run to the end; who sat where after every step, and the groups."""
    looks, groups = [], []
    while engine.has_work():
        groups += engine.step()
        seats = engine.batch.seating.seats.values()
        occupancy = {seat.slot: (seat.running.request.request_id, seat.sample_index) for seat in seats}
        looks.append((time.time(), occupancy))
    return looks, groups


def occupancy_at(moment: float, groups: list[RolloutGroup]) -> Occupancy:
    """The same as the groups tell it."""
    stays = [(group.request_id, stay) for group in groups for stay in group.timing.stays]
    present = [(name, stay) for name, stay in stays if stay.start <= moment < stay.end]
    assert len({stay.slot for _, stay in present}) == len(present), "two samples in one slot"
    return {stay.slot: (name, stay.sample_index) for name, stay in present}


def submit(engine: Engine, prompts: list[Any], n: int = 3) -> None:
    for number, (prompt, budget) in enumerate(zip(prompts, BUDGETS, strict=False)):
        sampling = SamplingParams(n=n, max_new_tokens=budget, seed=3, ignore_eos=True)
        engine.submit(RolloutRequest(prompt, sampling, request_id=f"r{number}", sample_offset=number))


@pytest.mark.parametrize("layout", ["ragged", "aligned"])
def test_stays_tell_who_sat_where_through_refills_and_compactions(
    layout: Any, llama: Any, prompts_of: Any
) -> None:
    engine = Engine(llama, CONFIG.model_copy(update={"layout": layout}))
    submit(engine, prompts_of([5, 9, 3, 7, 4, 6]))
    looks, groups = watch(engine)
    for moment, occupancy in looks:
        assert occupancy_at(moment, groups) == occupancy

    stays = [stay for group in groups for stay in group.timing.stays]
    assert all(stay.start <= stay.ready <= stay.end for stay in stays)
    stats = engine.stats()
    assert stats.rows_moved > 0
    assert len(stays) == 18 + stats.rows_moved
    first = min(groups, key=lambda group: group.timing.stays[0].start).timing.stays[0]
    assert first.ready > first.start  # a prompt takes time


def test_a_resumed_sample_has_the_stays_of_its_second_life(llama: Any, prompts_of: Any) -> None:
    engine = Engine(llama, CONFIG)
    prompts = prompts_of([5, 9])
    submit(engine, prompts)
    for _ in range(4):
        engine.step()
    engine.abort("r0")
    cut = next(group for group in engine.step() if group.request_id == "r0")
    assert sorted(stay.sample_index for stay in cut.timing.stays) == [0, 1, 2]
    engine.submit(RolloutRequest(prompts[0], cut.sampling, request_id="again", resume=cut.samples))
    looks, groups = watch(engine)
    for moment, occupancy in looks:
        assert occupancy_at(moment, groups) == occupancy
    again = next(group for group in groups if group.request_id == "again")
    assert min(stay.start for stay in again.timing.stays) >= max(stay.end for stay in cut.timing.stays)


def test_who_sits_down_again_after_a_shortage_has_left_before(
    llama: Any, prompts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = llama.forward

    def limited(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[0] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(*args, **kwargs)

    engine = Engine(llama, CONFIG)
    monkeypatch.setattr(llama, "forward", limited)
    submit(engine, prompts_of([5, 9]))
    looks, groups = watch(engine)
    assert engine.stats().shortages == 1
    for moment, occupancy in looks:
        assert occupancy_at(moment, groups) == occupancy
    samples = [stay.sample_index for group in groups for stay in group.timing.stays]
    assert len(samples) > 6  # of 6 samples, some sat twice
