"""The rows of one engine, step by step: admit, trim, compact, decode, retire, refill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic

import numpy as np
import torch

from rollout_pool.actors import assembly
from rollout_pool.actors.graphs import Recorder
from rollout_pool.actors.rank_group import RankGroup
from rollout_pool.actors.rows import SAMPLED, Generated, Rows
from rollout_pool.actors.running import Running, Seat
from rollout_pool.actors.scheduler import Admission
from rollout_pool.actors.seating import Seating
from rollout_pool.actors.served_model import ServedModel
from rollout_pool.actors.stopping import StopWatch
from rollout_pool.actors.versions import VersionLog
from rollout_pool.actors.worker import Draw
from rollout_pool.config import EngineConfig
from rollout_pool.kernels import ops
from rollout_pool.types import EngineStats, Sample, SamplingParams, TokenIds

SINGLE = -1
"""Under this number the worker holds a sequence of one sample, for a moment."""

OnSample = Callable[[Seat, Generated, bool], None]


class Batch:
    """All rows of one model, at most ``config.num_slots`` of them at a time.

    Args:
        group: rank 0's end of a tensor-parallel group, or None.
        watch: makes what looks for stop strings in one sample's text.
        on_sample: gets every seat whose sample is over, what it generated, and whether it was aborted.
    """

    def __init__(
        self,
        served: ServedModel,
        config: EngineConfig,
        group: RankGroup | None,
        watch: Callable[[SamplingParams], StopWatch | None],
        on_sample: OnSample,
    ) -> None:
        self.config = config
        self._runner = served.runner
        device = self._runner.device
        self.worker = assembly.worker_for(served, config, group)
        self.rows = Rows(config.num_slots, config.max_length, self._runner.vocab_size, device)
        self.scheduler = assembly.scheduler_for(config, self._runner)
        look_every = assembly.look_every_for(config, device)
        self.seating = Seating(self.rows, self.worker, look_every, self._free, on_sample)
        self._watch = watch
        self.versions = VersionLog()
        self._groups: dict[int, Running] = {}
        self._bytes_per_token = served.memory_plan.bytes_per_token
        kv_bytes = sum(tensor.nbytes for tensor in self.worker.cache.tensors())
        self._stats = EngineStats(num_slots=config.num_slots, kv_bytes=kv_bytes)
        self._record_steps(assembly.recorder_for(config, device, group))

    def stats(self) -> EngineStats:
        """What rows, prefills and steps count; requests are counted elsewhere."""
        waiting = self.scheduler.num_waiting
        return replace(
            self._stats,
            waiting_groups=waiting,
            running_groups=len(self._groups) - waiting,
            live_rows=self.scheduler.num_live,
            new_tokens=self.seating.num_drawn,
            waiting_samples=self.scheduler.num_waiting_samples,
        )

    def versions_of(self, seat: Seat, count: int) -> TokenIds:
        """Of the weights that drew each of a seat's ``count`` tokens: int64 ``[count]``."""
        past = seat.past.token_versions if seat.past is not None else np.zeros(0, dtype=np.int64)
        later = self.versions.of_steps(seat.first_step + past.size + 1, max(0, count - past.size - 1))
        return np.concatenate((past, [seat.first_version], later))[:count]

    def add(self, running: Running) -> None:
        """Queue a group."""
        self._groups[running.state.group_id] = running
        self.scheduler.add(running.state)

    def forget(self, running: Running) -> None:
        """All samples of this group are over and have arrived."""
        del self._groups[running.state.group_id]

    def settle(self) -> None:
        """Wait until every sample that is over has arrived."""
        with self._runner.session():
            self.seating.settle()

    def remove(self, running: Running) -> None:
        """End a group where it is; samples that have begun arrive with what they have, as aborted."""
        with self._runner.session():
            self.seating.retire(self.seating.of(running), aborted=True)
            self.scheduler.cancel(running.state)
            if running.is_held:
                self.worker.drop(running.state.group_id)
            self.seating.settle()
        self.forget(running)

    def advance(self) -> None:
        """One step: fill free slots, decode one token per row, learn which rows have ended."""
        with self._runner.session():
            self._fill_slots()
            if not self.seating.has_rows_to_decode:
                self.seating.wait()
                return
            has_waited = self._trim()
            if self.seating.has_rows_to_decode:
                self._compact()
                self._decode()
                if has_waited:
                    self.seating.deliver_ready()
                else:
                    self.seating.deliver()

    def sleep(self) -> None:
        """Give the memory of the slots back. No group may be running."""
        with self._runner.session():
            self.worker.sleep()

    def wake(self) -> None:
        """Take it again."""
        with self._runner.session():
            self.worker.wake()

    def close(self) -> None:
        """Let the other ranks of the group end."""
        self.worker.close()

    # Prompts

    def _fill_slots(self) -> None:
        """Admit as long as slots are free; those of samples that ended with their first token are again."""
        while self._admit_all():
            self.seating.look()
            self.seating.deliver_ready()

    def _admit_all(self) -> bool:
        is_any = False
        while (admission := self.scheduler.admit()) is not None:
            self._admit(admission)
            is_any = True
        return is_any

    def _admit(self, admission: Admission) -> None:
        """Prefill a group if it is new, expand its KV into the slots, draw their first tokens."""
        running, slots = self._groups[admission.group.group_id], admission.slots
        params = running.request.sampling
        running.started = running.started or monotonic()
        numbers = running.order[admission.first : admission.first + len(slots)]
        seats = [self._seat(running, number, slot) for slot, number in zip(slots, numbers, strict=True)]
        keys = [ops.sample_key(*seat.draw_key) for seat in seats]
        self.rows.admit(slots, running.prompt, params, keys, list(running.stop_ids))
        self.seating.sit(seats)
        fresh = [place for place, seat in enumerate(seats) if seat.past is None]
        self._prefill(running, [slots[at] for at in fresh], [admission.columns[at] for at in fresh])
        for seat, column in zip(seats, admission.columns, strict=True):
            if seat.past is not None:
                self._resume(seat, seat.past, column)
        if admission.is_last:
            if running.is_held:
                running.is_held = False
                self.worker.drop(admission.group.group_id)
            needed = len(running.order) * running.prompt.size
            self._count(prefill_tokens_saved=max(0, needed - running.prefill_tokens))

    def _seat(self, running: Running, number: int, slot: int) -> Seat:
        past = running.past.get(number)
        num_past = 0 if past is None else past.token_ids.size
        watch = self._watch(running.request.sampling)
        if watch is not None and past is not None:
            for token in past.token_ids.tolist():
                watch.push(token)
        first_step = self.seating.step - num_past
        return Seat(running, number, slot, first_step, self.versions.current, watch, past)

    def _prefill(self, running: Running, slots: Sequence[int], columns: Sequence[int]) -> None:
        """Compute the prompt, once for all its samples unless ``prefix`` is off, and put it into slots."""
        if not slots:
            return
        group, is_shared = running.state.group_id, self.config.prefix == "expand"
        for part in [slots] if is_shared else [[slot] for slot in slots]:
            if not (running.is_held and is_shared):
                self.worker.prefill(group, running.prompt)
                running.is_held = True
                self._count_prefill(running, running.prompt.size)
            self.worker.seat(group, columns[0], part, self._draw_for(ops.upload(part, self.rows.device)))

    def _resume(self, seat: Seat, past: Sample, column: int) -> None:
        """Compute a prompt with what one of its samples had drawn, and draw on from there."""
        self.rows.resume(seat.slot, Generated(past.token_ids, past.logprobs, past.sampling_logprobs))
        tokens = np.concatenate((seat.running.prompt, past.token_ids))
        self.worker.prefill(SINGLE, tokens)
        self._count_prefill(seat.running, tokens.size)
        slots = [seat.slot]
        self.worker.seat(SINGLE, column, slots, self._draw_for(ops.upload(slots, self.rows.device)))
        self.worker.drop(SINGLE)

    def _count_prefill(self, running: Running, num_tokens: int) -> None:
        running.prefill_tokens += num_tokens
        self._count(prefills=1, prefill_tokens=num_tokens)

    # Weights

    def update_weights(self, version: int, recompute: bool) -> None:
        """Write the staged weights of ``version``, between two steps.

        recompute: make the KV of running samples and held prompts anew; else what old weights made stays.
        """
        with self._runner.session():
            self.worker.commit(version)
            self.versions.change(version, self.seating.step)
            if recompute:
                self._recompute()

    def _recompute(self) -> None:
        for running in self._groups.values():
            if running.is_held:
                self.worker.prefill(running.state.group_id, running.prompt)
                self._count_prefill(running, running.prompt.size)
        self.seating.settle()
        seats = list(self.seating.seats.values())
        for seat, tokens in zip(seats, self.seating.drawn_by(seats), strict=True):
            written = np.concatenate((seat.running.prompt, tokens[:-1]))
            self.worker.prefill(SINGLE, written)
            self._count_prefill(seat.running, written.size)
            self.worker.refill(SINGLE, self.scheduler.column_of(seat.slot), [seat.slot])
            self.worker.drop(SINGLE)

    # Rows

    def _trim(self) -> bool:
        """Drop dead columns when it pays or must be. Whether this had to wait for the device."""
        used = self.scheduler.column(0)
        columns = self.scheduler.trim()
        must_wait = not columns and self.scheduler.is_full
        if must_wait:  # rows that are over hold the columns: learn which
            self.seating.look()
            self.seating.wait()
            columns = self.scheduler.trim()
        if columns:
            num_rows = self.scheduler.num_rows
            self.worker.trim(num_rows, columns, used)
            self._count(trims=1, trimmed_bytes=num_rows * (used - columns) * self._bytes_per_token)
        return must_wait

    def _compact(self) -> None:
        """At the tail, move rows together so that the next steps run fewer of them."""
        if self.config.deterministic == "strict" or not self.config.compact:
            return
        moves = self.scheduler.compact()
        if not moves:
            return
        self.worker.move(self.scheduler.column(self.seating.longest) + 1, moves)
        self.rows.move(moves)
        self.seating.move(moves)
        self._count(compactions=1, rows_moved=len(moves))

    def _decode(self) -> None:
        """One token for every row; strict decoding always runs all slots, so that shapes are fixed."""
        is_strict = self.config.deterministic == "strict"
        num_rows = self.config.num_slots if is_strict else self.scheduler.num_rows
        column = self.scheduler.column(self.seating.longest)
        self.worker.decode(num_rows, column, self._draw_for(slice(0, num_rows)), self.rows.kind())
        self.scheduler.advance()
        self.seating.stepped()
        self._count(decode_steps=1, rows_decoded=self.scheduler.num_live, rows_computed=num_rows)

    def _draw_for(self, slots: torch.Tensor | slice) -> Draw:
        return partial(self.rows.draw, slots=slots, kind=self.rows.kind())

    def _record_steps(self, recorder: Recorder | None) -> None:
        """Have decode steps replayed from now on; those of plain sampling are recorded at once."""
        if recorder is None:
            return
        self.worker.record_steps(recorder, self.rows.state)
        with self._runner.session():
            for num_rows in reversed(self.scheduler.buckets):
                draw = partial(self.rows.draw, slots=slice(0, num_rows), kind=SAMPLED)
                self.worker.prepare(num_rows, draw, SAMPLED)

    def _free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.scheduler.finish(slot)

    def _count(self, **more: int) -> None:
        now = self._stats
        self._stats = replace(now, **{name: getattr(now, name) + value for name, value in more.items()})
