"""The whole engine on Triton's kernels: the tokens of the engine on the references."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from rollout_pool import Engine, EngineConfig, SamplingParams
from rollout_pool.kernels import ops

PROMPTS = [[5, 9, 13, 7, 3, 11, 40, 8, 22, 31, 17], [6, 2, 30]]
SAMPLING = {
    "greedy": SamplingParams(n=1, max_new_tokens=6, temperature=0.0),
    "sampled": SamplingParams(n=3, max_new_tokens=5, temperature=0.8, seed=3),
    "filtered": SamplingParams(n=2, max_new_tokens=4, top_k=20, top_p=0.9, repetition_penalty=1.2, seed=4),
}


def gemma2() -> Any:
    """Sliding and full layers, soft-cap, a head dim of its own."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        sliding_window=6,
        attn_logit_softcapping=20.0,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Gemma2ForCausalLM(config).eval()


CONFIGS: dict[str, EngineConfig] = {
    "expand": EngineConfig(num_slots=4, max_length=32, prefix="expand"),
    "shared": EngineConfig(num_slots=4, max_length=32, prefix="shared", max_new_tokens=8, prompt_tokens=24),
}


def rollout(
    model: Any, params: SamplingParams, device: torch.device, config: EngineConfig = CONFIGS["expand"]
) -> list[Any]:
    """Fewer slots than samples: rows are refilled, and moved together at the end."""
    if isinstance(model, str):
        engine = Engine(model, config, device=str(device))
    else:
        engine = Engine(model.to(device), config)
    groups = engine.generate(PROMPTS, params)
    assert [group.error for group in groups] == [None, None]
    return [sample for group in groups for sample in group.samples]


@pytest.mark.parametrize("prefix", CONFIGS)
@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tokens_are_those_of_the_references(
    family: str,
    kind: str,
    prefix: str,
    tiny_model_dir: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model_dir if family == "llama" else gemma2()
    expected = rollout(model, SAMPLING[kind], torch.device("cpu"))
    monkeypatch.setattr(ops, "uses_triton", lambda tensor: True)
    got = rollout(model, SAMPLING[kind], device, CONFIGS[prefix])
    assert "rollout_pool.kernels.attention_triton" in sys.modules
    assert prefix == "expand" or "rollout_pool.kernels.prefix_attention_triton" in sys.modules
    assert [sample.token_ids.tolist() for sample in got] == [sample.token_ids.tolist() for sample in expected]
    for one, other in zip(got, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.sampling_logprobs == pytest.approx(other.sampling_logprobs, abs=1e-4)
