"""An engine that sleeps gives its KV memory back, and is the same when it wakes."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
from transformers import LlamaConfig

from rollout_pool import Engine, EngineConfig, RequestError, RolloutRequest, SamplingParams
from rollout_pool.actors import assembly
from rollout_pool.actors.checksums import checksum
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


def placed(model: Any) -> list[Any]:
    """How the parameters lie in memory, and which are one."""
    return [(name, p.stride(), p.shape, p.dtype) for name, p in model.named_parameters()]


def wide(build: Any, small_config: Any) -> Any:
    """Wide enough that each weight is mapped one by one: 12 of 3 MiB and a tied embedding of 1.3 MiB, in fp32."""
    return build(
        LlamaConfig(**small_config(hidden_size=512, intermediate_size=1536, tie_word_embeddings=True))
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_sleep_too_and_come_back_bit_for_bit(
    dtype: Any, build: Any, small_config: Any, prompts_of: Any, tmp_path: Path
) -> None:
    wide(build, small_config).save_pretrained(tmp_path)
    engine = Engine(str(tmp_path), EngineConfig(num_slots=4, max_length=32), dtype=dtype)
    model = engine.model
    prompts = prompts_of([5, 9])
    expected, before = tokens(engine.generate(prompts, SAMPLING)), placed(model)
    assert any(not p.is_contiguous() for p in model.parameters())  # transposed when loaded
    sums = [checksum(p) for p in model.parameters()]
    for cycle in range(3):
        engine.sleep(weights=cycle % 2 == 0)
        engine.sleep(weights=True)
        assert all(p.untyped_storage().nbytes() <= 8 for p in model.parameters())
        assert all(bool(p.isnan().all()) for p in model.parameters())
        with pytest.raises(RequestError, match="the weights are asleep: call wake"):
            engine.update_weights(1)
        engine.wake()
        assert [checksum(p) for p in model.parameters()] == sums
    assert tokens(engine.generate(prompts, SAMPLING)) == expected
    assert placed(model) == before
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not any(p.is_inference() for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_weights_is_given_back_and_flat_over_ten_cycles(
    dtype: str, build: Any, small_config: Any, tmp_path: Path
) -> None:
    wide(build, small_config).save_pretrained(tmp_path)
    script = Path(__file__).with_name("sleep_cycles.py")
    command = [sys.executable, "-P", str(script), str(tmp_path), dtype, "12"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    awake, asleep = found["awake"][2:], found["asleep"][2:]
    assert median(awake) - median(asleep) > 0.7 * found["size"]
    for readings in (awake, asleep):  # cycles that kept their weights would add up
        assert median(readings[-5:]) - median(readings[:5]) < found["size"] / 2


def test_a_full_disk_leaves_the_engine_awake_with_its_weights(
    build: Any, small_config: Any, prompts_of: Any, tmp_path: Path
) -> None:
    build(LlamaConfig(**small_config())).save_pretrained(tmp_path)
    engine = Engine(str(tmp_path), EngineConfig(num_slots=4, max_length=32))
    expected = tokens(engine.generate(prompts_of([5]), SAMPLING))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            engine.sleep(weights=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert tokens(engine.generate(prompts_of([5]), SAMPLING)) == expected


def test_the_weights_of_a_borrowed_model_stay(llama: Any) -> None:
    engine = Engine(llama, EngineConfig(num_slots=4, max_length=32))
    with pytest.raises(RequestError, match="the weights are a trainer's"):
        engine.sleep(weights=True)
    with pytest.raises(RequestError, match="version 0 is not above the present one, 0"):
        engine.weights_changed(0)
