"""Continuous batching on one model in one process: prefill once, expand, decode, retire, refill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from time import monotonic
from typing import Any

import torch
from transformers import PreTrainedModel

from rollout_pool.actors.aligned_scheduler import AlignedScheduler
from rollout_pool.actors.kv_cache import SlotCache
from rollout_pool.actors.prompts import PromptEncoder
from rollout_pool.actors.rank_group import RankGroup
from rollout_pool.actors.rank_worker import LeadingWorker
from rollout_pool.actors.rows import Generated, Rows
from rollout_pool.actors.running import OnFinish, Running, Seat
from rollout_pool.actors.scheduler import Admission, GroupState, Scheduler
from rollout_pool.actors.seating import Seating
from rollout_pool.actors.served_model import serve
from rollout_pool.actors.stopping import Endings
from rollout_pool.actors.strict import ask_for_strict_products, warn_unless_strict
from rollout_pool.actors.worker import Draw, Worker
from rollout_pool.config import Dtype, EngineConfig, TensorParallelBackend
from rollout_pool.errors import RequestError
from rollout_pool.kernels import ops
from rollout_pool.requests import call_seed, failed_group, resolve_requests
from rollout_pool.types import (
    EngineStats,
    Prompt,
    ResolvedRequest,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
)

LOOK_EVERY_ON_GPU = 4

_Delivery = tuple[RolloutGroup, OnFinish | None]


class Engine:
    """Rolls out prompts on one causal LM. Needs no Ray.

        engine = Engine("path-or-model", EngineConfig(num_slots=64, max_length=1024))
        groups = engine.generate(prompts, SamplingParams(n=8, max_new_tokens=512))

    Args:
        model: a folder or name to load, or a loaded ``PreTrainedModel``, which is used as it is: the
            engine makes no copy of it, and restores what it touches (mode, attention).
        tokenizer: a loaded one or a folder; by default the one in the model's folder. Without any,
            prompts are token ids and ``Sample.text`` is empty.
        dtype, device, trust_remote_code: how to load the model; not for a loaded one.
        seed: the seed of calls and requests that bring none.
        group, backend: on rank 0 of a tensor-parallel group, whose other ranks call
            :func:`rollout_pool.actors.rank_worker.follow` with the same model and config.

    Raises:
        ConfigError: the model cannot be loaded. UnsupportedModelError: it cannot be served
            correctly. CapacityError: the slots do not fit into memory.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        config: EngineConfig | None = None,
        *,
        tokenizer: Any | None = None,
        dtype: Dtype = "auto",
        seed: int = 0,
        device: str | None = None,
        trust_remote_code: bool = False,
        group: RankGroup | None = None,
        backend: TensorParallelBackend = "transformers",
    ) -> None:
        self.config = config or EngineConfig()
        self.seed = seed
        self.is_strict = self.config.deterministic == "strict"
        if self.is_strict:
            ask_for_strict_products()
        served = serve(
            model,
            self.config,
            tokenizer=tokenizer,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            group=group,
            backend=backend,
        )
        self.model, self.tokenizer, self.memory_plan = served.model, served.tokenizer, served.memory_plan
        num_slots, length = self.config.num_slots, self.config.max_length
        self._runner = served.runner
        place = self._runner.device
        if self.is_strict and place.type == "cpu":
            warn_unless_strict()
        self._endings = Endings(self.tokenizer, served.eos_token_ids, self._runner.vocab_size)
        self._encoder = PromptEncoder(self.tokenizer, self._runner.vocab_size, length)
        self._worker = (
            Worker(served, self.config) if group is None else LeadingWorker(served, self.config, group)
        )
        self._rows = Rows(num_slots, length, self._runner.vocab_size, place)
        self._scheduler = self._make_scheduler()
        look_every = self.config.readback_every or (LOOK_EVERY_ON_GPU if place.type == "cuda" else 1)
        self._seating = Seating(self._rows, self._worker, look_every, self._free, self._store)
        self._running: dict[int, Running] = {}
        self._delivered: list[_Delivery] = []
        self._numbers, self._calls = count(), count()
        kv_bytes = sum(tensor.nbytes for tensor in self.cache.tensors())
        self._stats = EngineStats(num_slots=num_slots, kv_bytes=kv_bytes)

    @property
    def cache(self) -> SlotCache:
        """The KV of all slots."""
        return self._worker.cache

    def _make_scheduler(self) -> Scheduler:
        config = self.config
        if config.layout == "ragged":
            return Scheduler(config.num_slots)
        # Triton reads only the cells that a row sees.
        skips_dead = self._runner.device.type == "cuda" and not self._runner.needs_mask
        return AlignedScheduler(config.num_slots, config.max_length, reads_dead_columns=not skips_dead)

    # What a caller uses

    def generate(
        self, prompts: Iterable[Prompt | RolloutRequest], sampling: SamplingParams | None = None
    ) -> list[RolloutGroup]:
        """Roll out all prompts: one group per prompt, in input order; a bad prompt's has an ``error``."""
        requests = resolve_requests(prompts, sampling, seed=call_seed(self.seed, next(self._calls)))
        groups: dict[int, RolloutGroup] = {}
        others: list[_Delivery] = []

        def store(group: RolloutGroup) -> None:
            groups[group.index] = group

        for request in requests:
            self.submit(request, store)
        while len(groups) < len(requests):
            self._advance()
            delivered, self._delivered = self._delivered, []
            for group, on_finish in delivered:
                if on_finish is store:
                    store(group)
                else:
                    others.append((group, on_finish))
        self._delivered = others + self._delivered
        return [groups[index] for index in range(len(requests))]

    def submit(self, request: RolloutRequest | ResolvedRequest, on_finish: OnFinish | None = None) -> None:
        """Queue one request; ``on_finish`` gets its group, within a later :meth:`step`.

        A bad request is not an error here: its failed group comes with the next step.
        """
        if not isinstance(request, ResolvedRequest):
            request = resolve_requests([request], None, seed=call_seed(self.seed, next(self._calls)))[0]
        self._count(submitted=1)
        try:
            prompt = self._encoder.encode(request)
        except RequestError as error:
            self._count(failed=1)
            self._delivered.append((failed_group(request, str(error)), on_finish))
            return
        params = request.sampling
        state = GroupState(next(self._numbers), params.n, params.max_new_tokens, prompt.size)
        self._running[state.group_id] = Running(request, prompt, self._endings.ids(params), state, on_finish)
        self._scheduler.add(state)

    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do or to deliver."""
        return bool(self._running or self._delivered)

    def step(self) -> list[RolloutGroup]:
        """Admit, compact, decode one token per row, retire. Returns the groups that are complete."""
        self._advance()
        complete = []
        while self._delivered:  # one by one: a callback that raises leaves the others for the next step
            group, on_finish = self._delivered.pop(0)
            complete.append(group)
            if on_finish is not None:
                on_finish(group)
        return complete

    def abort(self, request_id: str | int) -> int:
        """Cancel every group with this id; each is delivered with what its samples have so far.

        Unfinished samples have ``finish_reason`` "aborted". Returns the number of groups.
        """
        with self._runner.session():
            self._seating.settle()
            found = [one for one in self._running.values() if one.request.request_id == request_id]
            for running in found:
                self._seating.retire(self._seating.of(running), aborted=True)
                self._scheduler.cancel(running.state)
                if running.is_held:
                    self._worker.drop(running.state.group_id)
                self._seating.settle()
                self._complete(running, cancelled=True)
        return len(found)

    def stats(self) -> EngineStats:
        """Counters since the engine started, and its state now."""
        waiting = self._scheduler.num_waiting
        return replace(
            self._stats,
            waiting_groups=waiting,
            running_groups=len(self._running) - waiting,
            live_rows=self._scheduler.num_live,
            new_tokens=self._seating.num_drawn,
            waiting_samples=self._scheduler.num_waiting_samples,
        )

    def close(self) -> None:
        """Let the other ranks of a tensor-parallel group end. The engine takes no more work."""
        self._worker.close()

    # One step, part by part

    def _advance(self) -> None:
        with self._runner.session():
            self._fill_slots()
            if self._seating.has_rows_to_decode and self._trim():
                self._compact()
                self._decode()
                self._seating.deliver()
            else:
                self._seating.wait()

    def _fill_slots(self) -> None:
        """Admit as long as slots are free; those of samples that ended with their first token are again."""
        while self._admit_all():
            self._seating.look()
            self._seating.deliver_ready()

    def _admit_all(self) -> bool:
        is_any = False
        while (admission := self._scheduler.admit()) is not None:
            self._admit(admission)
            is_any = True
        return is_any

    def _admit(self, admission: Admission) -> None:
        """Prefill a group if it is new, expand its KV into the slots, draw their first tokens."""
        running, slots = self._running[admission.group.group_id], admission.slots
        request = running.request
        running.started = running.started or monotonic()
        numbers = range(admission.first, admission.first + len(slots))
        keys = [
            ops.sample_key(request.seed, request.identity, request.sample_offset + number)
            for number in numbers
        ]
        self._rows.admit(slots, running.prompt, request.sampling, keys, list(running.stop_ids))
        step, params = self._seating.step, request.sampling
        self._seating.sit(
            Seat(running, number, slot, step, self._endings.watch(params))
            for slot, number in zip(slots, numbers, strict=True)
        )
        self._prefill(running, admission)
        if admission.is_last:
            running.is_held = False
            self._worker.drop(admission.group.group_id)
            needed = request.sampling.n * running.prompt.size
            self._count(prefill_tokens_saved=needed - running.prefill_tokens)

    def _prefill(self, running: Running, admission: Admission) -> None:
        """Compute the prompt, once for all its samples unless ``prefix`` is off, and put it into slots."""
        slots, column = admission.slots, admission.column
        group, is_shared = running.state.group_id, self.config.prefix == "expand"
        for part in [slots] if is_shared else [[slot] for slot in slots]:
            if not (running.is_held and is_shared):
                self._worker.prefill(group, running.prompt)
                running.is_held = True
                running.prefill_tokens += running.prompt.size
                self._count(prefills=1, prefill_tokens=running.prompt.size)
            self._worker.seat(group, column, part, self._draw_for(ops.upload(part, self._rows.device)))

    def _draw_for(self, slots: torch.Tensor | slice) -> Draw:
        return partial(self._rows.draw, slots=slots)

    def _trim(self) -> bool:
        """Drop dead columns when it pays or must be; False when there is nothing left to decode."""
        scheduler = self._scheduler
        used = scheduler.column(0)
        columns = scheduler.trim()
        if not columns and scheduler.is_full:  # rows that are over hold the columns: learn which
            self._seating.settle()
            if not self._seating.has_rows_to_decode:
                return False
            columns = scheduler.trim()
        if columns:
            num_rows = scheduler.num_rows
            self._worker.trim(num_rows, columns, used)
            moved = num_rows * (used - columns) * self.memory_plan.bytes_per_token
            self._count(trims=1, trimmed_bytes=moved)
        return True

    def _compact(self) -> None:
        """At the tail, move rows together so that the next steps run fewer of them."""
        if self.is_strict or not self.config.compact:
            return
        moves = self._scheduler.compact()
        if not moves:
            return
        self._worker.move(self._scheduler.column(self._seating.longest) + 1, moves)
        self._rows.move(moves)
        self._seating.move(moves)
        self._count(compactions=1, rows_moved=len(moves))

    def _decode(self) -> None:
        """One token for every row; strict decoding always runs all slots, so that shapes are fixed."""
        num_rows = self.config.num_slots if self.is_strict else self._scheduler.num_rows
        draw = self._draw_for(slice(0, num_rows))
        column = self._scheduler.column(self._seating.longest)
        self._worker.decode(num_rows, column, draw, self._rows.flags())
        self._scheduler.advance()
        self._seating.stepped()
        self._count(decode_steps=1, rows_decoded=self._scheduler.num_live, rows_computed=num_rows)

    # What becomes of the samples

    def _free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._scheduler.finish(slot)

    def _store(self, seat: Seat, generated: Generated, aborted: bool) -> None:
        """A sample is over and has arrived; so may be its group."""
        version = self._stats.weight_version
        running = seat.running
        running.samples[seat.number] = seat.sample(generated, self.tokenizer, version, aborted=aborted)
        self._count(samples_finished=1)
        if running.is_complete and not aborted:
            self._complete(running)

    def _complete(self, running: Running, cancelled: bool = False) -> None:
        """All samples of a group are over: hand it out."""
        del self._running[running.state.group_id]
        group = running.finish(cancelled)
        self._delivered.append((group, running.on_finish))
        self._count(**{"cancelled" if cancelled else "failed" if group.error else "finished": 1})

    def _count(self, **more: int) -> None:
        now = self._stats
        self._stats = replace(now, **{name: getattr(now, name) + value for name, value in more.items()})
