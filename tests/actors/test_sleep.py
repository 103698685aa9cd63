"""An engine that sleeps gives its KV memory back, and is the same when it wakes."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from rollout_pool import Engine, EngineConfig, RequestError, RolloutRequest, SamplingParams
from rollout_pool.actors import assembly
from rollout_pool.actors.tape import TapeRecorder, one_operation
from rollout_pool.kernels import ops

SAMPLING = SamplingParams(n=2, max_new_tokens=12, seed=3)
# 64 slots x 8192 tokens x 3 layers x 2 KV heads x 16 x 2 x 4 bytes = 384 MiB. Each of the six tensors is above
# 32 MiB, so that the C library maps it by itself and gives it back when it is freed.
LARGE = EngineConfig(num_slots=64, max_length=8192)


def resident_mib() -> float:
    return float(psutil.Process().memory_info().rss / 2**20)


def tokens(groups: list[Any]) -> list[Any]:
    return [[sample.token_ids.tolist() for sample in group.samples] for group in groups]


def test_memory_is_given_back_and_flat_over_ten_cycles(llama: Any, prompts_of: Any, poison: Any) -> None:
    engine = poison(Engine(llama, LARGE))  # all of the memory is touched, so it is resident
    prompts = prompts_of([5, 9, 3])
    expected = tokens(engine.generate(prompts, SAMPLING))
    awake, asleep = [], []
    for _ in range(12):
        poison(engine)
        assert tokens(engine.generate(prompts, SAMPLING)) == expected
        awake.append(resident_mib())
        engine.sleep()
        asleep.append(resident_mib())
        engine.wake()
    awake, asleep = awake[2:], asleep[2:]  # what tests before this one have left goes in the first
    assert min(awake) - max(asleep) > 350
    assert max(asleep) - min(asleep) < 20
    assert max(awake) - min(awake) < 20


def test_recorded_steps_are_made_again(llama: Any, prompts_of: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(ops, "sample_tokens", one_operation(ops.sample_tokens))
    config = EngineConfig(num_slots=4, max_length=32)
    expected = tokens(Engine(llama, config).generate(prompts_of([5, 9]), SAMPLING))
    monkeypatch.setattr(assembly, "recorder_for", lambda *_: TapeRecorder())
    engine = Engine(llama, config)
    assert tokens(engine.generate(prompts_of([5, 9]), SAMPLING)) == expected
    made = engine.batch.worker.graphs.num_recordings
    engine.sleep()
    engine.wake()
    assert tokens(engine.generate(prompts_of([5, 9]), SAMPLING)) == expected
    assert engine.batch.worker.graphs.num_recordings > made


def test_an_engine_with_work_does_not_fall_asleep_and_a_sleeping_one_keeps_what_it_is_given(
    llama: Any, prompts_of: Any
) -> None:
    engine = Engine(llama, EngineConfig(num_slots=4, max_length=32))
    (prompt,) = prompts_of([5])
    groups: list[Any] = []
    engine.submit(RolloutRequest(prompt, SAMPLING), groups.append)
    engine.step()
    with pytest.raises(RequestError, match="1 groups are running: finish or abort them before sleep"):
        engine.sleep()
    while engine.has_work():
        engine.step()
    engine.sleep()
    engine.sleep()
    engine.submit(RolloutRequest(prompt, SAMPLING), groups.append)
    with pytest.raises(RequestError, match="asleep: call wake"):
        engine.step()
    engine.wake()
    while engine.has_work():
        engine.step()
    assert [group.error for group in groups] == [None, None]
