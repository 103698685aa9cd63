"""Every supported family gives the tokens of single-row HF `generate`, in every layout that serves it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from rollout_pool import (
    Engine,
    EngineConfig,
    RolloutRequest,
    SamplingParams,
    verify,
)

WINDOW = 7
LENGTHS = (1, 5, 17, 3, 30, 9)
NEW = 24
# Eight samples for four slots: slots are used again, and at the tail the rows in slots 2 and 3 move down.
SAMPLES = (2, 1, 1, 2, 1, 1)
BUDGETS = (NEW, 20, 20, 16, 8, 8)
LONGEST = max(length + budget for length, budget in zip(LENGTHS, BUDGETS, strict=True))
# In layout aligned the buffer holds the longest row and not one token more, so that it must be trimmed. Where
# prompts are shared slots hold the new tokens alone, and not all prompts fit at the same time.
LAYOUTS: dict[str, dict[str, Any]] = {
    "ragged": {"max_length": 64},
    "aligned": {"max_length": LONGEST, "layout": "aligned"},
    "shared": {"max_length": 64, "prefix": "shared", "max_new_tokens": NEW, "prompt_tokens": 60},
}

# family: (configuration class, what differs from the shared settings, gain of the weights)
FAMILIES: dict[str, tuple[str, dict[str, Any], float]] = {
    "llama": ("LlamaConfig", {}, 1.4),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}, 3.0),
    "llama-yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 16,
            }
        },
        1.4,
    ),
    "qwen2": ("Qwen2Config", {}, 1.4),
    "qwen3": ("Qwen3Config", {"head_dim": 16}, 1.4),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}, 1.4),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}, 1.4),
    "gemma3": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 7, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
        1.4,
    ),
    "gpt2": ("GPT2Config", {"n_positions": 256}, 1.4),
    "gpt-neox": ("GPTNeoXConfig", {}, 2.0),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}, 1.4),
    "phi": ("PhiConfig", {}, 1.4),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}, 1.4),
    "gpt-oss": (
        "GptOssConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        1.4,
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}, 1.4),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        1.4,
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        1.4,
    ),
    "llama4-chunked": (
        "Llama4TextConfig",
        {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 8},
        1.4,
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        1.4,
    ),
    "lfm2": ("Lfm2Config", {}, 1.4),
    "cohere2": ("Cohere2Config", {"sliding_window": WINDOW}, 1.4),
    "olmo2": ("Olmo2Config", {}, 1.4),
    "granite": ("GraniteConfig", {}, 1.4),
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW}, 2.0),
    "stablelm": ("StableLmConfig", {}, 1.4),
}

# Models that derive positions from a mask of tokens. With distances alone to tell positions apart, greedy
# outputs soon repeat; a penalty keeps them changing.
ALIBI: dict[str, tuple[str, dict[str, Any], float]] = {
    "bloom": ("BloomConfig", {"n_layer": 3, "n_head": 4}, 3.0),
    # The slopes of heads that are not a power of two in number come from another formula.
    "bloom-odd-heads": ("BloomConfig", {"n_layer": 3, "n_head": 6, "hidden_size": 96}, 3.0),
    "mpt": ("MptConfig", {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 64}, 3.0),
    "falcon-alibi": ("FalconConfig", {"alibi": True}, 3.0),
}
PENALTY = 1.3
NOT_SHARED = ("deepseek-v3",)
"""What is cached are not the keys: its layers make those anew, of all cells, in every step."""


@dataclass(frozen=True)
class Family:
    """A model and what `generate` makes of every prompt, alone and unpadded."""

    model: Any
    prompts: list[list[int]]
    expected: list[list[int]]
    penalty: float


@pytest.fixture(scope="module")
def family_of(build: Any, small_config: Any, hf_greedy: Any, prompts_of: Any) -> Callable[[str], Family]:
    """``family_of(name)``, made once for all layouts and tests."""

    @cache
    def make(name: str) -> Family:
        class_name, changes, gain = {**FAMILIES, **ALIBI}[name]
        model = build(getattr(transformers, class_name)(**small_config(**changes)), gain=gain)
        prompts = prompts_of(LENGTHS)
        penalty = PENALTY if name in ALIBI else 1.0
        more = {"repetition_penalty": penalty} if name in ALIBI else {}
        return Family(model, prompts, [hf_greedy(model, prompt, NEW, **more) for prompt in prompts], penalty)

    return make


def cases(names: Any) -> list[Any]:
    """Every family in every layout that serves it."""
    return [
        pytest.param(name, layout, id=f"{name}-{layout}")
        for name in names
        for layout in LAYOUTS
        if layout == "aligned" or name not in ALIBI
        if layout != "shared" or name not in NOT_SHARED
    ]


@pytest.mark.parametrize(("name", "layout"), cases({**FAMILIES, **ALIBI}))
def test_greedy_tokens_equal_single_row_generate(name: str, layout: str, family_of: Any, poison: Any) -> None:
    family = family_of(name)
    assert len({token for tokens in family.expected for token in tokens}) >= 20, (
        "the model repeats itself: a weak test"
    )
    engine = poison(Engine(family.model, EngineConfig(num_slots=4, **LAYOUTS[layout])))
    greedy = SamplingParams(temperature=0, repetition_penalty=family.penalty, ignore_eos=True)
    requests = [
        RolloutRequest(prompt, greedy.model_copy(update={"n": n, "max_new_tokens": budget}))
        for prompt, n, budget in zip(family.prompts, SAMPLES, BUDGETS, strict=True)
    ]
    groups = engine.generate(requests)

    got = [[sample.token_ids.tolist() for sample in group.samples] for group in groups]
    assert got == [
        [tokens[:budget]] * n for tokens, n, budget in zip(family.expected, SAMPLES, BUDGETS, strict=True)
    ]
    stats = engine.stats()
    assert stats.rows_moved > 0
    assert (stats.trims > 0) == (layout == "aligned")
    assert verify(groups, family.model).max_abs_diff < 1e-3


@pytest.mark.parametrize(
    ("name", "layout"),
    cases(["llama", "gemma3", "gpt-oss", "qwen3-next", "bloom", "mpt"]),
)
def test_sampled_logprobs_are_those_of_a_teacher_forced_forward(
    name: str, layout: str, family_of: Any, poison: Any
) -> None:
    family = family_of(name)
    config = {**LAYOUTS[layout], "max_length": max(LENGTHS) + NEW}
    engine = poison(Engine(family.model, EngineConfig(num_slots=3, **config)))
    groups = engine.generate(family.prompts, SamplingParams(n=2, max_new_tokens=NEW, temperature=0.7))
    report = verify(groups, family.model)
    assert report.num_samples == 12
    assert report.max_abs_diff < 1e-3


@pytest.mark.parametrize(
    ("name", "layout"),
    cases(["gemma3", "qwen3-next", "bloom"]),
)
def test_a_step_that_runs_out_of_memory_leaves_no_trace(name: str, layout: str, family_of: Any) -> None:
    family = family_of(name)
    config = EngineConfig(num_slots=6, **{**LAYOUTS[layout], "max_length": max(LENGTHS) + NEW})
    sampling = SamplingParams(n=2, max_new_tokens=NEW, seed=3)
    expected = Engine(family.model, config).generate(family.prompts, sampling)
    engine = Engine(family.model, config)
    calls = itertools.count()

    def sometimes(*_: Any) -> None:
        """Before the head: all layers have written keys, values and states by then."""
        if next(calls) in (2, 11):
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = family.model.get_output_embeddings().register_forward_pre_hook(sometimes)
    try:
        groups = engine.generate(family.prompts, sampling)
    finally:
        hook.remove()
    assert engine.stats().shortages == 2
    for group, other in zip(groups, expected, strict=True):
        assert [one.token_ids.tolist() for one in group.samples] == [
            one.token_ids.tolist() for one in other.samples
        ]
    assert verify(groups, family.model).max_abs_diff < 1e-3


@pytest.mark.parametrize(
    ("name", "layout"),
    cases(["gemma3", "gpt-oss", "qwen3-next", "deepseek-v3", "bloom", "mpt", "opt"]),
)
def test_prompts_that_begin_alike_give_the_tokens_of_whole_ones(
    name: str, layout: str, family_of: Any
) -> None:
    """Whatever a family's cache can do: be cut, be gone on from at its end, or only be used as it is."""
    family = family_of(name)
    head = max(family.prompts, key=len)
    prompts = [head, [*head, 5, 6], head, [*head[:20], 7, 8, 9]]
    length = max(map(len, prompts)) + NEW
    config = {**LAYOUTS[layout], "max_length": length, "prefix_cache_tokens": 0}
    plain = EngineConfig(num_slots=4, **config)
    sampling = SamplingParams(max_new_tokens=NEW, temperature=0)
    expected = Engine(family.model, plain).generate(prompts, sampling)
    engine = Engine(family.model, plain.model_copy(update={"prefix_cache_tokens": 4 * length}))
    groups = engine.generate(prompts, sampling)
    for group, other in zip(groups, expected, strict=True):
        assert group.samples[0].token_ids.tolist() == other.samples[0].token_ids.tolist()
    assert engine.stats().prefill_tokens_reused >= len(head)  # the third prompt is the first
