"""Every supported family gives the tokens of single-row HF `generate`."""

from __future__ import annotations

from typing import Any

import pytest
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


def family_model(family: str, build: Any, small_config: Any) -> Any:
    class_name, changes, gain = FAMILIES[family]
    return build(getattr(transformers, class_name)(**small_config(**changes)), gain=gain)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_single_row_generate(
    family: str, build: Any, small_config: Any, hf_greedy: Any, poison: Any, prompts_of: Any
) -> None:
    model = family_model(family, build, small_config)
    prompts = prompts_of(LENGTHS)
    expected = [hf_greedy(model, prompt, NEW) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) >= 20, (
        "the model repeats itself: a weak test"
    )

    engine = poison(Engine(model, EngineConfig(num_slots=4, max_length=64)))
    requests = [
        RolloutRequest(prompt, SamplingParams(n=n, temperature=0, max_new_tokens=budget, ignore_eos=True))
        for prompt, n, budget in zip(prompts, SAMPLES, BUDGETS, strict=True)
    ]
    groups = engine.generate(requests)

    got = [[sample.token_ids.tolist() for sample in group.samples] for group in groups]
    assert got == [
        [tokens[:budget]] * n for tokens, n, budget in zip(expected, SAMPLES, BUDGETS, strict=True)
    ]
    assert engine.stats().rows_moved > 0
    assert verify(groups, model).max_abs_diff < 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss", "qwen3-next"])
def test_sampled_logprobs_are_those_of_a_teacher_forced_forward(
    family: str, build: Any, small_config: Any, poison: Any, prompts_of: Any
) -> None:
    model = family_model(family, build, small_config)
    engine = poison(Engine(model, EngineConfig(num_slots=3, max_length=64)))
    groups = engine.generate(prompts_of(LENGTHS), SamplingParams(n=2, max_new_tokens=NEW, temperature=0.7))
    report = verify(groups, model)
    assert report.num_samples == 12
    assert report.max_abs_diff < 1e-3
