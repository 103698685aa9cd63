"""Tiny random models whose greedy outputs are lively, and HF `generate` as the reference for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

VOCAB = 160
EOS = 1
POISON = 1e4


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are fastest on one thread, and the machine is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def build() -> Callable[..., Any]:
    """``build(config, gain=...)``: a causal LM in fp32 with weights that keep its outputs changing."""

    def make(config: Any, *, gain: float = 1.4, head: float = 4.0, seed: int = 0) -> Any:
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng():
            torch.manual_seed(seed)
            # Soft-capped models need eager attention; versions differ in whether that is their default.
            softcapped = getattr(config, "attn_logit_softcapping", None) is not None
            options = {"attn_implementation": "eager"} if softcapped else {}
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options).eval()
            enliven(model, gain, head)
        return model

    return make


def enliven(model: Any, gain: float, head: float) -> None:
    """Redraw all weights in proportion to their fan-in, so that signals neither die nor repeat.

    Transformers' own initialisation (0.02) makes every prompt end in the same token: such a model
    passes any test of its cache.
    """
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter is embedding:
                parameter.normal_(0, 1)
            elif parameter.dim() >= 2 and ("embed_positions" in name or "wpe" in name):
                parameter.normal_(0, 0.7)
            elif parameter.dim() >= 2:
                parameter.normal_(0, gain / parameter.shape[-1] ** 0.5)
            elif "sinks" in name:
                parameter.normal_(1, 1)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name or "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        if output is not embedding:
            output.normal_(0, head / output.shape[-1] ** 0.5)


def llama_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{**small(), **changes})


def small(**changes: Any) -> dict[str, Any]:
    """Settings that most configurations share."""
    return {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "eos_token_id": EOS, "pad_token_id": 0, "bos_token_id": 2, "tie_word_embeddings": False,
        **changes,
    }  # fmt: skip


@pytest.fixture(scope="session")
def small_config() -> Callable[..., dict[str, Any]]:
    return small


@pytest.fixture(scope="module")
def llama(build: Callable[..., Any]) -> Any:
    """A small Llama for one test module; tests leave it as they find it."""
    return build(llama_config())


@pytest.fixture(scope="session")
def hf_greedy() -> Callable[..., list[int]]:
    """``hf_greedy(model, prompt, n, **generate)``: tokens of HF `generate` on that one row, unpadded."""

    def generate(model: Any, prompt: Sequence[int], new: int, eos: Any = None, **more: Any) -> list[int]:
        ids = torch.tensor([list(prompt)])
        mask = torch.ones_like(ids)
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=new,
            eos_token_id=eos,
            pad_token_id=0,
            **more,
        )
        return out[0, len(prompt) :].tolist()

    return generate


@pytest.fixture(scope="session")
def poison() -> Callable[[Any], Any]:
    """Fill every cell of an engine's cache with a large finite value; returns the engine."""

    def fill(engine: Any) -> Any:
        for tensor in engine.cache.tensors():
            tensor.fill_(POISON)
        return engine

    return fill


@pytest.fixture(scope="session")
def prompts_of() -> Callable[..., list[list[int]]]:
    """``prompts_of(lengths, seed=...)``: random prompts without special ids."""

    def draw(lengths: Sequence[int], seed: int = 1, low: int = 3, high: int = VOCAB) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(low, high, (length,), generator=generator).tolist() for length in lengths]

    return draw
