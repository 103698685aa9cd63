"""Groups of samples as the batch that verl's trainers pass on: a ``DataProto``.

Needs verl, which brings its own pins of torch and Transformers. Written for verl 0.9.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from verl import DataProto

from rollout_pool.adapters.padded import PaddedBatch, Rewards, pad_groups
from rollout_pool.adapters.rollouts import LogprobKind, check_kind, require_complete
from rollout_pool.errors import RequestError
from rollout_pool.types import RolloutGroup

NUM_TURNS = 2
"""What verl counts for a prompt and one answer."""


def data_proto(
    groups: Iterable[RolloutGroup],
    *,
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
    rewards: Rewards | None = None,
    uids: Sequence[str] | None = None,
    logprobs: LogprobKind = "logprobs",
) -> DataProto:
    """One row per sample, with the keys and paddings of verl's own rollouts.

    Tensors: ``prompts`` ``[rows, prompt_length]``, padded on the left; ``responses``, ``response_mask``,
    ``rollout_log_probs`` ``[rows, response_length]``, padded on the right; ``input_ids``,
    ``attention_mask``, ``position_ids`` ``[rows, prompt_length + response_length]``; with ``rewards`` also
    ``rm_scores``, the reward on the last token of each response.

    Not tensors: ``uid``, one for each group, by which verl normalises advantages; ``__num_turns__``;
    ``min_global_steps`` and ``max_global_steps``, the weight versions that drew a sample;
    ``finish_reason``, ``request_id``, ``metadata``. ``meta_info`` has the ``temperature``, which verl's
    actor divides its logits by, when it is the same for all groups.

    Args:
        uids: one for each group; fresh ones by default.
        logprobs: which of a sample's log-probabilities ``rollout_log_probs`` holds.

    Raises :class:`RequestError` when a group failed, a sample has no token, or something is too long.
    """
    check_kind(logprobs)
    groups = require_complete(groups)
    if uids is not None and len(uids) != len(groups):
        raise RequestError(f"{len(uids)} uids for {len(groups)} groups")
    padded = pad_groups(
        groups,
        pad_token_id=pad_token_id,
        prompt_width=prompt_length,
        response_width=response_length,
        rewards=rewards,
    )
    return DataProto.from_dict(
        tensors=_tensors(padded, logprobs),
        non_tensors=_objects(groups, list(uids or (str(uuid.uuid4()) for _ in groups))),
        meta_info=_meta_info(groups),
    )


def _tensors(padded: PaddedBatch, logprobs: LogprobKind) -> dict[str, torch.Tensor]:
    tensors = {
        "prompts": padded.prompts,
        "responses": padded.responses,
        "response_mask": padded.response_mask,
        "input_ids": padded.input_ids,
        "attention_mask": padded.attention_mask,
        "position_ids": padded.position_ids,
        "rollout_log_probs": padded.logprobs if logprobs == "logprobs" else padded.sampling_logprobs,
    }
    if padded.rewards is not None:
        scores = torch.zeros_like(padded.logprobs)
        scores[torch.arange(padded.num_rows), padded.response_lengths - 1] = padded.rewards
        tensors["rm_scores"] = scores
    return tensors


def _objects(groups: list[RolloutGroup], uids: list[str]) -> dict[str, npt.NDArray[Any]]:
    rows = [(group, sample, uid) for group, uid in zip(groups, uids, strict=True) for sample in group.samples]
    return {
        "uid": _column([uid for _, _, uid in rows]),
        "__num_turns__": np.full(len(rows), NUM_TURNS, dtype=np.int32),
        "min_global_steps": _column([int(sample.token_versions.min()) for _, sample, _ in rows]),
        "max_global_steps": _column([int(sample.token_versions.max()) for _, sample, _ in rows]),
        "finish_reason": _column([sample.finish_reason for _, sample, _ in rows]),
        "request_id": _column([group.request_id for group, _, _ in rows]),
        "metadata": _column([group.metadata for group, _, _ in rows]),
    }


def _column(values: list[Any]) -> npt.NDArray[np.object_]:
    """An array of objects, one a row: NumPy by itself would make lists of one length a matrix."""
    column = np.empty(len(values), dtype=object)
    for number, value in enumerate(values):
        column[number] = value
    return column


def _meta_info(groups: list[RolloutGroup]) -> dict[str, Any]:
    temperatures = {group.sampling.temperature for group in groups if group.sampling is not None}
    return {"temperature": temperatures.pop()} if len(temperatures) == 1 else {}
