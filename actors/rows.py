"""What every slot is drawing, as tensors: one line per slot, no Python per row and step.

Random key, sampling parameters, the tokens seen (for the repetition penalty) and what has been
generated so far: all that must move with a row in a compaction, besides what the worker holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from rollout_pool.actors.readback import HostArray
from rollout_pool.kernels import ops
from rollout_pool.types import Logprobs, SamplingParams, TokenIds

ENDED, BROKEN = 1, 2

STOP_WIDTH = 8
"""Stop ids per row that there is room for from the start; a wider list makes recorded steps void."""

DrawKind = tuple[bool, bool, bool]
"""What some row needs of a draw: penalties or blocked ids, filters, noise."""
SAMPLED: DrawKind = (False, False, True)


@dataclass(frozen=True, slots=True)
class Generated:
    """What one slot has generated: all three ``[new tokens]``."""

    token_ids: TokenIds
    logprobs: Logprobs
    sampling_logprobs: Logprobs

    @property
    def is_broken(self) -> bool:
        """Whether the last token was none to draw: the logits were not finite, or ruled out every token."""
        return self.logprobs.size > 0 and bool(np.isnan(self.logprobs[-1]))

    def without_last(self) -> Generated:
        """Without the last token."""
        return Generated(self.token_ids[:-1], self.logprobs[:-1], self.sampling_logprobs[:-1])

    @classmethod
    def unpack(cls, row: HostArray, count: int | None = None) -> Generated:
        """From a row of :meth:`Rows.results`; ``count`` is how many tokens count, by default all."""
        size = int(row[0]) if count is None else count
        tokens, logprobs, sampling = row[1:].reshape(3, -1)[:, :size]
        return cls(
            tokens.astype(np.int64),
            logprobs.copy().view(np.float32),
            sampling.copy().view(np.float32),
        )


@dataclass(frozen=True, slots=True)
class Look:
    """The state of all slots at some step, in host memory."""

    ended: HostArray
    """``[slots]``: 0, ENDED, or BROKEN when there was no token to draw: see :meth:`Rows.draw`."""
    counts: HostArray
    last_tokens: HostArray
    drawn: int
    """Tokens drawn since the start."""

    @classmethod
    def unpack(cls, table: HostArray) -> Look:
        """From :meth:`Rows.look`."""
        ended, counts, last_tokens = table[:-1].reshape(3, -1)
        return cls(ended, counts, last_tokens, int(table[-1]))


class Rows:
    """Per-slot tensors. A slot that is not live keeps harmless values: no noise, no end."""

    def __init__(self, num_slots: int, max_length: int, vocab_size: int, device: torch.device) -> None:
        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(num_slots, *shape, device=device)

        self.device = device
        self.live, self.ended = ints(), ints()
        self.last_token = ints()
        self.count = ints()  # new tokens so far
        self.budget, self.min_new, self.top_k = ints(), ints(), ints()
        self.temperature, self.top_p, self.min_p, self.penalty = floats(), floats(), floats(), floats()
        self.keys = ints(2, dtype=torch.int32)
        self.stop_ids = ints(STOP_WIDTH) - 1  # [slots, widest list]; -1 is no id
        self.seen: torch.Tensor | None = None  # bool [slots, vocab], made when first needed
        self.tokens = ints(max_length, dtype=torch.int32)
        self.logprobs, self.sampling_logprobs = floats(max_length), floats(max_length)
        self._drawn = torch.zeros(1, dtype=torch.int64, device=device)
        self._numbers = torch.arange(num_slots, device=device)
        self._vocab = ops.vocabulary_hash(vocab_size, device)
        self._params: dict[int, SamplingParams] = {}  # of live slots

    def admit(
        self,
        slots: Sequence[int],
        prompt: TokenIds,
        params: SamplingParams,
        keys: Sequence[tuple[int, int]],
        stop_ids: Sequence[int],
    ) -> None:
        """Put samples of one prompt into ``slots``; each has its own random key."""
        at = ops.upload(slots, self.device)
        for column, value in (
            (self.live, 1),
            (self.ended, 0),
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
        self.keys[at] = ops.upload(keys, self.device, torch.int32)
        self._set_stop_ids(at, stop_ids)
        self._params.update(dict.fromkeys(slots, params))
        if params.repetition_penalty != 1.0 and self.seen is None:
            shape = (self.live.shape[0], self._vocab.shape[0])
            self.seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        if self.seen is not None:
            self.seen[at] = False
            if params.repetition_penalty != 1.0:
                ids = ops.upload(prompt, self.device)
                self.seen[at.unsqueeze(1), ids.unsqueeze(0)] = True

    def resume(self, slot: int, past: Generated) -> None:
        """The sample that was just admitted to ``slot`` has generated this before."""
        size = past.token_ids.size
        self.count[slot] = size
        for column, values in (
            (self.tokens, past.token_ids),
            (self.logprobs, past.logprobs),
            (self.sampling_logprobs, past.sampling_logprobs),
        ):
            column[slot, :size] = ops.upload(values, self.device, column.dtype)
        if self.seen is not None and self._params[slot].repetition_penalty != 1.0:
            self.seen[slot, ops.upload(past.token_ids, self.device)] = True

    def draw(self, logits: torch.Tensor, slots: torch.Tensor | slice, kind: DrawKind) -> torch.Tensor:
        """Draw the next token of ``slots`` from ``logits`` (float32 ``[rows, vocab]``, overwritten).

        kind: at least what :meth:`kind` says.
        Returns int64 ``[2, rows]``: the tokens, and whether each row goes on. A row ends by a stop id, by
        its budget, or because its logits are not finite or leave no token to draw: that token then has nan
        as its log-probability. What a row draws after its end does not count.
        """
        count, live = self.count[slots], self.live[slots]
        stop_ids = self.stop_ids[slots]
        blocked = torch.where((count < self.min_new[slots]).unsqueeze(1), stop_ids, -1)
        tokens, logprobs, sampling = ops.sample_tokens(
            logits, self._sampling_rows(slots, count, blocked, kind), self._vocab
        )
        broken = ~(logprobs + sampling).isfinite()
        logprobs = logprobs.masked_fill(broken, float("nan"))
        numbers = self._numbers[slots]
        self.tokens[numbers, count] = tokens.to(torch.int32)
        self.logprobs[numbers, count] = logprobs
        self.sampling_logprobs[numbers, count] = sampling
        if self.seen is not None:
            self.seen[numbers, tokens] = True
        count = count + live
        over = (tokens.unsqueeze(1) == stop_ids).any(dim=1) | (count >= self.budget[slots]) | broken
        self._drawn += live.sum()
        self.last_token[slots], self.count[slots] = tokens, count
        self.ended[slots] += live * (over * ENDED + broken * (BROKEN - ENDED))
        self.live[slots] = live = live * ~over
        return torch.stack((tokens, live))

    def drawing(self, slots: torch.Tensor | slice, kind: DrawKind) -> Callable[[torch.Tensor], torch.Tensor]:
        """:meth:`draw` for these slots: from logits to tokens and who goes on."""
        return partial(self.draw, slots=slots, kind=kind)

    def look(self) -> torch.Tensor:
        """How far all slots are, as :class:`Look` unpacks it: int64 ``[3 * slots + 1]``, fresh."""
        return torch.cat((self.ended, self.count, self.last_token, self._drawn))

    def results(self, slots: Sequence[int], width: int) -> torch.Tensor:
        """What ``slots`` have generated, at most ``width`` tokens: int32 ``[slots, 1 + 3 * width]``, fresh.

        A row holds the number of tokens, then tokens and the bits of both log-probabilities.
        """
        at = ops.upload(slots, self.device)
        return torch.cat(
            (
                self.count[at].unsqueeze(1).to(torch.int32),
                self.tokens[at, :width],
                self.logprobs[at, :width].view(torch.int32),
                self.sampling_logprobs[at, :width].view(torch.int32),
            ),
            dim=1,
        )

    def release(self, slots: Sequence[int]) -> None:
        """These slots are free: they stop counting, and what they compute is not used."""
        at = ops.upload(slots, self.device)
        for column in (self.live, self.ended, self.count, self.last_token):
            column[at] = 0
        self.temperature[at] = 0.0
        self.stop_ids[at] = -1
        for slot in slots:
            del self._params[slot]

    def count_on(self, before: Rows) -> None:
        """Count drawn tokens on from where other rows of the same engine ended."""
        self._drawn += before._drawn

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move rows (source, target); sources are free afterwards."""
        source, target = (ops.upload(side, self.device) for side in zip(*moves, strict=True))
        ops.move_rows(self._columns(), source, target)
        params = [self._params[pair[0]] for pair in moves]
        self._params.update(zip((pair[1] for pair in moves), params, strict=True))
        self.release([pair[0] for pair in moves])

    def kind(self) -> DrawKind:
        """What the next draw has to do."""
        params = self._params.values()
        return (
            any(p.repetition_penalty != 1.0 or p.min_new_tokens > 0 for p in params),
            any(p.top_k is not None or p.top_p < 1 or p.min_p > 0 for p in params),
            any(p.temperature > 0 for p in params),
        )

    def state(self) -> list[torch.Tensor]:
        """Every tensor that a draw reads or writes."""
        return [*self._columns(), self._drawn]

    def _columns(self) -> list[torch.Tensor]:
        return [
            value
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor) and not name.startswith("_")
        ]

    def _set_stop_ids(self, at: torch.Tensor, stop_ids: Sequence[int]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = torch.nn.functional.pad(self.stop_ids, (0, missing), value=-1)
        self.stop_ids[at] = -1
        if stop_ids:
            self.stop_ids[at, : len(stop_ids)] = ops.upload(stop_ids, self.device)

    def _sampling_rows(
        self,
        slots: torch.Tensor | slice,
        count: torch.Tensor,
        blocked: torch.Tensor,
        kind: DrawKind,
    ) -> ops.SamplingRows:
        adjusted, filtered, sampled = kind
        return ops.SamplingRows(
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
            penalty=self.penalty[slots],
            keys=ops.position_keys(self.keys[slots], count),
            blocked=blocked,
            seen=None if self.seen is None else self.seen[slots],
            adjusted=adjusted,
            filtered=filtered,
            sampled=sampled,
        )
