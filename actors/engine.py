"""Prompts in, groups of samples out: continuous batching on one model, without a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from rollout_pool.actors.batch import Batch
from rollout_pool.actors.elastic_batch import ElasticBatch
from rollout_pool.actors.kv_cache import SlotCache
from rollout_pool.actors.prompts import PromptEncoder
from rollout_pool.actors.rank_group import RankGroup
from rollout_pool.actors.rows import Generated
from rollout_pool.actors.running import OnFinish, Running, Seat
from rollout_pool.actors.served_model import serve
from rollout_pool.actors.stopping import Endings
from rollout_pool.actors.strict import warn_unless_strict
from rollout_pool.config import Dtype, EngineConfig, TensorParallelBackend
from rollout_pool.errors import RequestError
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
        model: a folder or name to load, or a trainer's model, as it is or in a DeepSpeed engine (ZeRO 0 to
            3), DDP or ``torch.compile``. Of that the engine makes no copy; it restores what it touches, and
            sees when it was trained. Where there is a DeepSpeed engine, give that: its steps are counted
            (``docs/colocated.md``).
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
        model: str | PreTrainedModel | torch.nn.Module,
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
        runner = self._runner = served.runner
        self._borrowed = served.borrowed
        if self.is_strict and runner.device.type == "cpu":
            warn_unless_strict()
        self._endings = Endings(self.tokenizer, served.eos_token_ids, runner.vocab_size)
        plan = self.memory_plan
        most = plan.prompt_tokens if plan.sharing == "needed" else None
        self._encoder = PromptEncoder(
            self.tokenizer, runner.vocab_size, self.config.max_length, plan.slot_length, most
        )
        new_batch = partial(Batch, served, group=group, watch=self._endings.watch, on_sample=self._store)
        is_split = group is not None or runner.partitioned is not None
        self._elastic = ElasticBatch(new_batch, self.config, is_split, self._fail)
        self._running: dict[int, Running] = {}
        self._delivered: list[_Delivery] = []
        self._numbers, self._calls = count(), count()
        self._counts: Counter[str] = Counter()
        self._is_asleep = self._has_no_weights = False

    @property
    def batch(self) -> Batch:
        """The rows that are running."""
        return self._elastic.batch

    @property
    def cache(self) -> SlotCache:
        """The KV of all slots."""
        return self.batch.worker.cache

    # What a caller uses

    def generate(
        self, prompts: Iterable[Prompt | RolloutRequest], sampling: SamplingParams | None = None
    ) -> list[RolloutGroup]:
        """Roll out all prompts: one group per prompt, in input order; a bad prompt's has an ``error``.

        On a ZeRO-3 trainer every rank calls this, each with its own prompts, or none.
        """
        groups: dict[int, RolloutGroup] = {}
        others: list[_Delivery] = []

        def store(group: RolloutGroup) -> None:
            groups[group.index] = group

        with self._runner.together():  # all of it, so that a rank whose prompts are at fault stays in step
            requests = resolve_requests(prompts, sampling, seed=call_seed(self.seed, next(self._calls)))
            self._look_for_training(closely=True)
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
        self._counts["submitted"] += 1
        try:
            prompt = self._encoder.encode(request)
        except RequestError as error:
            self._counts["failed"] += 1
            self._delivered.append((failed_group(request, str(error)), on_finish))
            return
        stop_ids = self._endings.ids(request.sampling)
        running = Running.of(request, prompt, stop_ids, next(self._numbers), on_finish)
        self._running[running.state.group_id] = running
        if running.is_complete:  # all its samples were over when they came
            self._deliver(running)
        else:
            self.batch.add(running)

    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do or to deliver."""
        return bool(self._running or self._delivered)

    def any_rank_has_work(self) -> bool:
        """:meth:`has_work` of any rank of a ZeRO-3 trainer, whose ranks all ask at the same time."""
        partitioned = self._runner.partitioned
        return self.has_work() if partitioned is None else partitioned.any_rank(self.has_work())

    def step(self) -> list[RolloutGroup]:
        """Admit, compact, decode one token per row, retire. Returns the groups that are complete.

        On a ZeRO-3 trainer every rank steps as often as the others: ``while engine.any_rank_has_work()``.
        """
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
        if not self._with_id(request_id):
            return 0  # over already, or never here: nothing to wait for
        self.batch.settle()
        found = self._with_id(request_id)
        for running in found:
            self.batch.remove(running)
            self._deliver(running, cancelled=True)
        return len(found)

    def update_weights(self, version: int, kv: Literal["recompute", "keep"] = "recompute") -> None:
        """Write the staged weights of ``version`` now, between two steps; running samples go on with them.

        kv: what becomes of KV that the old weights made: ``recompute`` computes that of every running
        sample and held prompt again, ``keep`` leaves it. Every token says in ``token_versions`` which
        weights drew it. Raises :class:`RequestError` unless ``version`` is above the present one.
        """
        if version <= self.weight_version:
            raise RequestError(f"version {version} is not above the present one, {self.weight_version}")
        if self._has_no_weights:
            raise RequestError("the weights are asleep: call wake() before new ones are written")
        self._elastic.update_weights(version, recompute=kv == "recompute")
        if self._borrowed is not None:
            self._borrowed.look()

    def weights_changed(
        self, version: int | None = None, kv: Literal["recompute", "keep"] = "recompute"
    ) -> None:
        """A borrowed model has been trained: tokens are of this version from now on, by default the next.

        Needed where the engine cannot see it (``docs/colocated.md``), or for versions of one's own. kv: as in
        :meth:`update_weights`. On a ZeRO-3 trainer all ranks call this. Raises :class:`RequestError` for a
        model that the engine loaded itself, and for a version that is not above the present one.
        """
        if self._borrowed is None:
            raise RequestError("this engine loaded its model itself: nobody else changes its weights")
        self.update_weights(self.weight_version + 1 if version is None else version, kv=kv)

    @property
    def weight_version(self) -> int:
        """0 for the weights that the engine started with."""
        return self.batch.versions.current

    def sleep(self, weights: bool = False) -> None:
        """Give the memory of KV and of recorded steps back, to a trainer in the same process, say.

        weights: that of the weights too, which go from a GPU into host memory, and on a CPU into a temporary
        file, until :meth:`wake`. Until then the engine takes requests and runs none. Raises
        :class:`RequestError` while groups are running (finish or abort them first), and for the weights of a
        borrowed model.
        """
        if self._running:
            raise RequestError(f"{len(self._running)} groups are running: finish or abort them before sleep")
        if weights and self._borrowed is not None:
            raise RequestError("the weights are a trainer's, who has to move them: sleep without weights")
        self.batch.sleep(weights)
        self._is_asleep, self._has_no_weights = True, self._has_no_weights or weights

    def wake(self) -> None:
        """Take the memory that :meth:`sleep` gave back. What waited since then starts with the next step."""
        if self._is_asleep:
            self.batch.wake()
            self._is_asleep = self._has_no_weights = False

    def stats(self) -> EngineStats:
        """Counters since the engine started, and its state now."""
        return replace(self.batch.stats(), weight_version=self.weight_version, **self._counts)

    def close(self) -> None:
        """Let the other ranks of a tensor-parallel group end. The engine takes no more work."""
        self.batch.close()

    def _with_id(self, request_id: str | int) -> list[Running]:
        return [running for running in self._running.values() if running.request.request_id == request_id]

    def _advance(self) -> None:
        if self._is_asleep:
            raise RequestError("the engine is asleep: call wake() first")
        self._look_for_training()
        self._elastic.advance()

    def _look_for_training(self, closely: bool = False) -> None:
        """Learn whether a borrowed model has other weights than before."""
        if self._borrowed is not None and self._borrowed.has_changed(closely):
            self.weights_changed()

    def _fail(self, running: Running, reason: str) -> None:
        """A group is over, without samples."""
        del self._running[running.state.group_id]
        self._counts["failed"] += 1
        self._delivered.append((failed_group(running.request, reason), running.on_finish))

    def _store(self, seat: Seat, generated: Generated, aborted: bool) -> None:
        """A sample is over and has arrived; so may be its group."""
        running = seat.running
        versions = self.batch.versions_of(seat, generated.token_ids.size)
        sample = seat.sample(generated, self.tokenizer, versions, aborted=aborted)
        running.samples[seat.number] = sample
        self._counts["samples_finished"] += 1
        if running.is_complete and not aborted:
            self.batch.forget(running)
            self._deliver(running)

    def _deliver(self, running: Running, cancelled: bool = False) -> None:
        """All samples of a group are over: hand it out."""
        del self._running[running.state.group_id]
        group = running.finish(cancelled)
        self._delivered.append((group, running.on_finish))
        self._counts["cancelled" if cancelled else "failed" if group.error else "finished"] += 1
