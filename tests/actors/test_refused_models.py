"""Models that the engine cannot serve correctly are refused when they are loaded, by name and reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from rollout_pool import (
    CapacityError,
    ConfigError,
    Engine,
    EngineConfig,
    SamplingParams,
    UnsupportedModelError,
)

# What is refused, and which words of the message say why.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": (
        "BloomConfig",
        {"n_layer": 2, "n_head": 4},
        "BloomForCausalLM.*position.*set engine.layout to 'aligned'",
    ),
    "mpt": (
        "MptConfig",
        {"d_model": 64, "n_layers": 2, "n_heads": 4},
        "MptForCausalLM.*position.*set engine.layout to 'aligned'",
    ),
    "falcon-alibi": (
        "FalconConfig",
        {"alibi": True},
        "FalconForCausalLM.*ALiBi.*set engine.layout to 'aligned'",
    ),
    "mamba": ("MambaConfig", {}, "MambaForCausalLM"),
    "falcon-h1": (
        "FalconH1Config",
        {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_state": 16},
        "FalconH1ForCausalLM.*LinearAttentionAndFullAttentionLayer",
    ),
    "dynamic-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "LlamaForCausalLM.*dynamic RoPE",
    ),
}
LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
                        "long_factor": [2.0] * 8},
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_served_is_refused_by_name_and_reason(kind: str, small_config: Any) -> None:
    class_name, changes, message = REFUSED[kind]
    config = getattr(transformers, class_name)(**small_config(**changes))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        Engine(model, EngineConfig(num_slots=2, max_length=32))
    assert "\n" not in str(caught.value)


def test_an_encoder_decoder_is_refused() -> None:
    config = transformers.T5Config(vocab_size=160, d_model=64, num_layers=2, d_ff=64, num_heads=4)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match=r"T5ForConditionalGeneration.*encoder-decoder"):
        Engine(model, EngineConfig(num_slots=2, max_length=32))


def test_longrope_is_served_on_one_side_of_its_switch_and_refused_across_it(
    build: Any, small_config: Any, hf_greedy: Any, prompts_of: Any
) -> None:
    model = build(transformers.Phi3Config(**small_config(**LONGROPE)))
    with pytest.raises(UnsupportedModelError, match=r"longrope.*max_length to at most 64"):
        Engine(model, EngineConfig(num_slots=2, max_length=65))
    engine = Engine(model, EngineConfig(num_slots=2, max_length=64))
    (prompt,) = prompts_of([30])
    (group,) = engine.generate([prompt], SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True))
    assert group.samples[0].token_ids.tolist() == hf_greedy(model, prompt, 20)


# A learned table of positions ends somewhere; past it the model fails, so no engine row may reach there.
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_rows_never_outgrow_a_learned_position_table(
    family: str, build: Any, small_config: Any, prompts_of: Any
) -> None:
    config = {"gpt2": transformers.GPT2Config, "opt": transformers.OPTConfig}[family]
    model = build(config(**small_config(ffn_dim=96, word_embed_proj_dim=64, n_positions=256)))
    try:
        engine = Engine(model, EngineConfig(num_slots=2, max_length=300))
    except ConfigError as error:
        assert "256" in str(error)  # noqa: PT017 - refusing at load is one of two right answers
        return
    long, short = prompts_of([270, 4])
    groups = engine.generate([long, short], SamplingParams(max_new_tokens=4))
    assert groups[0].error is not None
    assert "256" in groups[0].error
    assert groups[1].error is None


def test_a_row_longer_than_mpts_table_of_biases_is_refused_at_load(build: Any, small_config: Any) -> None:
    """It has `max_seq_len` columns; past them the model fails in the middle of a run."""
    model = build(
        transformers.MptConfig(**small_config(d_model=64, n_heads=4, n_layers=2, max_seq_len=32)), gain=3.0
    )
    with pytest.raises(CapacityError, match=r"MptForCausalLM.*32 tokens.*max_length to at most 32, it is 33"):
        Engine(model, EngineConfig(num_slots=2, max_length=33, layout="aligned"))
    Engine(model, EngineConfig(num_slots=2, max_length=32, layout="aligned"))


class _IgnoresMask(torch.nn.Module):
    """Attention of an unknown kind: over every cell of the cache, whatever the mask says."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self, hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        if hidden_states.shape[1] == 1:
            attention_mask = torch.ones_like(attention_mask)
        return self.inner(hidden_states, position_embeddings, attention_mask=attention_mask, **kwargs)


class _CountsPositions(torch.nn.Module):
    """RoPE of an unknown kind: positions are counted from the first row, whatever the engine says."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.inner(x, position_ids[:1].expand(x.shape[0], -1))


class _ScoresByAge(torch.nn.Module):
    """Attention that fades with the distance to the last column of the cache, as an ALiBi of its own."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self, hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        out, weights = self.inner(hidden_states, position_embeddings, attention_mask=attention_mask, **kwargs)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        columns = (
            hidden_states.shape[1] if cache is None else cache.layers[self.inner.layer_idx].keys.shape[2]
        )
        return out * (1 + 0.2 * columns), weights


@pytest.mark.parametrize("fault", [_IgnoresMask, _CountsPositions, _ScoresByAge])
def test_a_model_that_silently_breaks_the_contract_is_caught_by_the_trial(
    fault: Any, build: Any, small_config: Any
) -> None:
    model = build(transformers.LlamaConfig(**small_config()))
    if fault is _CountsPositions:
        model.model.rotary_emb = fault(model.model.rotary_emb)
    else:
        model.model.layers[1].self_attn = fault(model.model.layers[1].self_attn)
    before = model.config._attn_implementation
    with pytest.raises(
        UnsupportedModelError, match=r"LlamaForCausalLM gives other logits.*relative difference"
    ):
        Engine(model, EngineConfig(num_slots=2, max_length=32))
    assert model.config._attn_implementation == before


def test_a_model_that_fails_in_the_trial_is_refused_with_its_own_reason(
    build: Any, small_config: Any
) -> None:
    model = build(transformers.LlamaConfig(**small_config()))

    def broken(module: Any, args: Any, kwargs: Any) -> None:
        if args[0].shape[1] == 1:
            raise ValueError("one token at a time is beneath me")

    model.model.layers[0].mlp.register_forward_pre_hook(broken, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM failed to decode.*beneath me"):
        Engine(model, EngineConfig(num_slots=2, max_length=32))


def test_soft_capped_attention_through_sdpa_is_refused(small_config: Any) -> None:
    config = transformers.Gemma2Config(**small_config(head_dim=16))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.config._attn_implementation = "sdpa"
    with pytest.raises(UnsupportedModelError, match=r"soft-cap.*attn_implementation='eager'"):
        Engine(model, EngineConfig(num_slots=2, max_length=64))
