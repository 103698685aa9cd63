"""The state of every slot but its KV, as tensors: one line per slot, no Python per row and step.

Everything that must move with a row in a compaction is here or in the slot cache: position, last
token, random key, sampling parameters, the tokens seen (for the repetition penalty) and what has been
generated so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollout_pool.kernels import ops
from rollout_pool.types import Logprobs, SamplingParams, TokenIds


@dataclass(frozen=True, slots=True)
class Generated:
    """What one slot has generated: all three ``[new tokens]``."""

    token_ids: TokenIds
    logprobs: Logprobs
    sampling_logprobs: Logprobs


class Rows:
    """Per-slot tensors. A slot that is not live keeps harmless values: position 0, no noise, no end."""

    def __init__(self, num_slots: int, max_length: int, vocab_size: int, device: torch.device) -> None:
        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(num_slots, *shape, device=device)

        self.device = device
        self.live = ints()
        self.position = ints()  # column of the next write
        self.last_token = ints()
        self.count = ints()  # new tokens so far
        self.budget, self.min_new, self.top_k = ints(), ints(), ints()
        self.temperature, self.top_p, self.min_p, self.penalty = floats(), floats(), floats(), floats()
        self.keys = ints(2, dtype=torch.int32)
        self.stop_ids = ints(1) - 1  # [slots, widest list]; -1 is no id
        self.seen: torch.Tensor | None = None  # bool [slots, vocab], made when first needed
        self.tokens = ints(max_length)
        self.logprobs, self.sampling_logprobs = floats(max_length), floats(max_length)
        self._vocab = ops.vocabulary_hash(vocab_size, device)
        self._params: dict[int, SamplingParams] = {}  # of live slots

    def admit(
        self,
        slots: Sequence[int],
        prompt: torch.Tensor,
        params: SamplingParams,
        keys: Sequence[tuple[int, int]],
        stop_ids: Sequence[int],
    ) -> None:
        """Put samples of one prompt into ``slots``; each has its own random key."""
        at = ops.rows_of(slots, self.device)
        for column, value in (
            (self.live, 1),
            (self.position, prompt.shape[0]),
            (self.count, 0),
            (self.budget, params.max_new_tokens),
            (self.min_new, params.min_new_tokens),
            (self.top_k, params.top_k or 0),
            (self.temperature, params.temperature),
            (self.top_p, params.top_p),
            (self.min_p, params.min_p),
            (self.penalty, params.repetition_penalty),
        ):
            column[at] = value
        self.keys[at] = torch.tensor(keys, dtype=torch.int32, device=self.device)
        self._set_stop_ids(at, stop_ids)
        self._params.update(dict.fromkeys(slots, params))
        if params.repetition_penalty != 1.0 and self.seen is None:
            shape = (self.live.shape[0], self._vocab.shape[0])
            self.seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        if self.seen is not None:
            self.seen[at] = False
            if params.repetition_penalty != 1.0:
                self.seen[at.unsqueeze(1), prompt.unsqueeze(0)] = True

    def sample(self, logits: torch.Tensor, slots: torch.Tensor | slice) -> list[int]:
        """Draw the next token of ``slots`` from ``logits`` (``[rows, vocab]``, overwritten).

        Returns the places within ``slots`` of the rows that ended: by a stop id, by their budget, or
        because their logits are not finite. One read-back from the device.
        """
        count = self.count[slots]
        stop_ids, live = self.stop_ids[slots], self.live[slots]
        blocked = torch.where((count < self.min_new[slots]).unsqueeze(1), stop_ids, -1)
        tokens, logprobs, sampling = ops.sample_tokens(
            logits, self._sampling_rows(slots, count, blocked), self._vocab
        )
        numbers = torch.arange(self.live.shape[0], device=self.device)[slots]
        self.tokens[numbers, count] = tokens
        self.logprobs[numbers, count] = logprobs
        self.sampling_logprobs[numbers, count] = sampling
        if self.seen is not None:
            self.seen[numbers, tokens] = True
        self.last_token[slots] = tokens
        self.count[slots] = count = count + live
        ended = (
            (tokens.unsqueeze(1) == stop_ids).any(dim=1) | (count >= self.budget[slots]) | logprobs.isnan()
        )
        return ended.logical_and_(live > 0).nonzero().flatten().tolist()

    def advance(self, num_rows: int) -> None:
        """The first ``num_rows`` rows wrote one more cell."""
        self.position[:num_rows] += self.live[:num_rows]

    def read(self, slot: int, count: int | None = None) -> Generated:
        """What ``slot`` has generated, or its first ``count`` tokens."""
        size = int(self.count[slot]) if count is None else count

        def take(column: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
            values: np.ndarray[tuple[int], np.dtype[np.generic]] = column[slot, :size].cpu().numpy().copy()
            return values

        return Generated(
            take(self.tokens).astype(np.int64),
            take(self.logprobs).astype(np.float32),
            take(self.sampling_logprobs).astype(np.float32),
        )

    def release(self, slots: Sequence[int]) -> None:
        """These slots are free: they stop counting, and what they compute is not used."""
        at = ops.rows_of(slots, self.device)
        for column in (self.live, self.position, self.count, self.last_token):
            column[at] = 0
        self.temperature[at] = 0.0
        self.stop_ids[at] = -1
        for slot in slots:
            del self._params[slot]

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move rows (source, target); sources are free afterwards."""
        source = ops.rows_of([pair[0] for pair in moves], self.device)
        target = ops.rows_of([pair[1] for pair in moves], self.device)
        ops.move_rows(self._columns(), source, target)
        params = [self._params[pair[0]] for pair in moves]
        self._params.update(zip((pair[1] for pair in moves), params, strict=True))
        self.release([pair[0] for pair in moves])

    def _columns(self) -> list[torch.Tensor]:
        return [
            value
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor) and name != "_vocab"
        ]

    def _set_stop_ids(self, at: torch.Tensor, stop_ids: Sequence[int]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = torch.nn.functional.pad(self.stop_ids, (0, missing), value=-1)
        self.stop_ids[at] = -1
        if stop_ids:
            self.stop_ids[at, : len(stop_ids)] = torch.tensor(stop_ids, device=self.device)

    def _sampling_rows(
        self, slots: torch.Tensor | slice, count: torch.Tensor, blocked: torch.Tensor
    ) -> ops.SamplingRows:
        params = self._params.values()
        return ops.SamplingRows(
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
            penalty=self.penalty[slots],
            keys=ops.position_keys(self.keys[slots], count),
            blocked=blocked,
            seen=None if self.seen is None else self.seen[slots],
            adjusted=any(p.repetition_penalty != 1.0 or p.min_new_tokens > 0 for p in params),
            filtered=any(p.top_k is not None or p.top_p < 1 or p.min_p > 0 for p in params),
            sampled=any(p.temperature > 0 for p in params),
        )
