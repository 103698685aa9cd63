"""What the driver refuses before an actor starts, on plain data."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from rollout_pool.config import PoolConfig
from rollout_pool.errors import CapacityError, ConfigError, UnsupportedModelError
from rollout_pool.preflight import check_paths, check_split, plan_actors, span_warning


def plan(num_actors: int, *nodes: dict[str, float], **config: object):
    return plan_actors(PoolConfig(model="m", num_actors=num_actors, **config), nodes)


@pytest.mark.parametrize(
    ("num_actors", "nodes", "cpus", "threads"),
    [
        (1, [{"CPU": 8}], 8, 8),
        (2, [{"CPU": 2}], 1, 1),
        (3, [{"CPU": 8}], 2, 2),
        (3, [{"CPU": 2}], 0.5, 1),
        (3, [{"CPU": 1}], 0.3333, 1),
        (3, [{"CPU": 5}, {"CPU": 4}], 2, 2),  # 3 each would leave the third nowhere
        (3, [{"CPU": 1}, {"CPU": 1}], 0.5, 1),
        (2, [{}], 0, 1),
    ],
)
def test_cpu_actors_share_the_cores(num_actors: int, nodes: list, cpus: float, threads: int) -> None:
    asked = plan(num_actors, *nodes)
    assert (asked.num_cpus, asked.num_gpus, asked.threads, asked.device) == (cpus, 0, threads, "cpu")


def test_gpu_actors_where_the_cluster_has_gpus() -> None:
    asked = plan(2, {"CPU": 16, "GPU": 2})
    assert (asked.num_cpus, asked.num_gpus, asked.threads, asked.device) == (1, 1, 1, "cuda")
    assert plan(2, {"CPU": 16, "GPU": 2}, gpus_per_actor=0.0).device == "cpu"
    assert plan(4, {"CPU": 1, "GPU": 2}, gpus_per_actor=0.5).num_cpus == 0.25


@given(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_planned_cpu_actors_always_fit(num_actors: int, cores: list[int]) -> None:
    asked = plan(num_actors, *({"CPU": float(count)} for count in cores))
    assert sum(int(count / asked.num_cpus + 1e-9) for count in cores) >= num_actors
    assert asked.threads == max(1, int(asked.num_cpus))


@pytest.mark.parametrize(
    ("num_actors", "nodes", "config", "message"),
    [
        (
            4,
            [{"CPU": 8, "GPU": 2}],
            {},
            "4 actors with 1 GPU each were asked for; the cluster has 2 GPUs, room for 2: "
            "lower num_actors or gpus_per_actor",
        ),
        (
            1,
            [{"CPU": 8}],
            {"gpus_per_actor": 1.0},
            "1 actor with 1 GPU each was asked for; the cluster has 0 GPUs, room for 0: "
            "lower num_actors or gpus_per_actor",
        ),
        (
            2,
            [{"CPU": 3}, {"CPU": 3}],
            {"cpus_per_actor": 4},
            "2 actors with 4 CPUs each were asked for; the cluster has 6 CPUs on 2 nodes, room for 0: "
            "lower num_actors or cpus_per_actor",
        ),
    ],
)
def test_actors_that_cannot_fit_are_refused_by_count(
    num_actors: int, nodes: list, config: dict, message: str
) -> None:
    with pytest.raises(CapacityError) as caught:
        plan(num_actors, *nodes, **config)
    assert str(caught.value) == message


def plan_groups(num_actors: int, size: int, *nodes: dict[str, float], **config: object):
    return plan(num_actors, *nodes, tensor_parallel_size=size, **config)


@pytest.mark.parametrize(
    ("num_actors", "size", "nodes", "threads"),
    [
        (1, 2, [{"CPU": 8}], 4),
        (2, 2, [{"CPU": 8}], 2),
        (2, 3, [{"CPU": 8}], 1),
        (2, 2, [{"CPU": 5}, {"CPU": 9}], 2),  # three each would leave the second group nowhere
        (3, 2, [{"CPU": 5}, {"CPU": 5}], 1),
    ],
)
def test_ranks_without_gpus_share_the_cores_and_each_has_whole_ones(
    num_actors: int, size: int, nodes: list, threads: int
) -> None:
    asked = plan_groups(num_actors, size, *nodes)
    assert (asked.num_cpus, asked.num_gpus, asked.threads) == (threads, 0, threads)


def test_each_rank_has_one_gpu_and_a_core_or_a_part_of_one() -> None:
    asked = plan_groups(2, 4, {"CPU": 32, "GPU": 8})
    assert (asked.num_cpus, asked.num_gpus, asked.device) == (1, 1, "cuda")
    assert plan_groups(1, 4, {"CPU": 2, "GPU": 4}).num_cpus == 0.5
    assert plan_groups(1, 2, {"CPU": 2, "GPU": 4}, gpus_per_actor=0).device == "cpu"


@given(st.integers(1, 3), st.integers(2, 4), st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_planned_groups_always_fit_on_whole_nodes_or_are_refused(
    num_actors: int, size: int, cores: list[int]
) -> None:
    nodes = [{"CPU": float(count)} for count in cores]
    try:
        asked = plan_groups(num_actors, size, *nodes)
    except CapacityError:
        assert sum(count // size for count in cores) < num_actors
    else:
        assert sum(count // asked.threads // size for count in cores) >= num_actors


@pytest.mark.parametrize(
    ("num_actors", "size", "nodes", "config", "message"),
    [
        (
            2,
            4,
            [{"CPU": 6}],
            {},
            "2 groups of 4 ranks with 1 CPU each (8 CPUs in all) were asked for; the cluster has 6 CPUs, and a "
            "group needs one node, room for 1: lower num_actors or tensor_parallel_size",
        ),
        (
            1,
            4,
            [{"CPU": 16, "GPU": 2}],
            {},
            "1 group of 4 ranks with 1 GPU each (4 GPUs in all) was asked for; the cluster has 2 GPUs, and a "
            "group needs one node, room for 0: lower num_actors or tensor_parallel_size",
        ),
        (
            1,
            4,
            [{"CPU": 16, "GPU": 2}, {"CPU": 16, "GPU": 2}],
            {},
            "1 group of 4 ranks with 1 GPU each (4 GPUs in all) was asked for; the cluster has 4 GPUs on 2 "
            "nodes, and a group needs one node, room for 0: lower num_actors or tensor_parallel_size, or set "
            "tensor_parallel_placement to 'pack'",
        ),
        (
            2,
            2,
            [{"CPU": 3}, {"CPU": 4}],
            {"cpus_per_actor": 2, "tensor_parallel_placement": "pack"},
            "2 groups of 2 ranks with 2 CPUs each (8 CPUs in all) were asked for; the cluster has 7 CPUs on 2 "
            "nodes, room for 1: lower num_actors or tensor_parallel_size or cpus_per_actor",
        ),
    ],
)
def test_more_ranks_than_devices_are_refused_by_count(
    num_actors: int, size: int, nodes: list, config: dict, message: str
) -> None:
    with pytest.raises(CapacityError) as caught:
        plan_groups(num_actors, size, *nodes, **config)
    assert str(caught.value) == message


def test_groups_may_span_nodes_when_asked_to_with_a_warning_that_says_how_many() -> None:
    nodes = [{"CPU": 8, "GPU": 3}, {"CPU": 8, "GPU": 5}]
    config = PoolConfig(model="m", num_actors=2, tensor_parallel_size=4, tensor_parallel_placement="pack")
    warning = span_warning(config, plan_actors(config, nodes), nodes)
    assert warning is not None
    assert warning.startswith("1 of 2 groups of 4 ranks will span nodes: ")
    config = config.model_copy(update={"num_actors": 1})
    assert span_warning(config, plan_actors(config, nodes), nodes) is None


def test_more_than_one_gpu_per_actor_must_be_whole() -> None:
    with pytest.raises(ConfigError, match=r"gpus_per_actor: .* whole number, got 1.5"):
        plan(1, {"GPU": 4}, gpus_per_actor=1.5)


def test_local_paths_become_absolute_and_hub_names_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    save_file({}, tmp_path / "model" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    checked = check_paths(PoolConfig(model="model", tokenizer="./model"))
    assert checked.model == checked.tokenizer == str(tmp_path / "model")
    assert check_paths(PoolConfig(model="owner/name")).model == "owner/name"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model": "/no/such/model"},
            "model: there is no directory '/no/such/model'; give one in Hugging Face format",
        ),
        ({"model": "./gone"}, "model: there is no directory './gone'; give one in Hugging Face format"),
        (
            {"model": "/no/SmolLM2-135M-Instruct"},
            "model: there is no directory '/no/SmolLM2-135M-Instruct'; give one in Hugging Face format, or let "
            "`rollout-pool fetch-demo-model` make this one",
        ),
        ({"model": "empty"}, "model: 'empty' has no config.json, so it is not a Hugging Face model"),
        ({"model": "file.gguf"}, "model: 'file.gguf' is a file; expected a directory in Hugging Face format"),
        (
            {"model": "owner/name", "tokenizer": "empty"},
            "tokenizer: 'empty' has no tokenizer files (tokenizer.json, say)",
        ),
    ],
)
def test_local_paths_that_cannot_be_loaded_are_refused(
    config: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.gguf").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        check_paths(PoolConfig(**config))
    assert str(caught.value) == message


def test_model_that_the_ranks_cannot_split_is_refused_from_its_config(tiny_model_dir: str) -> None:
    for size in (1, 2):
        check_split(PoolConfig(model=tiny_model_dir, tensor_parallel_size=size))
    with pytest.raises(UnsupportedModelError, match="2 KV heads cannot be divided by tensor_parallel_size 4"):
        check_split(PoolConfig(model=tiny_model_dir, tensor_parallel_size=4))
    check_split(PoolConfig(model="owner/name", tensor_parallel_size=4))  # for the ranks to find out


def test_config_that_cannot_be_read_is_an_error_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "none such"}')
    with pytest.raises(ConfigError, match="cannot load model .*none such"):
        check_split(PoolConfig(model=str(tmp_path), tensor_parallel_size=2))
