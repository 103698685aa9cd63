"""Configuration files: those we ship parse, and a mistake is told with the full path of its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout_pool import ConfigError, EngineConfig, PoolConfig, SamplingParams
from rollout_pool.run_config import RunConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file_parses(path: Path) -> None:
    assert RunConfig.load(path, {}).pool.model


def test_a_pool_file_reads_as_a_pool_config(tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text("model: m\nnum_actors: 2\nengine:\n  num_slots: 8\n")
    assert PoolConfig.from_yaml(file) == PoolConfig(model="m", num_actors=2, engine=EngineConfig(num_slots=8))


def test_a_run_file_holds_a_pool_and_its_sampling(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\nsampling: {n: 4, temperature: 1, stop: '###'}\n")
    config = RunConfig.load(file, {})
    assert config.sampling == SamplingParams(n=4, temperature=1.0, stop=("###",))
    assert config.pool == PoolConfig(model="m")


def test_a_section_whose_keys_are_all_commented_out_is_empty(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\nengine:\n  # num_slots: 8\nsampling:\n")
    config = RunConfig.load(file, {"engine.num_slots": 4})
    assert (config.engine.num_slots, config.sampling) == (4, SamplingParams())


def test_a_path_may_start_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    config = PoolConfig(model="~/model", tokenizer="~/tokenizer")
    assert (config.model, config.tokenizer) == ("/somewhere/model", "/somewhere/tokenizer")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\nnum_actor: 2\n", "num_actor: unknown key; did you mean 'num_actors'?"),
        ("model: m\nengine: {num_slot: 2}\n", "engine.num_slot: unknown key; did you mean 'num_slots'?"),
        ("model: m\nengine: {num_slots: 0}\n", "engine.num_slots: Input should be greater than or equal to 1"),
        ("model: m\nengine: {num_slots: many}\n", "engine.num_slots: Input should be a valid integer, got 'many'"),
        ("model: m\nengine: 3\n", "engine: Input should be a valid dictionary"),
        ("model: m\nsampling: {top_p: 1.5}\n", "sampling.top_p: Input should be less than or equal to 1"),
        ("model: m\nsampling: {temprature: 1}\n", "sampling.temprature: unknown key; did you mean 'temperature'?"),
        ("model: m\nsampling: {n: true}\n", "sampling.n: Input should be a valid integer"),
        ("model: m\nsampling: {stop: ['']}\n", "sampling.stop: an empty stop string"),
        ("model: m\nsampling: {min_new_tokens: 200}\n", "sampling.min_new_tokens (200) is above max_new_tokens"),
        ("num_actors: 2\n", "model: required, but not given"),
        ("model: ''\n", "model: String should have at least 1 character"),
        ("model: m\nseed: -1\n", "seed: Input should be greater than or equal to 0"),
        ("model: m\ndtype: int8\n", "dtype: Input should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        ("model: m\ntensor_parallel_size: 0\n", "tensor_parallel_size: Input should be greater than or equal to 1"),
        ("model: m\ntensor_parallel_backend: vllm\n", "tensor_parallel_backend: Input should be 'transformers' or 'deepspeed'"),
        ("model: m\ntensor_parallel_placement: spread\n", "tensor_parallel_placement: Input should be 'strict_pack' or 'pack'"),
        ("model: m\ntensor_parallel_size: 2\ngpus_per_actor: 0.5\n", "gpus_per_actor: with tensor_parallel_size 2 it counts per rank, and a rank has one whole GPU (1) or runs on cores (0), got 0.5"),
        ("model: m\ntensor_parallel_size: 2\ngpus_per_actor: 2\n", "got 2"),
        ("", "expected a mapping of keys, got NoneType"),
        ("- model\n", "expected a mapping of keys, got list"),
        ("1: m\n", "keys are strings, got 1"),
        ("model: [\n", "line 2: not valid YAML"),
    ],
)  # fmt: skip
def test_a_mistake_names_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(file, {})
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read configuration .*none.yaml: No such file"):
        PoolConfig.from_yaml(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"model: \xe9\n")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        PoolConfig.from_yaml(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"sampling.n": 0}, "run.yaml with sampling.n from the command line: sampling.n: Input should be"),
        ({"engine.slots": 1}, "engine.slots: unknown key"),
        ({"model.size": 1}, "model.size: model is not a section"),
        ({"nothing.at.all": 1}, "nothing: unknown key"),
    ],
)
def test_a_mistake_on_the_command_line_is_told_apart(
    tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\n")
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(file, overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "is_same"),
    [
        ({"num_actors": 8, "engine.num_slots": 2, "cpus_per_actor": 1, "start_timeout_s": 5}, True),
        ({"tensor_parallel_size": 2, "tensor_parallel_placement": "pack"}, True),
        ({"model": "other"}, False),
        ({"seed": 1}, False),
        ({"dtype": "float32"}, False),
        ({"sampling.temperature": 0.5}, False),
        ({"engine.max_length": 99}, False),
        ({"engine.deterministic": "strict"}, False),
    ],
)
def test_the_hash_covers_what_results_depend_on(overrides: dict[str, Any], is_same: bool) -> None:
    base = RunConfig.load(None, {"model": "m"}).results_hash()
    assert (RunConfig.load(None, {"model": "m", **overrides}).results_hash() == base) is is_same


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ({"engine.num_slots": 4}, {"engine.num_slots": 8}, False),
        ({"tensor_parallel_size": 1}, {"tensor_parallel_size": 2}, False),
        (
            {"tensor_parallel_size": 2},
            {"tensor_parallel_size": 2, "tensor_parallel_backend": "deepspeed"},
            False,
        ),
        ({}, {"tensor_parallel_backend": "deepspeed"}, True),
    ],
)
def test_strict_results_depend_on_the_slots_and_the_ranks(
    one: dict[str, Any], other: dict[str, Any], is_same: bool
) -> None:
    strict = {"model": "m", "engine.deterministic": "strict"}
    a, b = (RunConfig.load(None, {**strict, **keys}) for keys in (one, other))
    assert (a.results_hash() == b.results_hash()) is is_same


@pytest.mark.parametrize("gpus", [None, 0, 1])
def test_a_rank_has_one_whole_gpu_or_none(gpus: float | None) -> None:
    assert PoolConfig(model="m", tensor_parallel_size=2, gpus_per_actor=gpus).gpus_per_actor == gpus
    assert PoolConfig(model="m", gpus_per_actor=2).gpus_per_actor == 2  # without ranks as before
