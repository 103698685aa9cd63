"""Random models: small ones whose greedy tokens keep changing, and large ones for speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gpu.parts import Setting

WINDOW = 48
DRY_WINDOW = 7
FAMILIES = ("Llama, grouped heads", "Gemma 3, sliding window", "Qwen3-MoE")


def small_model(setting: Setting, family: str) -> PreTrainedModel:
    """A small random model in float32; its attention is what Transformers chooses."""
    dry = setting.is_dry
    sizes: dict[str, Any] = {
        "vocab_size": 160 if dry else 2_000, "hidden_size": 32 if dry else 256,
        "intermediate_size": 48 if dry else 512, "num_hidden_layers": 2 if dry else 4,
        "num_attention_heads": 4 if dry else 8, "num_key_value_heads": 2, "head_dim": 8 if dry else 64,
        "max_position_embeddings": 1024, "tie_word_embeddings": False,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    }  # fmt: skip
    if family.startswith("Llama"):
        config: Any = LlamaConfig(**sizes)
    elif family.startswith("Gemma"):
        sizes |= {"num_hidden_layers": 7, "sliding_window": DRY_WINDOW if dry else WINDOW}
        config = transformers.Gemma3TextConfig(**sizes, query_pre_attn_scalar=sizes["head_dim"])
    else:
        config = transformers.Qwen3MoeConfig(
            **sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=sizes["intermediate_size"]
        )
    torch.manual_seed(setting.seed_of(family))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    _enliven(model)
    return model.to(setting.device)


@torch.no_grad()
def _enliven(model: PreTrainedModel) -> None:
    """Redraw the weights in proportion to their fan-in.

    A fresh model of Transformers soon repeats one token, and would hide most faults of a cache.
    """
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for name, parameter in model.named_parameters():
        if parameter is embedding:
            parameter.normal_(0, 1)
        elif parameter is output:
            parameter.normal_(0, 4 / parameter.shape[-1] ** 0.5)
        elif parameter.dim() >= 2:
            parameter.normal_(0, 1.4 / parameter.shape[-1] ** 0.5)
        elif "norm" in name:
            parameter.add_(torch.randn_like(parameter) * 0.2)


@dataclass(frozen=True)
class Shape:
    """A Llama-like model's sizes."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    is_tied: bool


LARGE = (
    Shape("1B", 2048, 8192, 16, 32, 8, 128_256, True),
    Shape("7B", 4096, 14_336, 32, 32, 8, 32_000, False),
)


class LargeModels:
    """Random bf16 models, each built once, on the device."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._built: dict[str, PreTrainedModel] = {}

    def get(self, shape: Shape) -> PreTrainedModel:
        if shape.name not in self._built:
            self._built[shape.name] = self._build(shape)
        return self._built[shape.name]

    def _build(self, shape: Shape) -> PreTrainedModel:
        config = LlamaConfig(
            vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads, max_position_embeddings=8192,
            tie_word_embeddings=shape.is_tied, pad_token_id=0, eos_token_id=1, bos_token_id=2,
        )  # fmt: skip
        if self._setting.is_dry:
            config = LlamaConfig(
                vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=shape.is_tied,
                pad_token_id=0, eos_token_id=1, bos_token_id=2,
            )  # fmt: skip
        torch.manual_seed(self._setting.seed_of(shape.name))
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32 if self._setting.is_dry else torch.bfloat16)
        try:
            with torch.device(self._setting.device):
                return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)


def decode_bytes(model: PreTrainedModel, rows: int, length: int) -> int:
    """What one decode step has to read: every weight once, and the KV of ``rows`` rows of ``length`` tokens.

    Of an embedding that is not the output matrix too, a step reads a few rows only.
    """
    weights = sum(parameter.nbytes for parameter in model.parameters())
    embedding = model.get_input_embeddings().weight
    if embedding is not model.get_output_embeddings().weight:
        weights -= embedding.nbytes
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    cell = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * embedding.element_size()
    return weights + rows * length * cell
