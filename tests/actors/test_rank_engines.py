"""One engine over several ranks gives what one rank gives. Every rank is a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from rollout_pool import Engine, EngineConfig, RolloutRequest, SamplingParams

SCRIPT = Path(__file__).with_name("rank_engines.py")
LAUNCHER = Path(__file__).with_name("rank_launcher.py")
LENGTHS = (1, 5, 17, 3, 30, 9)
BUDGETS = (24, 20, 20, 16, 8, 8)
CONFIG: dict[str, Any] = {"num_slots": 4, "max_length": 64}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 7, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", {"head_dim": 16, **MOE}),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
}
NOT_SPLIT = {("opt", "transformers"), ("qwen3-moe", "deepspeed")}  # no plan; no split of stacked experts


def run(size: int, **arguments: Any) -> dict[str, Any]:
    """What rank 0 of ``size`` ranks says."""
    command = [sys.executable, "-P", str(LAUNCHER), str(SCRIPT), "roll_out", str(size), json.dumps(arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    first: dict[str, Any] = json.loads(done.stdout)[0]
    return first


def written(prompts: list[list[int]], **sampling: Any) -> list[dict[str, Any]]:
    """Requests as JSON, their budgets different so that rows end, refill and move."""
    return [
        {"prompt": prompt, "sampling": {"seed": 3, **sampling, "max_new_tokens": budget}}
        for prompt, budget in zip(prompts, BUDGETS, strict=True)
    ]


def alone(model: Any, requests: list[dict[str, Any]], **changes: Any) -> list[Any]:
    engine = Engine(model, EngineConfig(**{**CONFIG, **changes}))
    return engine.generate(
        RolloutRequest(one["prompt"], SamplingParams(**one["sampling"])) for one in requests
    )


def assert_equal(groups: list[dict[str, Any]], expected: list[Any]) -> None:
    """Tokens equal, log-probabilities within 1e-4."""
    for group, whole in zip(groups, expected, strict=True):
        assert group["error"] == whole.error
        for sample, other in zip(group["samples"], whole.samples, strict=True):
            assert sample["tokens"] == other.token_ids.tolist()
            assert (sample["reason"], sample["index"]) == (other.finish_reason, other.sample_index)
            np.testing.assert_allclose(sample["logprobs"], other.logprobs, atol=1e-4)
            np.testing.assert_allclose(sample["sampling_logprobs"], other.sampling_logprobs, atol=1e-4)


@pytest.fixture(scope="module")
def saved(build: Any, small_config: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``saved(family, **changes)``: a model and the folder it is saved in."""

    def make(family: str, **changes: Any) -> tuple[Any, str]:
        name, own = FAMILIES[family]
        model = build(getattr(transformers, name)(**small_config(**own, **changes)), gain=1.6)
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        return model, str(folder)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "backend"),
    [
        pytest.param(family, backend, id=f"{family}-{backend}")
        for backend in ("transformers", "deepspeed")
        for family in FAMILIES
        if (family, backend) not in NOT_SPLIT
    ],
)
def test_two_ranks_give_the_tokens_of_one(family: str, backend: str, saved: Any, prompts_of: Any) -> None:
    if backend == "deepspeed":
        pytest.importorskip("deepspeed", reason="the extra rollout-pool[deepspeed] is not installed")
    model, folder = saved(family)
    prompts = prompts_of(LENGTHS)
    greedy = written(prompts, temperature=0, ignore_eos=True, n=2)
    sampled = written(prompts, n=4, temperature=0.9)
    assert (
        len({t for group in alone(model, greedy) for s in group.samples for t in s.token_ids.tolist()}) >= 20
    )

    result = run(2, model=folder, config=CONFIG, requests=[*greedy, *sampled], backend=backend)

    # In one call the indexes go on, and unnamed requests are known by their index.
    assert_equal(result["rounds"][0], alone(model, [*greedy, *sampled]))
    if backend == "transformers":  # AutoTP keeps what it takes for too small whole
        assert result["kv"][0][1] == model.config.num_key_value_heads // 2
    assert result["moved"] > 0 or family != "llama"  # where samples end early, rows move


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3-moe"])
def test_four_ranks_give_the_tokens_of_one(family: str, saved: Any, prompts_of: Any) -> None:
    model, folder = saved(family, num_key_value_heads=4)
    requests = written(prompts_of(LENGTHS), n=4)
    result = run(4, model=folder, config=CONFIG, requests=requests)
    assert_equal(result["rounds"][0], alone(model, requests))
    assert result["kv"][0][1] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"layout": "aligned"}, {"prefix": "off"}, {"readback_every": 3}], ids=str
)
def test_ranks_serve_every_configuration(changes: dict[str, Any], saved: Any, prompts_of: Any) -> None:
    model, folder = saved("llama")
    prompts = prompts_of(LENGTHS)
    requests = [
        *written(prompts, n=3, top_p=0.9, repetition_penalty=1.2, min_new_tokens=4),
        {"prompt": [5, 4000], "sampling": {}},  # outside the vocabulary
        *written(prompts, n=5, stop_token_ids=[20, 30, 40]),
    ]
    config = {**CONFIG, **changes, **({"max_length": 38} if "layout" in changes else {})}
    result = run(2, model=folder, config=config, requests=requests)
    assert_equal(result["rounds"][0], alone(model, requests, **config))
    assert "4000" in result["rounds"][0][len(prompts)]["error"]
    assert bool(result["trims"]) == ("layout" in changes)


@pytest.mark.slow
def test_ranks_share_prompts_and_resume_what_they_were_cut_off_in(saved: Any, prompts_of: Any) -> None:
    """Held groups, prompts that wait for room, moves; every sample is cut off and goes on."""
    model, folder = saved("gemma3")
    requests = written(prompts_of(LENGTHS), n=3)
    shared = {**CONFIG, "prefix": "shared", "max_new_tokens": 24, "prompt_tokens": 40}
    result = run(2, model=folder, config=shared, requests=requests, abort_after=9)
    engine = Engine(model, EngineConfig(**CONFIG, prefix="expand"))
    expected = engine.generate(
        RolloutRequest(one["prompt"], SamplingParams(**one["sampling"]), request_id=number)
        for number, one in enumerate(requests)
    )
    assert_equal(result["rounds"][0], expected)
    assert result["kv"][0][2] == 24


@pytest.mark.slow
def test_strict_ranks_repeat_themselves_bit_for_bit_in_any_order(saved: Any, prompts_of: Any) -> None:
    _, folder = saved("qwen3")
    requests = written(prompts_of(LENGTHS), n=2)
    config = {**CONFIG, "deterministic": "strict"}
    named = run(2, model=folder, config=config, requests=requests, rounds=2)["rounds"]
    assert named[0] == named[1]


@pytest.mark.slow
def test_samples_that_ranks_were_cut_off_in_go_on(saved: Any, prompts_of: Any) -> None:
    model, folder = saved("llama")
    requests = written(prompts_of(LENGTHS), n=3)
    result = run(2, model=folder, config=CONFIG, requests=requests, abort_after=7)
    engine = Engine(model, EngineConfig(**CONFIG))
    expected = engine.generate(
        RolloutRequest(one["prompt"], SamplingParams(**one["sampling"]), request_id=number)
        for number, one in enumerate(requests)
    )
    assert_equal(result["rounds"][0], expected)


@pytest.mark.slow
@pytest.mark.demo_model
def test_three_ranks_serve_the_demo_model() -> None:
    from rollout_pool.demo_model import default_folder

    folder = str(default_folder())
    prompts = [[504, 3575, 282, 260, 3575], list(range(1000, 1040)), [1, 4093, 198, 5195, 314, 260]]
    requests = [
        {"prompt": prompt, "sampling": {"temperature": 0, "max_new_tokens": 24, "n": 1}} for prompt in prompts
    ]
    result = run(3, model=folder, config=CONFIG, requests=requests)
    engine = Engine(folder, EngineConfig(**CONFIG), dtype="float32")
    assert_equal(
        result["rounds"][0],
        engine.generate(RolloutRequest(one["prompt"], SamplingParams(**one["sampling"])) for one in requests),
    )
    assert result["kv"][0][1] == 1
