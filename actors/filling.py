"""Puts prompts into slots: computes each once, copies its KV to every sample, draws the first tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollout_pool.actors.rows import Generated, Rows
from rollout_pool.actors.running import Running, Seat
from rollout_pool.actors.scheduler import Admission
from rollout_pool.actors.seating import Seating
from rollout_pool.actors.stopping import StopWatch
from rollout_pool.actors.versions import VersionLog
from rollout_pool.actors.worker import UNSHARED, Draw, Worker
from rollout_pool.kernels import ops
from rollout_pool.types import Sample, SamplingParams, TokenIds

SINGLE = -1
"""Under this number the worker holds a sequence of one sample, for a moment."""


@dataclass
class Filler:
    """Fills the slots of one batch. With ``shares`` off a prompt is computed once per sample, to compare.

    ``watch`` makes what looks for stop strings in one sample's text.
    """

    worker: Worker
    rows: Rows
    seating: Seating
    watch: Callable[[SamplingParams], StopWatch | None]
    shares: bool
    versions: VersionLog = field(default_factory=VersionLog)
    num_prefills: int = 0
    tokens_computed: int = 0
    tokens_saved: int = 0
    tokens_reused: int = 0
    num_shared: int = 0

    def compute_ahead(self, groups: Sequence[Running]) -> None:
        """Groups that are about to be admitted: see :meth:`Worker.compute_ahead`."""
        if self.shares:
            new = [running.prompt for running in groups if not (running.is_held or running.past)]
            if len(new) > 1:
                self.worker.compute_ahead(new)

    def admit(self, running: Running, admission: Admission, start: float) -> None:
        """Prefill a group if it is new, expand its KV into the slots, draw their first tokens.

        start: when work on it began, in seconds of the clock.
        """
        slots = admission.slots
        numbers = running.order[admission.first : admission.first + len(slots)]
        seats = [self._seat(running, number, slot) for slot, number in zip(slots, numbers, strict=True)]
        keys = [ops.sample_key(*seat.draw_key) for seat in seats]
        self.rows.admit(slots, running.prompt, running.request.sampling, keys, list(running.stop_ids))
        self.seating.sit(seats)
        fresh = [place for place, seat in enumerate(seats) if seat.past is None]
        if running.state.is_shared:
            self.num_shared += admission.first == 0
            self._hold(running)  # for samples that are resumed, too
        self._prefill(running, [slots[at] for at in fresh], [admission.columns[at] for at in fresh])
        for seat, column in zip(seats, admission.columns, strict=True):
            if seat.past is not None:
                self._resume(seat, seat.past, column)
        running.stays.begin([(seat.sample_index, seat.slot) for seat in seats], start)
        if admission.is_last:
            self.drop(running)
            needed = len(running.order) * running.prompt.size
            self.tokens_saved += max(0, needed - running.prefill_tokens - running.reused_tokens)

    def count_on(self, before: Filler) -> None:
        """Take over what another filler of the same engine has counted."""
        self.versions, self.num_prefills = before.versions, before.num_prefills
        self.tokens_computed, self.tokens_saved = before.tokens_computed, before.tokens_saved
        self.tokens_reused, self.num_shared = before.tokens_reused, before.num_shared

    def drop(self, running: Running) -> None:
        """Nobody of this group waits for a slot any more: its prompt need not be held."""
        if running.is_held:
            running.is_held = False
            self.worker.drop(running.state.group_id)

    def recompute(self, groups: Iterable[Running], column_of: Callable[[int], int]) -> None:
        """Make the KV of held prompts and of all who sit anew, with the weights as they are now."""
        self.seating.settle()
        seats = list(self.seating.seats.values())
        sharing = {seat.running.state.group_id for seat in seats if seat.running.state.is_shared}
        for running in groups:
            group = running.state.group_id
            if running.is_held or group in sharing:
                self._compute(running, group, running.prompt)
            if not running.is_held and group in sharing:
                self.worker.drop(group)
        for seat, generated in zip(seats, self.seating.generated_by(seats), strict=True):
            drawn = generated.token_ids[:-1]  # the last one's KV is written by the next step
            self._compute(seat.running, SINGLE, np.concatenate((seat.running.prompt, drawn)))
            self.worker.refill(SINGLE, column_of(seat.slot), [seat.slot])
            self.worker.drop(SINGLE)

    def versions_of(self, seat: Seat, count: int) -> TokenIds:
        """Of the weights that drew each of a seat's ``count`` tokens: int64 ``[count]``."""
        past = seat.past.token_versions if seat.past is not None else np.zeros(0, dtype=np.int64)
        later = self.versions.of_steps(seat.first_step + past.size + 1, max(0, count - past.size - 1))
        return np.concatenate((past, [seat.first_version], later))[:count]

    def _seat(self, running: Running, number: int, slot: int) -> Seat:
        past = running.past.get(number)
        num_past = 0 if past is None else past.token_ids.size
        watch = self.watch(running.request.sampling)
        if watch is not None and past is not None:
            for token in past.token_ids.tolist():
                watch.push(token)
        first_step = self.seating.step - num_past
        return Seat(running, number, slot, first_step, self.versions.current, watch, past)

    def _prefill(self, running: Running, slots: Sequence[int], columns: Sequence[int]) -> None:
        if not slots:
            return
        group = running.state.group_id
        for part in [slots] if self.shares else [[slot] for slot in slots]:
            if not self.shares:
                running.is_held = False
            self._hold(running)
            self.worker.seat(group, columns[0], part, self._draw(part), _shared_by(running))

    def _hold(self, running: Running) -> None:
        """Compute the prompt of a group, unless the worker has it."""
        if not running.is_held:
            self._compute(running, running.state.group_id, running.prompt)
            running.is_held = True

    def _resume(self, seat: Seat, past: Sample, column: int) -> None:
        """Compute a prompt with what one of its samples had drawn, and draw on from there."""
        self.rows.resume(seat.slot, Generated(past.token_ids, past.logprobs, past.sampling_logprobs))
        self._compute(seat.running, SINGLE, np.concatenate((seat.running.prompt, past.token_ids)))
        shared = _shared_by(seat.running)
        self.worker.seat(SINGLE, column, [seat.slot], self._draw([seat.slot]), shared)
        self.worker.drop(SINGLE)

    def _compute(self, running: Running, number: int, tokens: TokenIds) -> None:
        num_reused = self.worker.prefill(number, tokens)
        running.prefill_tokens += tokens.size - num_reused
        running.reused_tokens += num_reused
        self.num_prefills += num_reused < tokens.size
        self.tokens_computed += tokens.size - num_reused
        self.tokens_reused += num_reused

    def _draw(self, slots: Sequence[int]) -> Draw:
        return self.rows.drawing(ops.upload(slots, self.rows.device), self.rows.kind())


def _shared_by(running: Running) -> int:
    """The number of the prompt that this group's rows share."""
    return running.state.group_id if running.state.is_shared else UNSHARED
