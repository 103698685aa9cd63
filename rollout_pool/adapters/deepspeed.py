"""DeepSpeed's rollout interface on an engine or a pool, and what its distillation losses take.

Needs ``pip install 'rollout-pool[deepspeed]'``. Written for DeepSpeed 0.19, ``deepspeed.runtime.rollout``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.rollout import (
    ResponseTokenBatch,
    RolloutBatch,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
)

from rollout_pool.adapters.padded import PaddedBatch, pad_groups
from rollout_pool.adapters.rollouts import draw_seed, require_complete, roll_out
from rollout_pool.types import RolloutGroup, SamplingParams


class PoolRollout(RolloutEngine):  # type: ignore[misc]  # DeepSpeed has no type information
    """A DeepSpeed ``RolloutEngine`` whose samples come from an ``Engine`` or a pool.

    Args:
        source: an ``Engine`` (``Engine(deepspeed_engine.module)`` in the trainer's own process, say) or the
            handle of a pool.
        pad_token_id: what padding holds. It may be the EOS id.
        sync: brings the weights of a step to ``source``; called by ``sync_weights``. None where there
            is nothing to bring, because the engine runs on the trainer's own model.
        sampling: what ``SamplingConfig`` has no field for (min-p, stop strings, ...); the fields it has
            come from there.
        seed: with the rank of this process and the number of the call it makes the seed of the call.
    """

    name = "rollout_pool"

    def __init__(
        self,
        source: Any,
        *,
        pad_token_id: int,
        sync: Callable[[int], object] | None = None,
        sampling: SamplingParams | None = None,
        seed: int = 0,
    ) -> None:
        self._source = source
        self._pad_token_id = pad_token_id
        self._sync = sync
        self._sampling = sampling or SamplingParams()
        self._seed = seed
        self._num_calls = 0
        self.last_groups: list[RolloutGroup] = []
        """The groups of the last call, with all that ``RolloutBatch`` has no field for."""

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """``n_samples_per_prompt`` rows for each prompt, one after the other; see :func:`rollout_batch`.

        Of the request only what its mask marks is read. ``continuous_batch_size`` is not needed: rows
        are refilled in any case. Raises :class:`RequestError` when a prompt cannot be served.
        """
        ids, masks = request.prompt_ids.cpu(), request.prompt_attention_mask.cpu().bool()
        prompts = [row[mask].numpy() for row, mask in zip(ids, masks, strict=True)]
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        params = sampling_params(sampling, self._sampling, seed=draw_seed(self._seed, rank, self._num_calls))
        self._num_calls += 1
        self.last_groups = require_complete(roll_out(self._source, prompts, params))
        return rollout_batch(
            self.last_groups,
            pad_token_id=self._pad_token_id,
            prompt_width=request.prompt_ids.shape[1],
            device=request.prompt_ids.device,
        )

    def sync_weights(self, step: int) -> None:
        """Bring the weights of ``step`` to the source."""
        if self._sync is not None:
            self._sync(step)


def sampling_params(
    config: SamplingConfig, base: SamplingParams | None = None, *, seed: int | None = None
) -> SamplingParams:
    """A DeepSpeed ``SamplingConfig`` as :class:`SamplingParams`; what it has no field for is ``base``'s."""
    fields = (base or SamplingParams()).model_dump()
    fields.update(
        n=config.n_samples_per_prompt,
        max_new_tokens=config.max_new_tokens,
        min_new_tokens=min(fields["min_new_tokens"], config.max_new_tokens),
        temperature=max(float(config.temperature), 0.0),
        top_p=float(config.top_p),
        top_k=config.top_k if config.top_k > 0 else None,
    )
    if seed is not None:
        fields["seed"] = seed
    return SamplingParams(**fields)


def rollout_batch(
    groups: Iterable[RolloutGroup],
    *,
    pad_token_id: int,
    prompt_width: int | None = None,
    device: torch.device | str = "cpu",
) -> RolloutBatch:
    """Groups as DeepSpeed's ``RolloutBatch``: prompts padded on the left, responses on the right.

    The final EOS is in ``attention_mask`` also where it is the pad id. Raises :class:`RequestError`
    when a group failed or a prompt is longer than ``prompt_width``.
    """
    return _batch(pad_groups(groups, pad_token_id=pad_token_id, prompt_width=prompt_width, device=device))


@dataclass(frozen=True)
class ScoredTargets:
    """What DeepSpeed's on-policy losses take, with the log-probabilities of the rollout beside it."""

    tokens: ResponseTokenBatch
    """DeepSpeed's own: ``input_ids``, ``attention_mask`` ``[rows, width]``, and ``target_ids``,
    ``response_mask`` ``[rows, width - 1]``, shifted by one."""
    position_ids: torch.Tensor  # int64 [rows, width]
    logprobs: torch.Tensor  # float32 [rows, width - 1], aligned with target_ids; 0 off the response
    sampling_logprobs: torch.Tensor  # float32 [rows, width - 1]


def scored_targets(
    groups: Iterable[RolloutGroup],
    *,
    pad_token_id: int,
    prompt_width: int | None = None,
    device: torch.device | str = "cpu",
) -> ScoredTargets:
    """Groups as DeepSpeed's ``ResponseTokenBatch``, for ``generalized_jsd_loss`` and losses with a ratio.

    Raises :class:`RequestError` as :func:`rollout_batch` does.
    """
    padded = pad_groups(groups, pad_token_id=pad_token_id, prompt_width=prompt_width, device=device)
    before = padded.prompts.shape[1] - 1  # targets that are prompt tokens

    def aligned(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values, (before, 0))

    return ScoredTargets(
        tokens=ResponseTokenBatch.from_rollout(_batch(padded)),
        position_ids=padded.position_ids,
        logprobs=aligned(padded.logprobs),
        sampling_logprobs=aligned(padded.sampling_logprobs),
    )


def _batch(padded: PaddedBatch) -> RolloutBatch:
    return RolloutBatch(
        input_ids=padded.input_ids,
        attention_mask=padded.attention_mask,
        response_start_idx=padded.response_start,
    )
