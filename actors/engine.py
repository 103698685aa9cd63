"""Continuous batching on one model in one process: prefill once, expand, decode, retire, refill."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rollout_pool.actors import support
from rollout_pool.actors.kv_cache import SlotCache, cache_bytes
from rollout_pool.actors.loading import eos_token_ids, load_model, load_tokenizer, transpose_linear_weights
from rollout_pool.actors.memory import plan_memory
from rollout_pool.actors.model_runner import ModelRunner, Prefix
from rollout_pool.actors.prompts import PromptEncoder
from rollout_pool.actors.rows import Rows
from rollout_pool.actors.scheduler import Admission, GroupState, Scheduler
from rollout_pool.actors.stopping import StopWatch
from rollout_pool.config import Dtype, EngineConfig
from rollout_pool.errors import ConfigError, RequestError
from rollout_pool.kernels import ops
from rollout_pool.requests import call_seed, failed_group, resolve_requests
from rollout_pool.types import (
    EngineStats,
    FinishReason,
    Prompt,
    ResolvedRequest,
    RolloutGroup,
    RolloutRequest,
    Sample,
    SamplingParams,
    Timing,
    TokenIds,
)

OnFinish = Callable[[RolloutGroup], None]


@dataclass(eq=False)
class _Running:
    """A group in the engine: its request, its place in the scheduler, and what has come of it."""

    request: ResolvedRequest
    prompt: TokenIds
    state: GroupState
    on_finish: OnFinish | None
    submitted: float
    started: float = 0.0
    prefill_tokens: int = 0
    prefix: Prefix | None = None
    samples: dict[int, Sample] = field(default_factory=dict)


@dataclass(frozen=True)
class _Seat:
    """Who sits in a slot: a sample of a group, its length when it sat down, and in which step."""

    running: _Running
    number: int
    """Of the sample within its request, from 0."""
    offset: int
    """Prompt length minus the number of the step that decodes its second token."""
    watch: StopWatch | None


class Engine:
    """Rolls out prompts on one causal LM. Needs no Ray.

        engine = Engine("path-or-model", EngineConfig(num_slots=64, max_length=1024))
        groups = engine.generate(prompts, SamplingParams(n=8, max_new_tokens=512))

    Args:
        model: a folder or name to load, or a loaded ``PreTrainedModel``, which is used as it is: the
            engine makes no copy of it, and restores what it touches (mode, attention).
        tokenizer: one that is loaded already; by default the one in the model's folder. Without
            any, prompts are token ids and ``Sample.text`` is empty.
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
        self.is_strict = self.config.deterministic == "strict"
        if self.is_strict:
            # MKL then gives the same bits for any number of threads. It is read at MKL's first product.
            os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
        self.seed = seed
        owns_model = isinstance(model, str)
        if isinstance(model, str):
            tokenizer = tokenizer or load_tokenizer(model, trust_remote_code=trust_remote_code)
            model = load_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        elif dtype != "auto" or device is not None:
            raise ConfigError("dtype and device are for loading; a model that is loaded already keeps its own")
        self.model = model
        self.tokenizer = tokenizer
        self._runner = ModelRunner(model)
        layout = self.config.linear_layout
        if self._runner.device.type == "cpu" and (layout == "transposed" or (layout == "auto" and owns_model)):
            transpose_linear_weights(model)
        support.refuse_by_configuration(model, self.config.max_length)
        with self._runner.session():
            example = support.trial(self._runner)
        device_ = self._runner.device
        self.memory_plan = plan_memory(model, self.config, *cache_bytes(example.cache), device_)
        self.memory_plan.check()
        self.cache = SlotCache(example.cache, self.config.num_slots, self.config.max_length)
        self._rows = Rows(self.config.num_slots, self.config.max_length, self._runner.vocab_size, device_)
        self._encoder = PromptEncoder(tokenizer, self._runner.vocab_size, self.config.max_length)
        self._eos = eos_token_ids(model, tokenizer)
        self._scheduler = Scheduler(self.config.num_slots)
        self._running: dict[int, _Running] = {}
        self._seats: dict[int, _Seat] = {}
        self._delivered: list[tuple[RolloutGroup, OnFinish | None]] = []
        self._numbers = count()
        self._calls = count()
        self._step = 0
        self._stats = EngineStats(
            num_slots=self.config.num_slots, kv_bytes=sum(tensor.nbytes for tensor in self.cache.tensors())
        )

    # What a caller uses

    def generate(
        self, prompts: Iterable[Prompt | RolloutRequest], sampling: SamplingParams | None = None
    ) -> list[RolloutGroup]:
        """Roll out all prompts: one group per prompt, in input order; a bad prompt's has an ``error``."""
        requests = resolve_requests(prompts, sampling, seed=call_seed(self.seed, next(self._calls)))
        groups: list[RolloutGroup | None] = [None] * len(requests)

        def store(group: RolloutGroup) -> None:
            groups[group.index] = group

        for request in requests:
            self.submit(request, store)
        while any(group is None for group in groups):
            self.step()
        return [group for group in groups if group is not None]

    def submit(self, request: RolloutRequest | ResolvedRequest, on_finish: OnFinish | None = None) -> None:
        """Queue one request. A bad one is not an error here: its failed group comes with the next step."""
        if not isinstance(request, ResolvedRequest):
            seed = call_seed(self.seed, next(self._calls))
            request = resolve_requests([request], None, seed=seed)[0]
        self._count(submitted=1)
        try:
            prompt = self._encoder.encode(request)
        except RequestError as error:
            self._deliver(failed_group(request, f"{request.label}: {error}"), on_finish)
            return
        number = next(self._numbers)
        state = GroupState(number, request.sampling.n, request.sampling.max_new_tokens)
        self._running[number] = _Running(request, prompt, state, on_finish, time.monotonic())
        self._scheduler.add(state)

    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do or to deliver."""
        return bool(self._scheduler.has_work or self._delivered)

    def step(self) -> list[RolloutGroup]:
        """Admit, compact, decode one token per row, retire. Returns the groups that are complete."""
        with self._runner.session():
            while (admission := self._scheduler.admit()) is not None:
                self._admit(admission)
            if self._seats:
                self._compact()
                self._decode()
        delivered, self._delivered = self._delivered, []
        for group, on_finish in delivered:
            if on_finish is not None:
                on_finish(group)
        return [group for group, _ in delivered]

    def abort(self, request_id: str | int) -> int:
        """Cancel every group with this id; each is delivered with what its samples have so far.

        Unfinished samples have ``finish_reason`` "aborted". Returns the number of groups.
        """
        found = [running for running in self._running.values() if running.request.request_id == request_id]
        with self._runner.session():
            for running in found:
                for slot in sorted(running.state.slots):
                    self._store_sample(slot, "aborted")
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
            waiting_samples=self._scheduler.num_waiting_samples,
        )

    # The step, part by part

    def _admit(self, admission: Admission) -> None:
        """Prefill a group if it is new, expand its KV into the slots, draw their first tokens."""
        running = self._running[admission.group.group_id]
        request, slots = running.request, admission.slots
        prompt = torch.from_numpy(running.prompt).to(self._runner.device)
        running.started = running.started or time.monotonic()
        places = ops.rows_of(slots, self._runner.device)
        if self.config.prefix == "expand":
            prefix = running.prefix or self._prefill(running, prompt)
            running.prefix = None if admission.is_last else prefix
            self.cache.expand(prefix.cache, places, prefix.length)
            logits = prefix.logits.repeat(len(slots), 1)
        else:
            prefixes = [self._prefill(running, prompt) for _ in slots]
            for place, prefix in zip(places.split(1), prefixes, strict=True):
                self.cache.expand(prefix.cache, place, prefix.length)
            logits = torch.cat([prefix.logits for prefix in prefixes])
        self._count(prefill_tokens_saved=request.sampling.n * running.prompt.size - running.prefill_tokens
                    if admission.is_last else 0)  # fmt: skip
        numbers = range(admission.first, admission.first + len(slots))
        keys = [ops.sample_key(request.seed, request.identity, request.sample_offset + number) for number in numbers]
        self._rows.admit(slots, prompt, request.sampling, keys, self._stop_ids(request.sampling))
        for slot, number in zip(slots, numbers, strict=True):
            stop = request.sampling.stop
            watch = StopWatch(self.tokenizer, stop, request.sampling.min_new_tokens) if stop else None
            self._seats[slot] = _Seat(running, number, running.prompt.size - self._step, watch)
        ended = self._rows.sample(logits, places)
        self._retire([slots[place] for place in ended], slots)

    def _prefill(self, running: _Running, prompt: torch.Tensor) -> Prefix:
        running.prefill_tokens += prompt.shape[0]
        self._count(prefills=1, prefill_tokens=prompt.shape[0])
        return self._runner.prefill(prompt)

    def _compact(self) -> None:
        """At the tail, move rows together so that the next steps run fewer of them."""
        if self.is_strict or not self.config.compact:
            return
        moves = self._scheduler.compact()
        if not moves:
            return
        source = ops.rows_of([pair[0] for pair in moves], self._runner.device)
        target = ops.rows_of([pair[1] for pair in moves], self._runner.device)
        self.cache.move(source, target, self._longest() + 1)
        self._rows.move(moves)
        for before, after in moves:
            self._seats[after] = self._seats.pop(before)
        self._count(compactions=1, rows_moved=len(moves))

    def _decode(self) -> None:
        """One token for every row; strict decoding always runs all slots, so that shapes are fixed."""
        num_rows = self.config.num_slots if self.is_strict else self._scheduler.num_rows
        tokens, positions = self._rows.last_token[:num_rows], self._rows.position[:num_rows].clone()
        logits = self._runner.decode(self.cache, tokens, positions, self._longest())
        self._rows.advance(num_rows)
        self._step += 1
        self._count(decode_steps=1, rows_decoded=len(self._seats), rows_computed=num_rows)
        self._retire(self._rows.sample(logits, slice(0, num_rows)), list(self._seats))

    def _longest(self) -> int:
        """The largest position that this step writes."""
        return self._step + max(seat.offset for seat in self._seats.values())

    def _retire(self, ended: Sequence[int], sampled: Sequence[int]) -> None:
        """Finish the rows that ended, and those whose text now holds a stop string."""
        self._count(new_tokens=len(sampled))
        watched = [slot for slot in sampled if self._seats[slot].watch is not None]
        stopped = [slot for slot in self._push_text(watched) if slot not in ended]
        for slot in ended:
            self._store_sample(slot, None)
        for slot in stopped:
            self._store_sample(slot, "stop")
        over = [*ended, *stopped]
        if not over:
            return
        groups = {self._scheduler.finish(slot) for slot in over}
        self._release(over)
        for group in groups:
            if group.is_complete and group.group_id in self._running:
                self._complete(self._running[group.group_id])

    def _push_text(self, watched: list[int]) -> list[int]:
        """Tell each watched row's latest token to its stop watch; returns the rows with a match."""
        if not watched:
            return []
        tokens = self._rows.last_token[ops.rows_of(watched, self._runner.device)].tolist()
        pairs = zip(watched, tokens, strict=True)
        return [slot for slot, token in pairs if (watch := self._seats[slot].watch) and watch.push(token)]

    def _release(self, slots: Sequence[int]) -> None:
        if slots:
            self._rows.release(slots)
            for slot in slots:
                del self._seats[slot]

    # Results

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        eos = () if params.ignore_eos else self._eos
        return tuple(sorted({*eos, *params.stop_token_ids}))

    def _store_sample(self, slot: int, reason: FinishReason | None) -> None:
        """Turn what a slot generated into a sample; ``reason`` None: by its last token."""
        seat = self._seats[slot]
        request = seat.running.request
        generated = self._rows.read(slot)
        size = generated.token_ids.size
        match: str | int | None = seat.watch.match if seat.watch is not None else None
        last = int(generated.token_ids[-1])
        if np.isnan(generated.logprobs[-1]):
            reason = "error"
        elif reason != "aborted" and last in self._stop_ids(request.sampling):
            reason, match = "stop", last if match is None else match
        elif reason is None:
            reason = "stop" if match is not None else "length"
        if seat.watch is not None and seat.watch.match is not None:
            text = seat.watch.text
        elif self.tokenizer is not None:
            text = str(self.tokenizer.decode(generated.token_ids.tolist(), skip_special_tokens=True))
        else:
            text = ""
        seat.running.samples[seat.number] = Sample(
            token_ids=generated.token_ids,
            text=text,
            logprobs=generated.logprobs,
            sampling_logprobs=generated.sampling_logprobs,
            finish_reason=reason,
            stop_match=match,
            weight_version=self._stats.weight_version,
            token_versions=np.full(size, self._stats.weight_version, dtype=np.int64),
            seed=request.seed,
            sample_index=request.sample_offset + seat.number,
        )
        self._count(samples_finished=1)

    def _complete(self, running: _Running, cancelled: bool = False) -> None:
        """All samples of a group are over: hand it out."""
        del self._running[running.state.group_id]
        now = time.monotonic()
        started = running.started or now
        samples = [running.samples[number] for number in sorted(running.samples)]
        broken = next((sample for sample in samples if sample.finish_reason == "error"), None)
        error = None
        if broken is not None:
            error = (
                f"sample {broken.sample_index}: the logits are not finite at new token {broken.token_ids.size}; "
                "check the weights for nan or inf"
            )
        elif cancelled:
            error = "cancelled"
        request = running.request
        group = RolloutGroup(
            request_id=request.request_id,
            index=request.index,
            prompt_token_ids=running.prompt,
            samples=samples,
            error=error,
            metadata=request.metadata,
            sampling=request.sampling,
            timing=Timing(started - running.submitted, now - started, running.prefill_tokens),
        )
        self._deliver(group, running.on_finish, cancelled)

    def _deliver(self, group: RolloutGroup, on_finish: OnFinish | None, cancelled: bool = False) -> None:
        self._delivered.append((group, on_finish))
        kind = "cancelled" if cancelled else "failed" if group.error is not None else "finished"
        self._count(**{kind: 1})

    def _count(self, **more: int) -> None:
        now = self._stats
        self._stats = replace(now, **{name: getattr(now, name) + value for name, value in more.items()})
