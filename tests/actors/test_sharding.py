"""Shards on real gloo ranks against the whole model, by both backends; and what is refused before."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_pool.actors.sharding import refuse_unsplittable
from rollout_pool.errors import UnsupportedModelError

RANKS = Path(__file__).with_name("ranks.py")
LAUNCHER = Path(__file__).with_name("rank_launcher.py")
SMOLLM = Path.home() / ".cache" / "rollout-pool" / "SmolLM2-135M-Instruct"
BIAS = {"attention_bias": True, "mlp_bias": True}
LAYERED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 8}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PLAIN = {"vocab_size": 160, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2}
OPT = {
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any], bool]] = {
    # name: configuration class, its settings, whether they are those that most configurations share
    "llama": ("LlamaConfig", {}, True),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}, True),
    "llama-biased": ("LlamaConfig", BIAS, True),
    "llama-4-kv-heads": ("LlamaConfig", {"num_key_value_heads": 4}, True),
    "qwen3": ("Qwen3Config", {"head_dim": 16}, True),
    "gemma2-soft-capped": ("Gemma2Config", {**GEMMA, "sliding_window": 8}, True),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, **LAYERED}, True),
    "qwen3-moe": ("Qwen3MoeConfig", {**MOE, "mlp_only_layers": [0]}, True),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}, True),
    "opt": ("OPTConfig", {**PLAIN, **OPT, "max_position_embeddings": 256}, False),
    "gpt-neox": (
        "GPTNeoXConfig",
        {
            **PLAIN,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
        },
        False,
    ),
    "gpt2": ("GPT2Config", {**PLAIN, "n_embd": 64, "n_layer": 3, "n_head": 4}, False),
    "phi3": ("Phi3Config", {}, True),
}
SETS = {
    ("transformers", 2): [
        "llama", "llama-tied", "llama-biased", "llama-4-kv-heads", "qwen3", "gemma2-soft-capped", "gemma3",
        "qwen3-moe", "mixtral", "gpt-neox",
    ],
    ("transformers", 4): ["llama-4-kv-heads"],
    ("deepspeed", 2): ["llama", "llama-tied", "llama-biased", "qwen3", "gemma2-soft-capped", "gemma3", "opt", "gpt-neox"],
    ("deepspeed", 4): ["llama-4-kv-heads", "opt"],
}  # fmt: skip
CASES = [(backend, size, name) for (backend, size), names in SETS.items() for name in names]


def require(backend: str) -> None:
    if backend == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        assert "CI" not in os.environ, "CI must install DeepSpeed"
        pytest.skip("DeepSpeed is not installed: pip install 'rollout-pool[deepspeed]'")


def make_config(name: str, small: Callable[..., dict[str, Any]], **changes: Any) -> Any:
    import transformers

    kind, settings, is_small = FAMILIES[name]
    return getattr(transformers, kind)(**{**(small() if is_small else {}), **settings, **changes})


@pytest.fixture(scope="module")
def saved(
    build: Callable[..., Any],
    small_config: Callable[..., dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], str]:
    """The folder of a small random model, by family."""
    root = tmp_path_factory.mktemp("models")

    def save(name: str) -> str:
        folder = root / name
        if not folder.exists():
            build(make_config(name, small_config)).save_pretrained(folder)
        return str(folder)

    return save


def run_shards(backend: str, size: int, models: list[str]) -> list[list[dict[str, Any]]]:
    """One list per model, with one result per rank."""
    arguments = json.dumps({"models": models, "backend": backend})
    command = [sys.executable, "-P", str(LAUNCHER), str(RANKS), "shards", str(size), arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    by_rank = json.loads(done.stdout.splitlines()[-1])
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]


@pytest.fixture(scope="module")
def shards(saved: Callable[[str], str]) -> Callable[[str, int, str], list[dict[str, Any]]]:
    """The results of one family; all families of a backend and size run in one group of ranks."""
    done: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = {}

    def results(backend: str, size: int, name: str) -> list[dict[str, Any]]:
        require(backend)
        names = SETS[backend, size]
        if (backend, size) not in done:
            found = run_shards(backend, size, [saved(each) for each in names])
            done[backend, size] = dict(zip(names, found, strict=True))
        return done[backend, size][name]

    return results


def check(ranks: list[dict[str, Any]], vocabulary: int, tolerance: float = 1e-5) -> None:
    """``tolerance`` is in standard deviations of the logits."""
    for result in ranks:
        assert "error" not in result, result["error"]
        assert result["logits"] == ranks[0]["logits"]  # the same bits on every rank
        assert result["shape"] == [2, 12, vocabulary]
        assert result["is_plain"]
        assert result["difference"] < tolerance * result["spread"]
        assert result["kv_heads"] * len(ranks) == result["all_kv_heads"]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "size", "name"), CASES)
def test_every_rank_has_the_logits_of_the_whole_model(
    backend: str, size: int, name: str, shards: Callable[..., list[dict[str, Any]]]
) -> None:
    check(shards(backend, size, name), 160)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "size", "name"), CASES)
def test_a_shard_holds_its_part_of_every_layer(
    backend: str, size: int, name: str, shards: Callable[..., list[dict[str, Any]]]
) -> None:
    for result in shards(backend, size, name):
        parts = result["parts"]
        if name == "gpt-neox":  # its fused heads are split head by head: the logits show that it is right
            parts = {key: how for key, how in parts.items() if "query_key_value" not in key}
        assert set(parts.values()) == {"whole", "split"}
        is_large = re.compile(r"(proj|fc1|fc2|dense\w*)(\.weight)?$")
        whole = [key for key, how in parts.items() if is_large.search(key) and how != "split"]
        assert whole == []


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "size", "name"), CASES)
def test_a_shard_whose_weights_are_stored_transposed_computes_the_same(
    backend: str, size: int, name: str, shards: Callable[..., list[dict[str, Any]]]
) -> None:
    for result in shards(backend, size, name):
        assert result["difference_transposed"] < 1e-5 * result["spread"]
        if backend == "transformers":
            assert result["num_transposed"] > 0


@pytest.mark.slow
@pytest.mark.demo_model
@pytest.mark.parametrize("backend", ["transformers", "deepspeed"])
def test_a_real_model_with_tied_embeddings_on_three_ranks(backend: str) -> None:
    require(backend)
    if not SMOLLM.exists():
        pytest.skip("the demo model is not there: rollout-pool fetch-demo-model")
    (ranks,) = run_shards(backend, 3, [str(SMOLLM)])
    check(ranks, 49152, tolerance=1e-4)  # thirty layers in fp32: as far off as the whole model from fp64
    assert ranks[0]["kv_heads"] == 1


@pytest.mark.slow
def test_what_deepspeed_cannot_split_is_refused_by_every_rank(saved: Callable[[str], str]) -> None:
    require("deepspeed")
    (ranks,) = run_shards("deepspeed", 2, [saved("phi3")])
    for result in ranks:
        assert re.match("UnsupportedModelError: model .*phi3': DeepSpeed cannot split it: ", result["error"])


@pytest.mark.parametrize(
    ("name", "changes", "size", "message"),
    [
        ("llama", {}, 3, "model 'llama': 4 attention heads cannot be divided by tensor_parallel_size 3; it can be 2"),
        ("llama", {}, 4, "model 'llama': 2 KV heads cannot be divided by tensor_parallel_size 4; it can be 2"),
        ("llama-4-kv-heads", {"vocab_size": 162}, 4, "vocabulary 162 cannot be divided by tensor_parallel_size 4; it can be 2"),
        ("llama", {"vocab_size": 161}, 2, "vocabulary 161 cannot be divided by tensor_parallel_size 2; do not split it"),
        ("llama", {"intermediate_size": 97}, 2, "intermediate size 97 cannot be divided"),
        ("qwen3-moe", {"moe_intermediate_size": 33}, 2, "intermediate size 33 cannot be divided"),
        ("mixtral", {"intermediate_size": 33}, 2, "intermediate size 33 cannot be divided"),
        ("opt", {}, 2, "model 'opt': OPTForCausalLM has no tensor-parallel plan for its layers; use tensor_parallel_backend: deepspeed"),
        ("gpt2", {}, 2, "GPT2LMHeadModel has no tensor-parallel plan for its layers; use tensor_parallel_size: 1"),
    ],
)  # fmt: skip
def test_what_a_plan_cannot_split_is_refused_with_the_numbers(
    name: str, changes: dict[str, Any], size: int, message: str, small_config: Callable[..., dict[str, Any]]
) -> None:
    config = make_config(name, small_config, **changes)
    with pytest.raises(UnsupportedModelError) as caught:
        refuse_unsplittable(config, size, "transformers")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "size", "message"),
    [
        ("llama", {}, 4, "2 KV heads cannot be divided by tensor_parallel_size 4; it can be 2"),
        ("llama", {"intermediate_size": 97}, 2, "intermediate size 97 cannot be divided"),
        ("qwen3", {"hidden_size": 66, "num_key_value_heads": 4}, 4, "hidden size 66 cannot be divided"),
        (
            "mixtral",
            {},
            2,
            "whole on every rank, with its 3 dimensions; use tensor_parallel_backend: transformers",
        ),
        ("gpt2", {}, 2, "AutoTP finds no linear layers in GPT2LMHeadModel; use tensor_parallel_size: 1"),
    ],
)
def test_what_auto_tp_cannot_split_is_refused_with_the_numbers(
    name: str, changes: dict[str, Any], size: int, message: str, small_config: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        refuse_unsplittable(make_config(name, small_config, **changes), size, "deepspeed")
    assert message in str(caught.value)


def test_an_embedding_that_is_split_otherwise_than_its_tied_head_is_refused(
    small_config: Callable[..., dict[str, Any]],
) -> None:
    config = make_config("llama-tied", small_config)
    config.base_model_tp_plan = {**config.base_model_tp_plan, "embed_tokens": "embedding_colwise"}
    with pytest.raises(UnsupportedModelError, match="tied to its head, but the plan has model.embed_tokens"):
        refuse_unsplittable(config, 2, "transformers")


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("backend", ["transformers", "deepspeed"])
def test_one_rank_is_never_refused(
    name: str, backend: str, small_config: Callable[..., dict[str, Any]]
) -> None:
    refuse_unsplittable(make_config(name, small_config), 1, backend)


def test_a_model_that_fits_is_not_refused(small_config: Callable[..., dict[str, Any]]) -> None:
    for (backend, size), names in SETS.items():
        for name in names:
            refuse_unsplittable(make_config(name, small_config), size, backend)


def test_the_code_of_a_checkpoint_is_not_run_to_see_how_it_splits(
    tmp_path: Path, small_config: Callable[..., dict[str, Any]]
) -> None:
    from transformers import AutoConfig

    settings = {"model_type": "llama", **small_config(), "auto_map": {"AutoModelForCausalLM": "code.Code"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Code: pass\n")
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    refuse_unsplittable(config, 2, "transformers")
    assert not (tmp_path / "ran").exists()
