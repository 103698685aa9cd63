"""Load a model and its tokenizer, with errors that say what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from rollout_pool.config import Dtype
from rollout_pool.errors import ConfigError, one_line

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "special_tokens_map.json")
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(name: str, *, dtype: Dtype, device: str | None, trust_remote_code: bool) -> PreTrainedModel:
    """A causal LM from a folder or the hub's cache, in evaluation mode, from safetensors only.

    Raises :class:`ConfigError` when there is none, or when it cannot be read.
    """
    wanted: Any = "auto" if dtype == "auto" else TORCH_DTYPES[dtype]
    config = load_config(name, trust_remote_code=trust_remote_code)
    try:
        options = {"attn_implementation": "eager"} if has_softcap(config.get_text_config()) else {}
        model: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=wanted, trust_remote_code=trust_remote_code, use_safetensors=True, **options
        )
    except Exception as error:
        raise ConfigError(f"cannot load model {name!r}: {one_line(error)}") from error
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    ready: PreTrainedModel = model.to(place).eval()
    return ready


def load_config(name: str, *, trust_remote_code: bool) -> PretrainedConfig:
    """A model's configuration. Raises :class:`ConfigError` when it cannot be read."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        return config
    except Exception as error:
        raise ConfigError(f"cannot load model {name!r}: {one_line(error)}") from error


def has_softcap(config: Any) -> bool:
    """Whether attention scores are soft-capped; SDPA cannot, and some versions leave it out silently."""
    return getattr(config, "attn_logit_softcapping", None) is not None


def load_tokenizer(name: str, *, trust_remote_code: bool, required: bool = False) -> Any | None:
    """The tokenizer in a model's folder, or None when there is none and it is not required."""
    try:
        folder = Path(name)
        if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
            # For some model types Transformers would make one of special tokens alone, with their EOS.
            raise FileNotFoundError("there are no tokenizer files")
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        if required:
            raise ConfigError(f"cannot load tokenizer {name!r}: {one_line(error)}") from error
        return None


def eos_token_ids(model: PreTrainedModel, tokenizer: Any | None) -> tuple[int, ...]:
    """Every id that ends a sample: the model's whole generation list together with the tokenizer's."""
    found: set[int] = set()
    sources = (model.generation_config, model.config, tokenizer)
    for source in sources:
        value = getattr(source, "eos_token_id", None) if source is not None else None
        found.update([value] if isinstance(value, int) else value or [])
    return tuple(sorted(found))


def transpose_linear_weights(model: PreTrainedModel) -> int:
    """Store linear weights column by column; values, shapes and names stay. Returns how many.

    On CPUs a product with few rows is up to twice as fast when the weight is stored in the order in
    which it is read. Embeddings, and heads tied to them, are read by row and stay.
    """
    outputs = model.get_output_embeddings()
    count = 0
    with torch.no_grad():
        for module in model.modules():
            if type(module) is torch.nn.Linear and module is not outputs and module.weight.dim() == 2:
                module.weight.data = module.weight.data.t().contiguous().t()
                count += 1
    return count
