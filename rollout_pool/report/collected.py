"""The samples of a run as columns: what the page counts, and the texts that it can show."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_pool.records import Record
from rollout_pool.results import read_records
from rollout_pool.types import RolloutGroup

FINISH_REASONS = ("stop", "length", "aborted", "error", "failed")
"""The last one stands for a group without samples."""
MAX_METADATA = 2_000
"""Characters of a group's metadata that are shown."""
NO_LOGPROB = 65_535
"""Stands for a log-probability that is not finite. Others are thousandths of a nat below zero."""


class Collected:
    """Everything in one output.

    max_samples: of so many at most the texts are kept, of whole groups evenly over the prompts; lengths,
    reasons, rewards and likelihoods are kept of all.
    """

    def __init__(self, path: Path, max_samples: int) -> None:
        self.num_groups = self.num_failed = self.num_tokens = self.num_samples = 0
        self.prompt_tokens_needed: dict[int, int] = {}
        """By group: prompt tokens that its samples would take without sharing."""
        self.columns: dict[str, list[Any]] = {
            name: [] for name in ("group", "sample", "length", "finish", "reward", "logprob")
        }
        self.groups: dict[int, dict[str, Any]] = {}
        """By index: prompt, metadata, error and texts of the groups that are kept."""
        self._ids: dict[int, list[npt.NDArray[np.int64]]] = {}
        self._logprobs: dict[int, list[npt.NDArray[np.uint16]]] = {}
        self._stride, self._num_kept, self._max_samples = 1, 0, max_samples
        for record, group in read_records(path, may_grow=True):
            self._add(record, group)

    @property
    def is_thinned(self) -> bool:
        """Whether some texts were left out."""
        return self._stride > 1

    def tokens(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint16]]:
        """Ids and packed log-probabilities of all samples that are kept, group after group."""
        ids = [sample for index in self.groups for sample in self._ids[index]]
        logprobs = [sample for index in self.groups for sample in self._logprobs[index]]
        if not ids:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint16)
        return np.concatenate(ids), np.concatenate(logprobs)

    def _add(self, record: Record, group: RolloutGroup) -> None:
        self.num_groups += 1
        self.num_samples += len(group.samples)
        self.prompt_tokens_needed[group.index] = group.prompt_token_ids.size * len(group.samples)
        for sample, raw in zip(group.samples, record["samples"], strict=True):
            self.num_tokens += sample.token_ids.size
            finish = FINISH_REASONS.index(sample.finish_reason)
            mean = float(sample.logprobs.mean()) if sample.logprobs.size else math.nan
            self._row(group.index, sample.sample_index, sample.token_ids.size, finish, _reward(raw), mean)
        if group.error is not None:
            self.num_failed += 1
        if not group.samples:
            self._row(group.index, -1, 0, FINISH_REASONS.index("failed"), None, math.nan)
        if group.index % self._stride == 0:
            self._keep(record, group)

    def _row(
        self, group: int, sample: int, length: int, finish: int, reward: float | None, logprob: float
    ) -> None:
        mean = round(logprob, 4) if math.isfinite(logprob) else None
        for column, value in zip(
            self.columns.values(), (group, sample, length, finish, reward, mean), strict=True
        ):
            column.append(value)

    def _keep(self, record: Record, group: RolloutGroup) -> None:
        metadata = None if group.metadata is None else json.dumps(group.metadata, ensure_ascii=False)
        self.groups[group.index] = {
            "index": group.index,
            "prompt": record["prompt"] if record["prompt"] is not None else group.prompt_token_ids.tolist(),
            "metadata": metadata and metadata[:MAX_METADATA],
            "error": group.error,
            "prompt_tokens": group.prompt_token_ids.size,
            "texts": [sample.text for sample in group.samples],
        }
        self._ids[group.index] = [sample.token_ids for sample in group.samples]
        self._logprobs[group.index] = [_packed(sample.logprobs) for sample in group.samples]
        self._num_kept += len(group.samples)
        while self._num_kept > self._max_samples and len(self.groups) > 1:
            self._stride *= 2
            for index in [index for index in self.groups if index % self._stride]:
                self._num_kept -= len(self._ids[index])
                del self.groups[index], self._ids[index], self._logprobs[index]


def _packed(logprobs: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    milli = np.clip(np.nan_to_num(-logprobs * 1000.0, nan=0.0, posinf=0.0), 0, NO_LOGPROB - 1)
    return np.where(np.isfinite(logprobs), np.rint(milli), NO_LOGPROB).astype(np.uint16)


def _reward(sample: Record) -> float | None:
    """What a verifier has written into the sample's record, if anything."""
    reward = sample.get("reward")
    if not isinstance(reward, (int, float)) or not math.isfinite(reward):
        return None
    return round(float(reward), 6)
