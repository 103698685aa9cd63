"""Load a model and its tokenizer, with errors that say what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rollout_pool.actors.checkpoint_files import refuse_unreadable, refuse_unreadable_config
from rollout_pool.actors.loaded_weights import load_whole
from rollout_pool.config import Dtype
from rollout_pool.errors import ConfigError, UnsupportedModelError, one_line

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "special_tokens_map.json")
OWN_CODE = (
    "it brings code of its own, which is not run unless asked for",
    "if you trust that code, set trust_remote_code: true",
)
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(name: str, *, dtype: Dtype, device: str | None, trust_remote_code: bool) -> PreTrainedModel:
    """A causal LM from a folder or the hub's cache, in evaluation mode, from safetensors only.

    Raises :class:`ConfigError` when there is none, or when it cannot be read.
    """
    wanted: Any = "auto" if dtype == "auto" else TORCH_DTYPES[dtype]
    if Path(name).is_dir():
        refuse_unreadable(name)
    config = load_config(name, trust_remote_code=trust_remote_code)
    try:
        options = {"attn_implementation": "eager"} if has_softcap(config.get_text_config()) else {}
        model: Any = load_whole(name, dtype=wanted, trust_remote_code=trust_remote_code, **options)
    except ConfigError:
        raise
    except Exception as error:
        raise cannot_load(name, error) from error
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    ready: PreTrainedModel = model.to(place).eval()
    return ready


def load_config(name: str, *, trust_remote_code: bool) -> PretrainedConfig:
    """A causal LM's configuration. Raises :class:`ConfigError` when it is unreadable or of another kind."""
    if Path(name).is_dir():
        refuse_unreadable_config(name)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise cannot_load(name, error) from error
    _refuse_other_kinds(name, config)
    return config


def cannot_load(name: str, error: Exception) -> ConfigError:
    """What Transformers says of a model, shortened, with the way out."""
    reason = one_line(error, 200)
    if not isinstance(error, (OSError, ValueError)):
        reason = f"{type(error).__name__}: {reason}"
    remedy = "check config.json, or copy or download the folder again"
    if "trust_remote_code" in str(error):
        reason, remedy = OWN_CODE
    elif "does not recognize this architecture" in reason:
        reason = reason.partition(" This could")[0]
        remedy = "use a Transformers that knows it, or trust_remote_code: true if it brings its own code"
    elif "model_type" in reason:
        reason = "its config.json names no model_type that Transformers knows"
        remedy = "give the folder of a causal LM"
    elif not Path(name).is_dir():
        reason = f"there is no such folder, and not in the hub's cache either ({one_line(error, 80)})"
        remedy = "give the path of a folder, or download the model first"
    return ConfigError(f"cannot load model {name!r}: {reason.rstrip('.')}; {remedy}")


def _refuse_other_kinds(name: str, config: PretrainedConfig) -> None:
    is_own_code = not type(config).__module__.startswith("transformers.")
    if is_own_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    raise UnsupportedModelError(
        f"cannot load model {name!r}: {config.model_type!r} is not a causal LM, so it generates no text by "
        "itself; give the folder of a decoder-only language model"
    )


def has_softcap(config: Any) -> bool:
    """Whether attention scores are soft-capped; SDPA cannot, and some versions leave it out silently."""
    return getattr(config, "attn_logit_softcapping", None) is not None


def load_tokenizer(name: str, *, trust_remote_code: bool, required: bool = False) -> Any | None:
    """The tokenizer in a model's folder, or None when there is none and it is not required.

    Raises :class:`ConfigError` when there are files of one that cannot be read.
    """
    folder = Path(name)
    has_files = folder.is_dir() and any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES)
    if folder.is_dir() and not has_files:
        # For some model types Transformers would make one of special tokens alone, with their EOS.
        if required:
            raise ConfigError(f"cannot load tokenizer {name!r}: there are no tokenizer files in that folder")
        return None
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        if not required and not has_files:
            return None
        reason, remedy = one_line(error, 200), "copy its files again, or name another folder as tokenizer"
        if "trust_remote_code" in str(error):
            reason, remedy = OWN_CODE
        raise ConfigError(f"cannot load tokenizer {name!r}: {reason.rstrip('.')}; {remedy}") from error


def eos_token_ids(model: PreTrainedModel, tokenizer: Any | None) -> tuple[int, ...]:
    """Every id that ends a sample: the model's whole generation list together with the tokenizer's."""
    found: set[int] = set()
    sources = (model.generation_config, model.config, tokenizer)
    for source in sources:
        value = getattr(source, "eos_token_id", None) if source is not None else None
        found.update([value] if isinstance(value, int) else value or [])
    return tuple(sorted(found))
