"""What a number of ranks can split of a model, read from its configuration and its class."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rollout_pool.errors import ConfigError, one_line

BY_OUTPUT = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
BY_INPUT = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise")
BY_EMBEDDING = {"embedding_rowwise": 0, "embedding_colwise": 1}
LAYER = r"\.\d+\."
LARGEST = 16  # of the sizes that a refusal names as ways out


@dataclass(frozen=True)
class Skeleton:
    """A model without weights: its class, shapes and plan."""

    name: str
    config: Any  # of the language model, when there is more than that
    model: PreTrainedModel

    @classmethod
    def of(cls, config: PretrainedConfig) -> Skeleton:
        """Raises :class:`ConfigError` when no causal LM can be built from ``config``."""
        name = f"model {config.name_or_path or config.model_type!r}"
        # A configuration whose class came with the checkpoint was loaded by somebody who trusts its code.
        is_trusted = not type(config).__module__.startswith("transformers.")
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=is_trusted)
        except Exception as error:
            raise ConfigError(
                f"{name}: no causal LM can be built from its configuration: {one_line(error)}"
            ) from error
        return cls(name, config.get_text_config(decoder=True), model)

    def heads(self) -> Iterator[tuple[str, int]]:
        """What is counted in heads, with every count that occurs: layers may differ."""
        config = self.config
        counts = {"attention heads": [config.num_attention_heads]}
        is_latent = getattr(config, "kv_lora_rank", None) is not None
        if not is_latent:  # a latent is shared by all heads, and every rank has it
            names = [key for key in vars(config) if re.search(r"key_value_heads$|kv_heads$", key)]
            counts["KV heads"] = [getattr(config, key) for key in names]
        for what, found in counts.items():
            flat = [count for one in found for count in (one if isinstance(one, list) else [one])]
            yield from ((what, count) for count in sorted({count for count in flat if count}))

    def tied(self) -> tuple[str, str] | None:
        """The names of the embedding and of the head, when they are one tensor."""
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if head is None or head.weight is not embedding.weight:
            return None
        names = {module: f"{name}.weight" for name, module in self.model.named_modules()}
        return names[embedding], names[head]

    def what(self, name: str) -> str:
        """What the split dimension of a parameter counts, in a user's words; "" is the head's input."""
        if not name:
            return "hidden size"
        owner = self.model.get_submodule(name.rpartition(".")[0])
        if owner in (self.model.get_input_embeddings(), self.model.get_output_embeddings()):
            return "vocabulary"
        return "intermediate size" if re.search("mlp|expert|feed_forward|ffn", name) else f"width of {name}"


@dataclass(frozen=True)
class Split:
    """One parameter, and the dimension along which ranks divide it; ``blocks`` are fused along it."""

    name: str
    dim: int
    length: int
    blocks: int = 1


@dataclass(frozen=True)
class SplitRules:
    """Which parameters a backend splits, or why it splits none."""

    skeleton: Skeleton
    splits: Mapping[str, Split]
    splits_heads: bool
    refusal: str | None = None

    @classmethod
    def of_plan(cls, skeleton: Skeleton) -> SplitRules:
        """The plan that Transformers ships with the model."""
        model = skeleton.model
        plan = dict(getattr(model, "_tp_plan", None) or {})
        splits = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
            style = plan.get(generic) or plan.get(generic.rpartition(".")[0])
            split = _split_by(style, name, parameter, model) if style else None
            if split is not None:
                splits[name] = split
        kind = type(model).__name__
        refusal = None
        if not any(re.search(LAYER, name) for name in splits):
            refusal = f"{kind} has no tensor-parallel plan for its layers"
        splits_heads = any("attn" in key and style == "colwise" for key, style in plan.items())
        return cls(skeleton, splits, splits_heads, refusal or _against_tie(skeleton, splits))

    @classmethod
    def of_auto_tp(cls, skeleton: Skeleton) -> SplitRules:
        """What AutoTP does: every linear layer by its output, or by its input where a sum follows."""
        model, splits = skeleton.model, {}
        for name, parameter in model.named_parameters():
            if re.search(LAYER, name) and parameter.dim() > 2:
                refusal = f"AutoTP leaves {name} whole on every rank, with its {parameter.dim()} dimensions"
                return cls(skeleton, {}, True, refusal)
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and re.search(LAYER, name):
                splits[name] = Split(f"{name}.weight", 0, module.out_features)
        if not splits:
            return cls(skeleton, {}, True, f"AutoTP finds no linear layers in {type(model).__name__}")
        head = Split("", 1, skeleton.config.hidden_size)  # it is split by its input
        return cls(skeleton, {"head": head, **splits}, True)

    def reason_against(self, size: int) -> str | None:
        """Why ``size`` ranks cannot split the model, with the numbers; None when they can."""
        if self.refusal is not None:
            return self.refusal
        for what, length in self._lengths():
            if length % size:
                number = f"{length} {what}" if what.endswith("heads") else f"{what} {length}"
                fitting = [str(n) for n in range(2, LARGEST + 1) if self._fits(n)]
                way_out = f"it can be {', '.join(fitting)}" if fitting else "do not split it"
                return f"{number} cannot be divided by tensor_parallel_size {size}; {way_out}"
        return None

    def _fits(self, size: int) -> bool:
        return all(length % size == 0 for _, length in self._lengths())

    def _lengths(self) -> Iterator[tuple[str, int]]:
        if self.splits_heads:
            yield from self.skeleton.heads()
        for split in self.splits.values():
            yield self.skeleton.what(split.name), split.length // split.blocks


def _split_by(style: str, name: str, parameter: torch.Tensor, model: PreTrainedModel) -> Split | None:
    is_embedding = isinstance(model.get_submodule(name.rpartition(".")[0]), torch.nn.Embedding)
    if style in BY_EMBEDDING:
        dim = BY_EMBEDDING[style]
    elif style in BY_OUTPUT:
        dim = 1 if is_embedding else max(parameter.dim() - 2, 0)
    elif style in BY_INPUT and not name.endswith("bias"):
        dim = 0 if is_embedding else parameter.dim() - 1
    else:
        return None
    return Split(name, dim, parameter.shape[dim], 2 if style.startswith("packed") else 1)


def _against_tie(skeleton: Skeleton, splits: Mapping[str, Split]) -> str | None:
    """One tensor cannot be split in two ways: the plan must say the same of embedding and head."""
    tied = skeleton.tied()
    if tied is None:
        return None
    dims = [splits[name].dim if name in splits else None for name in tied]
    if dims[0] == dims[1]:
        return None
    ways = [
        f"{name} {'whole' if dim is None else f'by dimension {dim}'}"
        for name, dim in zip(tied, dims, strict=True)
    ]
    return f"its embedding is tied to its head, but the plan has {' and '.join(ways)}"
