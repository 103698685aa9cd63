"""Rescore finished rollouts with a plain teacher-forced forward, as a trainer would.

The forward shares nothing with the engine: the model's own attention, no cache, one sample at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rollout_pool.errors import ConfigError, VerificationError
from rollout_pool.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class Verification:
    """How far the log-probabilities of rollouts lie from those of a teacher-forced forward."""

    max_abs_diff: float
    """Largest difference of one token's log-probability, in nats."""
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
            f"verify: max |difference| of logprobs {self.max_abs_diff:.2e}, mean {self.mean_abs_diff:.2e} over "
            f"{self.num_tokens} tokens in {self.num_samples} samples "
            f"(worst: request {request_id}, sample {sample}, token {position})"
        )

    def check(self, tolerance: float) -> None:
        """Raise :class:`VerificationError` when a token differs by more than ``tolerance``, or by nan."""
        if self.worst is not None and not self.max_abs_diff <= tolerance:
            raise VerificationError(f"{self.describe()}; the tolerance is {tolerance:g}")


def verify(groups: Iterable[RolloutGroup], model: Any, *, temperature: float | None = None) -> Verification:
    """Compare ``Sample.logprobs`` with ``log_softmax(logits / temperature)`` of a plain forward.

    Args:
        groups: finished groups; failed ones are passed over.
        model: a causal LM (``PreTrainedModel``), an ``Engine``, or a folder to load one from (in its
            own dtype). Its mode is restored.
        temperature: that of the rollouts; by default each group's own.

    Source: the definition of a policy's log-probability at temperature T, as policy-gradient
    trainers compute it; temperature 0 is scored unscaled.
    """
    scorer = _model(model)
    worst: tuple[float, tuple[str | int, int, int]] | None = None
    total, tokens, samples = 0.0, 0, 0
    group_max: dict[int, float] = {}
    with _evaluation(scorer):
        for group in groups:
            scale = temperature if temperature is not None else group.sampling.temperature if group.sampling else 1.0
            for sample in group.samples:
                if sample.token_ids.size == 0:
                    continue
                scored = score(scorer, group.prompt_token_ids, sample.token_ids, scale)
                difference = (scored - torch.from_numpy(sample.logprobs).double()).abs()
                position = int(difference.nan_to_num(nan=float("inf")).argmax())
                high = float(difference[position])
                total, tokens, samples = total + float(difference.sum()), tokens + difference.numel(), samples + 1
                group_max[group.index] = max(high, group_max.get(group.index, 0.0))
                if worst is None or not high <= worst[0]:
                    worst = (high, (group.request_id, sample.sample_index, position))
    return Verification(
        max_abs_diff=worst[0] if worst else 0.0,
        mean_abs_diff=total / tokens if tokens else 0.0,
        num_tokens=tokens,
        num_samples=samples,
        worst=worst[1] if worst else None,
        group_max=group_max,
    )


def score(model: Any, prompt: Any, completion: Any, temperature: float) -> torch.Tensor:
    """Log-probability of every completion token in one plain forward: float64 ``[tokens]`` on the CPU."""
    ids = torch.cat((torch.as_tensor(prompt), torch.as_tensor(completion)))
    size = completion.shape[0]
    device = next(model.parameters()).device
    logits = model(input_ids=ids.unsqueeze(0).to(device), use_cache=False).logits[0, -size - 1 : -1].float()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    return logprobs.gather(1, ids[-size:].to(device).unsqueeze(1)).squeeze(1).double().cpu()


def _model(model: Any) -> torch.nn.Module:
    if isinstance(model, str):
        from rollout_pool.actors.loading import load_model

        return load_model(model, dtype="auto", device=None, trust_remote_code=False)
    inner = getattr(model, "model", model) if type(model).__name__ == "Engine" else model
    if not isinstance(inner, torch.nn.Module):
        raise ConfigError(f"verify needs a causal LM, an Engine or a folder, got {type(model).__name__}")
    return inner


@contextmanager
def _evaluation(model: torch.nn.Module) -> Iterator[None]:
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in was_training:
            module.training = True
