"""Continuous batching on one model in one process: prefill once, expand, decode, retire, refill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from time import monotonic
from typing import Any

import torch
from transformers import PreTrainedModel

from rollout_pool.actors.kv_cache import SlotCache
from rollout_pool.actors.prefill import Prefiller
from rollout_pool.actors.prompts import PromptEncoder
from rollout_pool.actors.rows import Rows
from rollout_pool.actors.running import OnFinish, Running, Seat
from rollout_pool.actors.scheduler import Admission, GroupState, Scheduler
from rollout_pool.actors.served_model import serve
from rollout_pool.actors.stopping import Endings
from rollout_pool.actors.strict import ask_for_strict_products, warn_unless_strict
from rollout_pool.config import Dtype, EngineConfig
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
        )
        self.model, self.tokenizer, self.memory_plan = served.model, served.tokenizer, served.memory_plan
        num_slots, length = self.config.num_slots, self.config.max_length
        self._runner = served.runner
        self._device = self._runner.device
        if self.is_strict and self._device.type == "cpu":
            warn_unless_strict()
        self._endings = Endings(self.tokenizer, served.eos_token_ids, self._runner.vocab_size)
        self._encoder = PromptEncoder(self.tokenizer, self._runner.vocab_size, length)
        self.cache = SlotCache(served.example, num_slots, length)
        self._prefiller = Prefiller(self._runner, self.cache, shares=self.config.prefix == "expand")
        self._rows = Rows(num_slots, length, self._runner.vocab_size, self._device)
        self._scheduler = Scheduler(num_slots)
        self._running: dict[int, Running] = {}
        self._seats: dict[int, Seat] = {}
        self._delivered: list[_Delivery] = []
        self._numbers, self._calls = count(), count()
        self._step = 0
        kv_bytes = sum(tensor.nbytes for tensor in self.cache.tensors())
        self._stats = EngineStats(num_slots=num_slots, kv_bytes=kv_bytes)

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
        state = GroupState(next(self._numbers), params.n, params.max_new_tokens)
        self._running[state.group_id] = Running(request, prompt, self._endings.ids(params), state, on_finish)
        self._scheduler.add(state)

    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do or to deliver."""
        return bool(self._scheduler.has_work or self._delivered)

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
        found = [running for running in self._running.values() if running.request.request_id == request_id]
        with self._runner.session():
            for running in found:
                for slot in sorted(running.state.slots):
                    self._store_sample(slot, aborted=True)
                self._release(self._scheduler.cancel(running.state))
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
            prefills=self._prefiller.num_prefills,
            prefill_tokens=self._prefiller.tokens_computed,
            prefill_tokens_saved=self._prefiller.tokens_saved,
            waiting_samples=self._scheduler.num_waiting_samples,
        )

    # One step, part by part

    def _advance(self) -> None:
        with self._runner.session():
            while (admission := self._scheduler.admit()) is not None:
                self._admit(admission)
            if self._seats:
                self._compact()
                self._decode()

    def _admit(self, admission: Admission) -> None:
        """Prefill a group if it is new, expand its KV into the slots, draw their first tokens."""
        running, slots = self._running[admission.group.group_id], admission.slots
        request = running.request
        running.started = running.started or monotonic()
        prompt = torch.from_numpy(running.prompt).to(self._device)
        places = ops.rows_of(slots, self._device)
        logits = self._prefiller.fill(running, prompt, places, admission.is_last)
        numbers = range(admission.first, admission.first + len(slots))
        keys = [
            ops.sample_key(request.seed, request.identity, request.sample_offset + number)
            for number in numbers
        ]
        self._rows.admit(slots, prompt, request.sampling, keys, list(running.stop_ids))
        for slot, number in zip(slots, numbers, strict=True):
            watch = self._endings.watch(request.sampling)
            self._seats[slot] = Seat(running, number, prompt.shape[0] - self._step, watch)
        ended = self._rows.sample(logits, places)
        self._retire([slots[place] for place in ended], slots)

    def _compact(self) -> None:
        """At the tail, move rows together so that the next steps run fewer of them."""
        if self.is_strict or not self.config.compact:
            return
        moves = self._scheduler.compact()
        if not moves:
            return
        source, target = (ops.rows_of(side, self._device) for side in zip(*moves, strict=True))
        self.cache.move(source, target, self._longest() + 1)
        self._rows.move(moves)
        for before, after in moves:
            self._seats[after] = self._seats.pop(before)
        self._count(compactions=1, rows_moved=len(moves))

    def _decode(self) -> None:
        """One token for every row; strict decoding always runs all slots, so that shapes are fixed."""
        num_rows = self.config.num_slots if self.is_strict else self._scheduler.num_rows
        tokens, positions = self._rows.last_token[:num_rows], self._rows.position[:num_rows]
        logits = self._runner.decode(self.cache, tokens, positions, self._longest())
        self._rows.advance(num_rows)
        self._step += 1
        self._count(decode_steps=1, rows_decoded=len(self._seats), rows_computed=num_rows)
        self._retire(self._rows.sample(logits, slice(0, num_rows)), list(self._seats))

    def _longest(self) -> int:
        """The largest position that the next decode step writes."""
        return self._step + max(seat.offset for seat in self._seats.values())

    def _retire(self, ended: Sequence[int], sampled: Sequence[int]) -> None:
        """Finish the rows that ended, and those whose text now holds a stop string."""
        self._count(new_tokens=len(sampled))
        over = list(dict.fromkeys((*ended, *self._stopped_by_text(sampled))))
        for slot in over:
            self._store_sample(slot)
        groups = {self._scheduler.finish(slot) for slot in over}
        self._release(over)
        for group in groups:
            if group.is_complete:
                self._complete(self._running[group.group_id])

    def _stopped_by_text(self, sampled: Sequence[int]) -> list[int]:
        """Show each watched row's new token to its stop watch; returns the rows with a match."""
        watched = {slot: watch for slot in sampled if (watch := self._seats[slot].watch) is not None}
        if not watched:
            return []
        tokens = self._rows.last_token[ops.rows_of(list(watched), self._device)].tolist()
        return [
            slot for (slot, watch), token in zip(watched.items(), tokens, strict=True) if watch.push(token)
        ]

    def _store_sample(self, slot: int, aborted: bool = False) -> None:
        seat = self._seats[slot]
        generated = self._rows.read(slot)
        sample = seat.sample(generated, self.tokenizer, self._stats.weight_version, aborted=aborted)
        seat.running.samples[seat.number] = sample
        if sample.finish_reason == "error":
            self.cache.clear(ops.rows_of([slot], self._device))
        self._count(samples_finished=1)

    def _release(self, slots: Sequence[int]) -> None:
        if slots:
            self._rows.release(slots)
            for slot in slots:
                del self._seats[slot]

    def _complete(self, running: Running, cancelled: bool = False) -> None:
        """All samples of a group are over: hand it out."""
        del self._running[running.state.group_id]
        group = running.finish(cancelled)
        self._delivered.append((group, running.on_finish))
        self._count(**{"cancelled" if cancelled else "failed" if group.error else "finished": 1})

    def _count(self, **more: int) -> None:
        now = self._stats
        self._stats = replace(now, **{name: getattr(now, name) + value for name, value in more.items()})
