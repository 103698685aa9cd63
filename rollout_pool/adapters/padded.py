"""Groups of samples as plain padded tensors.

Masks come from lengths, never from token ids: a prompt may hold the pad id, and where pad and EOS are
one id the final EOS is still a token to learn from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from rollout_pool.errors import RequestError
from rollout_pool.types import RolloutGroup, Sample

PromptSide = Literal["left", "right"]
Rewards = Sequence[Sequence[float]] | Callable[[RolloutGroup, Sample], float]


@dataclass(frozen=True)
class PaddedBatch:
    """One row per sample, groups and samples in the order in which they came.

    A row of ``input_ids`` is, with the prompt padded on the left, ``[pad.. prompt | response pad..]``:
    all responses start in column ``prompt_width``. Padded on the right it is ``[prompt response pad..]``,
    without a gap. Both are ``prompt_width + response_width`` columns wide.
    """

    input_ids: torch.Tensor  # int64 [rows, prompt_width + response_width]
    attention_mask: torch.Tensor  # int64, the same shape: 1 on tokens, 0 on padding
    position_ids: torch.Tensor  # int64, the same shape: counts tokens from 0; padding repeats its neighbour's
    prompts: torch.Tensor  # int64 [rows, prompt_width], padded on the side asked for
    responses: torch.Tensor  # int64 [rows, response_width], padded on the right
    response_mask: torch.Tensor  # int64 [rows, response_width]: 1 on tokens, the final EOS included
    logprobs: torch.Tensor  # float32 [rows, response_width]: ``Sample.logprobs``, 0 on padding
    sampling_logprobs: torch.Tensor  # float32 [rows, response_width]
    prompt_lengths: torch.Tensor  # int64 [rows]
    response_lengths: torch.Tensor  # int64 [rows]; 0 for a sample that was aborted before its first token
    response_start: torch.Tensor  # int64 [rows]: the column of the first response token
    group: torch.Tensor  # int64 [rows]: place of the row's group in the list that was given
    sample_index: torch.Tensor  # int64 [rows]
    rewards: torch.Tensor | None  # float32 [rows]

    @property
    def num_rows(self) -> int:
        """Samples in the batch."""
        return self.input_ids.shape[0]

    def at_predictors(self, values: torch.Tensor) -> torch.Tensor:
        """What a model says where it predicts each response token: ``[rows, response_width, ...]``.

        values: ``[rows, prompt_width + response_width, ...]``, the logits of ``input_ids``, say. The
        token in column c is predicted in column c - 1. Padding gets some column's finite value.
        """
        offsets = torch.arange(self.responses.shape[1], device=values.device)
        columns = self.response_start.to(values.device).unsqueeze(1) + offsets - 1
        rows = torch.arange(self.num_rows, device=values.device).unsqueeze(1)
        return values[rows, columns.clamp(0, values.shape[1] - 1)]


def pad_groups(
    groups: Iterable[RolloutGroup],
    *,
    pad_token_id: int,
    prompt_side: PromptSide = "left",
    prompt_width: int | None = None,
    response_width: int | None = None,
    rewards: Rewards | None = None,
    skip_failed: bool = False,
    device: torch.device | str = "cpu",
) -> PaddedBatch:
    """Pad the samples of ``groups`` to one batch.

    Args:
        pad_token_id: what padding holds; any id, the EOS id as well.
        prompt_side: where prompts are padded; responses are padded on the right.
        prompt_width, response_width: columns; by default those of the longest.
        rewards: for each group the rewards of its samples, or a function of a group and a sample.
        skip_failed: leave groups with an ``error`` out instead of raising.

    Raises:
        RequestError: a group failed, nothing is there to pad, something is longer than the width
            given, or the rewards do not fit the samples.
    """
    if prompt_side not in ("left", "right"):
        raise RequestError(f"prompt_side must be 'left' or 'right', got {prompt_side!r}")
    rows = _rows(list(groups), skip_failed)
    prompt_sizes = [row.group.prompt_token_ids.size for row in rows]
    response_sizes = [row.sample.token_ids.size for row in rows]
    prompt_width = _width("prompt", rows, prompt_sizes, prompt_width)
    response_width = _width("response", rows, response_sizes, response_width)
    scores = None if rewards is None else _scores(rows, rewards)

    fill = _Fill(len(rows), pad_token_id)
    prompts, prompt_mask = fill.ids(prompt_width)
    responses, response_mask = fill.ids(response_width)
    input_ids, attention_mask = fill.ids(prompt_width + response_width)
    logprobs, sampling_logprobs = fill.zeros(response_width), fill.zeros(response_width)
    starts = np.full(len(rows), prompt_width, dtype=np.int64)
    for number, (row, left, right) in enumerate(zip(rows, prompt_sizes, response_sizes, strict=True)):
        first = prompt_width - left if prompt_side == "left" else 0
        starts[number] = middle = first + left
        for ids, mask in ((prompts, prompt_mask), (input_ids, attention_mask)):
            ids[number, first:middle] = row.group.prompt_token_ids
            mask[number, first:middle] = 1
        for ids, mask, column in ((responses, response_mask, 0), (input_ids, attention_mask, middle)):
            ids[number, column : column + right] = row.sample.token_ids
            mask[number, column : column + right] = 1
        logprobs[number, :right] = row.sample.logprobs
        sampling_logprobs[number, :right] = row.sample.sampling_logprobs

    def on_device(array: npt.ArrayLike) -> torch.Tensor:
        return torch.as_tensor(array).to(device)

    return PaddedBatch(
        input_ids=on_device(input_ids),
        attention_mask=on_device(attention_mask),
        position_ids=on_device(np.maximum(attention_mask.cumsum(axis=1) - 1, 0)),
        prompts=on_device(prompts),
        responses=on_device(responses),
        response_mask=on_device(response_mask),
        logprobs=on_device(logprobs),
        sampling_logprobs=on_device(sampling_logprobs),
        prompt_lengths=on_device(np.array(prompt_sizes, dtype=np.int64)),
        response_lengths=on_device(np.array(response_sizes, dtype=np.int64)),
        response_start=on_device(starts),
        group=on_device(np.array([row.place for row in rows], dtype=np.int64)),
        sample_index=on_device(np.array([row.sample.sample_index for row in rows], dtype=np.int64)),
        rewards=None if scores is None else on_device(np.array(scores, dtype=np.float32)),
    )


@dataclass(frozen=True)
class _Row:
    """One sample, its group, and the places of both."""

    group: RolloutGroup
    sample: Sample
    place: int
    number: int

    def __str__(self) -> str:
        return f"request {self.group.request_id!r}, sample {self.sample.sample_index}"


@dataclass(frozen=True)
class _Fill:
    """Arrays of one number of rows, before anything is written into them."""

    num_rows: int
    pad_token_id: int

    def ids(self, width: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        shape = (self.num_rows, width)
        return np.full(shape, self.pad_token_id, dtype=np.int64), np.zeros(shape, dtype=np.int64)

    def zeros(self, width: int) -> npt.NDArray[np.float32]:
        return np.zeros((self.num_rows, width), dtype=np.float32)


def _rows(groups: list[RolloutGroup], skip_failed: bool) -> list[_Row]:
    failed = [group for group in groups if group.error is not None]
    if failed and not skip_failed:
        raise RequestError(
            f"{len(failed)} of {len(groups)} groups failed, first {failed[0].error}; "
            "skip_failed=True leaves them out"
        )
    rows = [
        _Row(group, sample, place, number)
        for place, group in enumerate(groups)
        if group.error is None
        for number, sample in enumerate(group.samples)
    ]
    if not rows:
        raise RequestError(f"no samples to pad in {len(groups)} groups")
    return rows


def _width(name: str, rows: list[_Row], sizes: list[int], wanted: int | None) -> int:
    longest = max(sizes)
    if wanted is None:
        return longest
    if longest > wanted:
        row = rows[sizes.index(longest)]
        raise RequestError(f"{row}: the {name} has {longest} tokens, {name}_width is {wanted}")
    return wanted


def _scores(rows: list[_Row], rewards: Any) -> list[float]:
    if callable(rewards):
        return [float(rewards(row.group, row.sample)) for row in rows]
    for row in rows:
        if row.place >= len(rewards) or len(rewards[row.place]) != len(row.group.samples):
            given = len(rewards[row.place]) if row.place < len(rewards) else "no"
            raise RequestError(
                f"request {row.group.request_id!r}: {len(row.group.samples)} samples and {given} rewards; "
                "give one list for each group, with one reward for each sample"
            )
    return [float(rewards[row.place][row.number]) for row in rows]
