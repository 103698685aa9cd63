"""Which models the engine serves: what is refused by its configuration, and a trial that shows the rest.

A model is refused when it is loaded, never later. The configuration says why for the known cases. All
others are tried: a few tokens are decoded through the slot cache, two rows of different lengths among
poisoned cells, and must agree with a plain forward without a cache.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from rollout_pool.actors.kv_cache import SlotCache
from rollout_pool.actors.loaded_weights import broken_weight
from rollout_pool.actors.loading import has_softcap
from rollout_pool.actors.model_runner import ModelRunner
from rollout_pool.actors.prefix import Prefix, longest_row
from rollout_pool.actors.prefix_cache import beginning, is_cuttable
from rollout_pool.actors.sharing_trial import decode_shared
from rollout_pool.errors import CapacityError, UnsupportedModelError

POISON = 1e4
_TRIAL_LENGTHS = (3, 6)
_TRIAL_STEPS = 3
TOLERANCES = {True: 1e-4, False: 0.1}
"""Of logits, relative to their spread: in float32, and in less."""


def refuse_by_configuration(model: PreTrainedModel, max_length: int, is_aligned: bool = False) -> None:
    """Raise :class:`UnsupportedModelError` for what is known not to work, by name and reason."""
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; only decoder models are served")
    if not is_aligned and "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError(
            f"{name} takes no position_ids: it derives positions from a mask of tokens (ALiBi and the like), "
            "which layout 'ragged' does not have; set engine.layout to 'aligned'"
        )
    if not is_aligned and getattr(config, "alibi", False):
        raise UnsupportedModelError(
            f"{name} uses ALiBi, which layout 'ragged' does not serve; set engine.layout to 'aligned'"
        )
    if model.config._attn_implementation == "sdpa" and has_softcap(config):
        raise UnsupportedModelError(
            f"{name} was loaded with attention 'sdpa', which leaves its soft-cap out; "
            "load it with attn_implementation='eager'"
        )
    table = _position_table(model, config)
    if table is not None and max_length > table:
        raise CapacityError(
            f"{name} has a table of positions for {table} tokens: set engine.max_length to at most {table}, "
            f"it is {max_length}"
        )
    for kind, original in _rope_kinds(config):
        if kind == "dynamic":
            raise UnsupportedModelError(
                f"{name} uses dynamic RoPE scaling, whose frequencies depend on the longest row of the batch"
            )
        if kind == "longrope" and original is not None and max_length > original:
            raise UnsupportedModelError(
                f"{name} switches its RoPE frequencies (longrope) at {original} tokens, so rows on both "
                f"sides cannot share a batch: set engine.max_length to at most {original}, it is {max_length}"
            )


def trial(runner: ModelRunner, is_aligned: bool = False, shares: bool = False) -> Prefix:
    """Decode a little and compare; returns a small prefill whose tensors give the cache its shapes.

    shares: also find out whether rows can share their prompt's KV, for :attr:`ModelRunner.no_sharing`.
    """
    name = type(runner.model).__name__
    try:
        worst, prefix = _measure(runner, is_aligned, shares)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} cannot be served: {error}") from None
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UnsupportedModelError(f"{name} failed to decode through the slot cache: {reason}") from error
    tolerance = TOLERANCES[runner.model.dtype == torch.float32]
    if worst == float("inf") and (fault := broken_weight(runner.model)) is not None:
        raise UnsupportedModelError(f"{name} cannot be served: its weights are broken: {fault}")
    if not worst <= tolerance:
        raise UnsupportedModelError(
            f"{name} gives other logits through the slot cache than in a plain forward "
            f"(relative difference {worst:.1e}, at most {tolerance:.1e} expected); it uses something that "
            "the engine does not know"
        )
    return prefix


def is_known_not_to_share(model: PreTrainedModel) -> bool:
    """Whether its configuration shows already what :func:`trial` would find: rows cannot share prompts.

    What multi-head latent attention caches are not its keys; it makes those of all cells in every step.
    """
    return getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None) is not None


def refuse_sharing(runner: ModelRunner) -> None:
    """Raise :class:`UnsupportedModelError` when rows of this model cannot share their prompt's KV."""
    if runner.no_sharing is not None:
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} cannot share prompts: {runner.no_sharing}; set engine.prefix to "
            "'auto' or 'expand'"
        )


def _measure(runner: ModelRunner, is_aligned: bool, shares: bool) -> tuple[float, Prefix]:
    """Relative error of prefill and ragged decoding, and a prefill."""
    generator = torch.Generator().manual_seed(20)
    high = min(runner.vocab_size, 1000)
    texts = [
        torch.randint(0, high, (length + _TRIAL_STEPS,), generator=generator).to(runner.device)
        for length in _TRIAL_LENGTHS
    ]
    expected = [runner.teacher_forced(text) for text in texts]
    prefixes = [runner.prefill(text[:length]) for text, length in zip(texts, _TRIAL_LENGTHS, strict=True)]
    longest = max(_TRIAL_LENGTHS)
    cache = SlotCache(prefixes[0].cache, 3, longest + _TRIAL_STEPS, is_aligned)
    for tensor in cache.tensors():
        tensor.fill_(POISON)
    for row, prefix in enumerate(prefixes):
        column = longest - prefix.length if is_aligned else 0
        cache.expand(prefix.cache, torch.tensor([row], device=runner.device), prefix.length, column)
    worst = 0.0
    for step in range(_TRIAL_STEPS):
        at = [length + step for length in _TRIAL_LENGTHS]
        tokens = torch.stack([text[i] for text, i in zip(texts, at, strict=True)])
        logits = runner.decode(cache, tokens, torch.tensor(at, device=runner.device), max(at))
        for row, i in enumerate(at):
            worst = max(worst, _relative(logits[row], expected[row][i]))
    for prefix, reference in zip(prefixes, expected, strict=True):
        worst = max(worst, _relative(prefix.logits[0], reference[prefix.length - 1]))
    runner.goes_on = _goes_on(runner, texts[1], prefixes[1], expected[1])
    runner.longest_together = _longest_together(runner, texts, prefixes, expected)
    if shares:
        runner.no_sharing = _why_not_shared(runner, texts, prefixes, expected)
    return worst, prefixes[0]


def _why_not_shared(
    runner: ModelRunner, texts: list[torch.Tensor], prefixes: list[Prefix], expected: list[torch.Tensor]
) -> str | None:
    """Why rows cannot share their prompt's KV; None: they can."""
    try:
        found = decode_shared(runner, texts, prefixes, _TRIAL_STEPS)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    worst = max(_relative(logits, expected[number][at]) for logits, number, at in found)
    if worst <= TOLERANCES[runner.model.dtype == torch.float32]:
        return None
    return f"its logits are then others than in a plain forward (relative difference {worst:.1e})"


def _goes_on(runner: ModelRunner, text: torch.Tensor, prefix: Prefix, expected: torch.Tensor) -> bool:
    """Whether a prompt that is computed in two parts is as good as one that is computed whole."""
    cut = prefix.length // 2
    if not is_cuttable(prefix, cut):
        return False
    try:
        again = runner.prefill(text, beginning(prefix, cut))
    except Exception:  # some models only know whole prompts and single tokens; they are served without it
        return False
    return _relative(again.logits[0], expected[-1]) <= TOLERANCES[runner.model.dtype == torch.float32]


def _longest_together(
    runner: ModelRunner, texts: list[torch.Tensor], prefixes: list[Prefix], expected: list[torch.Tensor]
) -> int:
    """Up to which length prompts may be computed in one forward, since they come out as if alone.

    From their beginnings on, and after one that they have in common.
    """
    longest = longest_row(prefixes[0].cache)
    if runner.needs_mask or longest < max(_TRIAL_LENGTHS):
        return 0
    prompts = [text[: prefix.length] for text, prefix in zip(texts, prefixes, strict=True)]
    text, size = texts[1], prefixes[1].length
    parts = [text[:size], text[: size - 1]]
    try:
        found = runner.prefill_together(prompts)
        again = runner.prefill_together(parts, beginning(prefixes[1], size // 2)) if runner.goes_on else []
    except Exception:  # some models only know one row, or one length; prompts are computed one by one then
        return 0
    pairs = [(one.logits[0], other.logits[0]) for one, other in zip(found, prefixes, strict=True)]
    pairs += [(one.logits[0], expected[1][one.length - 1]) for one in again]
    worst = max(_relative(got, wanted) for got, wanted in pairs)
    return longest if worst <= TOLERANCES[runner.model.dtype == torch.float32] else 0


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean difference over spread: in half precision one expert routed the other way does not decide.

    Infinite when either is not a number. Ids that a model rules out for good are minus infinity in both.
    """
    possible = expected != float("-inf")
    got, expected = got.where(possible, got.nan_to_num(neginf=0.0)), expected.where(possible, 0.0)
    difference = float((got - expected).abs().mean() / expected.std().clamp_min(1e-6))
    return difference if difference == difference else float("inf")


def _position_table(model: PreTrainedModel, config: Any) -> int | None:
    """Length of the table of positions (learned, or computed once), or None for a model without one."""
    if "position_ids" not in inspect.signature(model.forward).parameters and hasattr(config, "max_seq_len"):
        return int(config.max_seq_len)  # MPT's biases
    named = (*model.named_modules(), *model.named_buffers())
    names = {name.rsplit(".", 1)[-1] for name, _ in named}
    if not names & {"wpe", "embed_positions", "position_embeddings"}:
        return None
    length = getattr(config, "max_position_embeddings", None)
    return None if length is None else int(length)


def _rope_kinds(config: object) -> list[tuple[str, int | None]]:
    """(type, original length) of each RoPE parameter set; models may have one per layer type."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    sets = [found] if not all(isinstance(v, dict) for v in found.values()) else list(found.values())
    original = getattr(config, "original_max_position_embeddings", None)
    return [
        (
            str(one.get("rope_type", one.get("type", "default"))),
            one.get("original_max_position_embeddings", original),
        )
        for one in sets
        if isinstance(one, dict)
    ]
