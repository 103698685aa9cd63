"""The rows of one engine, step by step: admit, trim, compact, decode, retire, refill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic, time

from rollout_pool.actors import assembly
from rollout_pool.actors.filling import Filler
from rollout_pool.actors.graphs import Recorder
from rollout_pool.actors.rank_group import RankGroup
from rollout_pool.actors.rows import SAMPLED, Generated, Rows
from rollout_pool.actors.running import Running, Seat
from rollout_pool.actors.seating import Seating
from rollout_pool.actors.served_model import ServedModel
from rollout_pool.actors.stopping import StopWatch
from rollout_pool.actors.versions import VersionLog
from rollout_pool.config import EngineConfig
from rollout_pool.types import EngineStats, SamplingParams, TokenIds

ADMITTED_TOGETHER = 16
"""Groups whose prompts may be computed together, and so are held together until they are in their slots."""

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
        self._is_strict = config.deterministic == "strict"
        self._runner = served.runner
        device = self._runner.device
        self.worker = assembly.worker_for(served, config, group)
        most = min(config.max_length, served.memory_plan.slot_length + 1)  # a row that is over draws on
        self.rows = Rows(config.num_slots, most, self._runner.vocab_size, device)
        self.scheduler = assembly.scheduler_for(served, config)
        look_every = assembly.look_every_for(config, device)
        self.seating = Seating(self.rows, self.worker, look_every, self._free, on_sample)
        self._filler = Filler(self.worker, self.rows, self.seating, watch, shares=config.prefix != "off")
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
            prefills=self._filler.num_prefills,
            prefill_tokens=self._filler.tokens_computed,
            prefill_tokens_saved=self._filler.tokens_saved,
            prefill_tokens_reused=self._filler.tokens_reused,
            shared_groups=self._filler.num_shared,
            shared_kv_bytes=self.worker.prefixes.num_bytes,
            waiting_samples=self.scheduler.num_waiting_samples,
        )

    @property
    def versions(self) -> VersionLog:
        """Which weights there were when."""
        return self._filler.versions

    def versions_of(self, seat: Seat, count: int) -> TokenIds:
        """Of the weights that drew each of a seat's ``count`` tokens: int64 ``[count]``."""
        return self._filler.versions_of(seat, count)

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
            self._filler.drop(running)
            self.seating.settle()
        self.forget(running)

    def evict(self) -> tuple[list[Running], list[Running]]:
        """End this batch where it is: a step has failed. Its slots give their memory back.

        Returns the groups of which some sample sat in a slot, and the others. Every sample that is not over
        has in ``Running.past`` what it has drawn, and waits for a slot again.
        """
        with self._runner.session():
            self.seating.settle()
            seats = list(self.seating.seats.values())
            for seat, generated in zip(seats, self.seating.generated_by(seats), strict=True):
                if count := generated.token_ids.size:
                    versions = self.versions_of(seat, count)
                    seat.running.past[seat.number] = seat.sample(generated, None, versions, aborted=True)
            for running in self._groups.values():
                self._filler.drop(running)
            self.worker.sleep()
        seated = {id(seat.running) for seat in seats}
        groups = list(self._groups.values())
        for running in groups:
            running.line_up()
        return (
            [running for running in groups if id(running) in seated],
            [running for running in groups if id(running) not in seated],
        )

    def follow(self, before: Batch) -> None:
        """Count on from where another batch of this engine ended, and take new weights in its place."""
        self.worker.weights = before.worker.weights
        self.rows.count_on(before.rows)
        self.seating.step, self.seating.num_drawn = before.seating.step, before.seating.num_drawn
        self._filler.count_on(before._filler)
        mine = {"num_slots": self._stats.num_slots, "kv_bytes": self._stats.kv_bytes}
        self._stats = replace(before._stats, shortages=before._stats.shortages + 1, **mine)

    def advance(self) -> None:
        """One step: fill free slots, decode one token per row, learn which rows have ended."""
        with self._runner.together():
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

    def sleep(self, weights: bool = False) -> None:
        """Give the memory of the slots back, and that of the weights. No group may be running."""
        with self._runner.session():
            self.worker.sleep(weights)

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
        admissions = list(iter(self.scheduler.admit, None))
        for first in range(0, len(admissions), ADMITTED_TOGETHER):
            part = [
                (self._groups[one.group.group_id], one)
                for one in admissions[first : first + ADMITTED_TOGETHER]
            ]
            now, begin = monotonic(), time()
            for running, _ in part:
                running.started = running.started or now
            self._filler.compute_ahead([running for running, _ in part])
            for running, admission in part:
                self._filler.admit(running, admission, begin)
                begin = time()
        return bool(admissions)

    # Weights

    def update_weights(self, version: int, recompute: bool) -> None:
        """Write the staged weights of ``version``, between two steps.

        recompute: make the KV of running samples and held prompts anew; else what old weights made stays.
        """
        with self._runner.together():
            self.worker.commit(version)
            self.versions.change(version, self.seating.step)
            if recompute:
                self._filler.recompute(self._groups.values(), self.scheduler.column_of)

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
        if self._is_strict or not self.config.compact:
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
        num_rows = self.config.num_slots if self._is_strict else self.scheduler.num_rows
        column, kind = self.scheduler.column(self.seating.longest), self.rows.kind()
        self.worker.decode(num_rows, column, self.rows.drawing(slice(0, num_rows), kind), kind)
        self.scheduler.advance()
        self.seating.stepped()
        self._count(decode_steps=1, rows_decoded=self.scheduler.num_live, rows_computed=num_rows)

    def _record_steps(self, recorder: Recorder | None) -> None:
        """Have decode steps replayed from now on; those of plain sampling are recorded at once."""
        if recorder is None or self._runner.partitioned is not None:
            return
        self.worker.record_steps(recorder, self.rows.state)
        with self._runner.session():
            sizes = (self.config.num_slots,) if self._is_strict else self.scheduler.buckets
            for num_rows in reversed(sizes):
                self.worker.prepare(num_rows, self.rows.drawing(slice(0, num_rows), SAMPLED), SAMPLED)

    def _free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.scheduler.finish(slot)

    def _count(self, **more: int) -> None:
        now = self._stats
        self._stats = replace(now, **{name: getattr(now, name) + value for name, value in more.items()})
