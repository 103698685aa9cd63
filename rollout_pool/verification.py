"""Rescore finished rollouts with a plain teacher-forced forward, as a trainer would.

The forward shares nothing with the engine: the model's own attention, no cache, one sample at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from rollout_pool.actors.loading import load_model
from rollout_pool.actors.model_runner import evaluation
from rollout_pool.actors.zero3 import is_partitioned
from rollout_pool.errors import ConfigError, VerificationError
from rollout_pool.types import RolloutGroup, Sample, TokenIds


@dataclass(frozen=True, slots=True)
class Verification:
    """How far the log-probabilities of rollouts lie from those of a teacher-forced forward."""

    max_abs_diff: float
    """Largest difference of one token's log-probability, in nats; inf where one of the two is nan."""
    mean_abs_diff: float
    num_tokens: int
    num_samples: int
    worst: tuple[str | int, int, int] | None
    """Where the largest difference is: request id, sample index, position in the sample."""
    group_max: dict[int, float]
    """Largest difference within each group, by its index."""

    def describe(self) -> str:
        """One line for a person."""
        if self.worst is None:
            return "verify: no tokens to compare"
        request_id, sample, position = self.worst
        return (
            f"verify: max |difference| of logprobs {self.max_abs_diff:.2e}, mean "
            f"{self.mean_abs_diff:.2e} over {self.num_tokens} tokens in {self.num_samples} samples "
            f"(worst: request {request_id}, sample {sample}, token {position})"
        )

    def check(self, tolerance: float) -> None:
        """Raise :class:`VerificationError` when a token differs by more than ``tolerance``."""
        if self.worst is not None and not self.max_abs_diff <= tolerance:
            raise VerificationError(f"{self.describe()}; the tolerance is {tolerance:g}")


def verify(groups: Iterable[RolloutGroup], model: Any, *, temperature: float | None = None) -> Verification:
    """Compare ``Sample.logprobs`` with ``log_softmax(logits / temperature)`` of a plain forward.

    Args:
        groups: finished groups. Groups without samples add nothing.
        model: a causal LM (``PreTrainedModel``), an ``Engine``, or a folder to load one from (in its
            own dtype). Its mode is restored. Of a ZeRO-3 trainer, an ``Engine`` on its model, on all ranks.
        temperature: that of the rollouts; by default each group's own.

    Source: the definition of a policy's log-probability at temperature T, as policy-gradient
    trainers compute it; temperature 0 is scored unscaled.
    """
    scorer, session = _scorer(model)
    found: list[_Scored] = []
    with session:
        for group in groups:
            drawn_at = group.sampling.temperature if group.sampling is not None else 1.0
            scale = drawn_at if temperature is None else temperature
            found += [
                _compare(scorer, group, sample, scale) for sample in group.samples if sample.token_ids.size
            ]
    worst = max(found, key=lambda scored: scored.high, default=None)
    tokens = sum(scored.num_tokens for scored in found)
    group_max: dict[int, float] = {}
    for scored in found:
        group_max[scored.group_index] = max(scored.high, group_max.get(scored.group_index, 0.0))
    return Verification(
        max_abs_diff=worst.high if worst else 0.0,
        mean_abs_diff=sum(scored.total for scored in found) / tokens if tokens else 0.0,
        num_tokens=tokens,
        num_samples=len(found),
        worst=worst.where if worst else None,
        group_max=group_max,
    )


@dataclass(frozen=True, slots=True)
class _Scored:
    """One sample's differences."""

    group_index: int
    where: tuple[str | int, int, int]
    high: float
    total: float
    num_tokens: int


def _compare(scorer: Any, group: RolloutGroup, sample: Sample, temperature: float) -> _Scored:
    scored = score(scorer, group.prompt_token_ids, sample.token_ids, temperature)
    difference = (scored - torch.tensor(sample.logprobs, dtype=torch.float64)).abs()
    difference = difference.nan_to_num(nan=float("inf"))  # a nan is the worst of all
    position = int(difference.argmax())
    where = (group.request_id, sample.sample_index, position)
    return _Scored(
        group.index, where, float(difference[position]), float(difference.sum()), difference.numel()
    )


def score(model: Any, prompt: TokenIds, completion: TokenIds, temperature: float) -> torch.Tensor:
    """Log-probability of every completion token in one plain forward: float64 ``[tokens]`` on the CPU."""
    ids = torch.tensor([*prompt.tolist(), *completion.tolist()])
    size = completion.shape[0]
    device = next(model.parameters()).device if isinstance(model, torch.nn.Module) else model.device
    logits = model(input_ids=ids.unsqueeze(0).to(device), use_cache=False).logits[0, -size - 1 : -1].float()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    return logprobs.gather(1, ids[-size:].to(device).unsqueeze(1)).squeeze(1).double().cpu()


def _scorer(model: Any) -> tuple[Any, AbstractContextManager[None]]:
    """What is called to score, and the context for it."""
    if type(model).__name__ == "Engine":
        runner = model.batch.worker.runner
        return runner, runner.together()
    if isinstance(model, str):
        model = load_model(model, dtype="auto", device=None, trust_remote_code=False)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"verify needs a causal LM, an Engine or a folder, got {type(model).__name__}")
    if is_partitioned(model):
        raise ConfigError("ZeRO-3 has partitioned this model: give verify an Engine on it, on all ranks")
    return model, evaluation(model.modules())
