"""A plan made without weights is what an engine finds when it has loaded them."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_pool import CapacityError, ConfigError, Engine, EngineConfig, PoolConfig
from rollout_pool.cli import main
from rollout_pool.planning.machine import Machine, described_machine, parse_size
from rollout_pool.planning.pool_plan import PROCESS_BYTES, make_plan

GIB = 2**30
SMALL = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2,
}  # fmt: skip
MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
# family: (configuration class, what differs, dtype of the checkpoint, dtype asked for, layout)
FAMILIES: dict[str, tuple[str, dict[str, Any], str, Any, Any]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}, "float32", "bfloat16", "ragged"),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}, "bfloat16", "auto", "ragged"),
    "gpt2": ("GPT2Config", {"n_positions": 256}, "float32", "auto", "ragged"),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}, "float32", "float32", "ragged"),
    "gemma3": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 7, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16},
        "bfloat16",
        "auto",
        "ragged",
    ),
    "qwen3-moe": ("Qwen3MoeConfig", MOE, "float32", "auto", "ragged"),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            **MOE, "num_hidden_layers": 4, "shared_expert_intermediate_size": 48, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
        "float32",
        "auto",
        "ragged",
    ),
    # Keeps a part of its router in float32.
    "deepseek-v3": ("DeepseekV3Config", LATENT, "float32", "bfloat16", "ragged"),
    "bloom": ("BloomConfig", {"n_layer": 3, "n_head": 4}, "float32", "auto", "aligned"),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``checkpoint(family)``: the folder of a small random model."""

    def make(family: str) -> Path:
        import transformers

        kind, changes, stored, _, _ = FAMILIES[family]
        folder = tmp_path_factory.mktemp(family)
        config = getattr(transformers, kind)(**{**SMALL, **changes})
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, stored))
        model.save_pretrained(folder)
        return folder

    return make


def machine(**changes: Any) -> Machine:
    here = Machine(1, cpus=4, gpus=0, host_bytes=16 * GIB, gpu_bytes=0, is_here=False)
    return replace(here, **changes)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_plan_is_the_engines_own(checkpoint: Callable[[str], Path], family: str) -> None:
    *_, dtype, layout = FAMILIES[family]
    folder = str(checkpoint(family))
    engine_config = EngineConfig(num_slots=3, max_length=50, layout=layout)
    plan = make_plan(PoolConfig(model=folder, dtype=dtype, engine=engine_config), machine())
    engine = Engine(folder, engine_config, dtype=dtype)
    found, planned = engine.memory_plan, plan.memory
    assert replace(planned, free_bytes=0) == replace(found, free_bytes=0, device="cpu")
    cells = sum(tensor.nbytes for tensor in engine.cache.tensors())
    assert cells == planned.bytes_per_slot * planned.num_slots
    dtypes: dict[str, int] = {}
    for parameter in engine.model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + parameter.nbytes
    assert plan.loaded == dtypes


def test_the_slots_that_fit_are_those_an_engine_would_take(checkpoint: Callable[[str], Path]) -> None:
    folder = str(checkpoint("llama"))
    config = PoolConfig(model=folder, num_actors=2, engine=EngineConfig(max_length=100))
    plan = make_plan(config, machine(host_bytes=2 * PROCESS_BYTES + 40 * 2**20))
    assert plan.ranks_per_node == 2
    assert plan.memory.free_bytes == 20 * 2**20 - plan.memory.weight_bytes
    replace(plan.memory, num_slots=plan.slots_that_fit).check()
    with pytest.raises(CapacityError):
        replace(plan.memory, num_slots=plan.slots_that_fit + 1).check()
    assert 1 < plan.slots_that_fit < 65_536


def pretend_large(folder: Path) -> int:
    """A checkpoint of 136 GiB that takes a few kilobytes: a whole header, and a hole for the weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=128256, hidden_size=16384, intermediate_size=57344, num_hidden_layers=20,
        num_attention_heads=128, num_key_value_heads=8, max_position_embeddings=8192, dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        places = [end, end + tensor.nbytes]
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": places}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end


def test_a_model_larger_than_this_machine_is_planned_for_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = pretend_large(tmp_path)
    config = tmp_path / "c.yaml"
    config.write_text(
        f"model: {tmp_path}\nnum_actors: 4\ntensor_parallel_size: 2\ngpus_per_actor: 1\n"
        "engine: {num_slots: 8, max_length: 4096}\n"
    )
    figures = tmp_path / "figures.json"
    command = ["plan", "--config", str(config), "--json", str(figures), "--gpus", "8", "--gpu-memory"]
    assert main([*command, "80GiB"]) == 0
    plan = json.loads(figures.read_text())
    # Norms are whole on each rank, and in older versions of Transformers so is the embedding.
    embedding = 128256 * 16384 * 2
    assert size / 2 <= plan["rank"]["weight_bytes"] <= (size + embedding) / 2 * 1.0001
    assert plan["rank"]["bytes_per_token"] == 20 * 2 * 4 * 128 * 2  # layers, K and V, heads of a rank, bf16
    assert plan["actors"] == {
        "num_actors": 4, "ranks_per_actor": 2, "ranks_per_node": 8, "device": "cuda", "threads": 1,
        "cpus_per_rank": 1.0, "gpus_per_rank": 1.0,
    }  # fmt: skip
    assert plan["fits"]
    assert "it fits" in capsys.readouterr().out
    assert main([*command, "64GiB"]) == 1
    assert re.search(
        r"does not fit: the weights take 6\d.\d\d GiB, a GPU has 63.50 GiB free", capsys.readouterr().out
    )
    assert main([*command, "80GiB", "--nodes", "2", "--gpus", "3"]) == 2  # a group needs one node
    assert "room for 2" in capsys.readouterr().err


def test_a_model_that_is_not_served_has_no_plan(checkpoint: Callable[[str], Path]) -> None:
    config = PoolConfig(model=str(checkpoint("gpt2")), engine=EngineConfig(max_length=257))
    with pytest.raises(CapacityError, match="a table of positions for 256 tokens"):
        make_plan(config, machine())


def test_what_is_not_said_of_a_machine_is_what_the_configuration_asks_for() -> None:
    config = PoolConfig(model="m", num_actors=6)
    found = described_machine(config, nodes=2, gpu_memory=80 * GIB)
    assert (found.num_nodes, found.gpus, found.gpu_bytes) == (2, 3, 80 * GIB - GIB // 2)
    assert found.nodes == [{"CPU": float(found.cpus), "GPU": 3.0}] * 2
    shared = described_machine(PoolConfig(model="m", num_actors=4, gpus_per_actor=0.5), gpu_memory=GIB)
    assert shared.gpus == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * GIB), ("80G", 80 * GIB), ("1.5 GiB", 3 * GIB // 2), ("80gb", 80 * 10**9), ("1024", 1024)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "0", "80 XB", "iB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_size(text)
