"""What does not fit or cannot be loaded is refused before anything is allocated, with the way out."""

from __future__ import annotations

import re
from typing import Any

import psutil
import pytest

from rollout_pool import CapacityError, ConfigError, Engine, EngineConfig, SamplingParams

GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)


def test_slots_that_do_not_fit_are_refused_with_the_remedy(llama: Any) -> None:
    with pytest.raises(
        CapacityError, match=r"num_slots 65536 .*max_length 100000.*lower engine\.num_slots"
    ) as caught:
        Engine(llama, EngineConfig(num_slots=65_536, max_length=100_000))
    assert "\n" not in str(caught.value)


def test_the_remedy_fits(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    per_token = 3 * 2 * 2 * 16 * 4  # layers, keys and values, kv heads, head dim, bytes
    free = type("Free", (), {"available": 100 * 64 * per_token})()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(CapacityError) as caught:
        Engine(llama, EngineConfig(num_slots=200, max_length=64))
    slots, length = map(int, re.findall(r"to at most (\d+)", str(caught.value)))
    assert slots < 100
    for config in (
        EngineConfig(num_slots=slots, max_length=64),
        EngineConfig(num_slots=200, max_length=length),
    ):
        plan = Engine(llama, config).memory_plan
        assert plan.kv_bytes <= 0.9 * free.available
        assert plan.bytes_per_token == per_token
    with pytest.raises(CapacityError):
        Engine(llama, EngineConfig(num_slots=slots + 1, max_length=64))


def test_the_plan_names_what_the_cache_really_takes(llama: Any) -> None:
    engine = Engine(llama, EngineConfig(num_slots=5, max_length=40, prefix_cache_tokens=40))
    held = sum(tensor.nbytes for tensor in engine.cache.tensors())
    assert engine.stats().kv_bytes == held
    assert engine.memory_plan.kv_bytes == held // 5 * 7  # and one prompt that is held, and one that was
    assert "5 slots x 40 tokens" in engine.memory_plan.describe()


def test_a_model_that_is_not_there_is_a_configuration_error(tmp_path: Any) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConfigError, match="cannot load model") as caught:
            Engine(str(path))
        assert "\n" not in str(caught.value)


def test_loading_options_are_not_for_a_loaded_model(llama: Any) -> None:
    with pytest.raises(ConfigError, match="loaded already"):
        Engine(llama, dtype="bfloat16")
