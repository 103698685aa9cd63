"""A pool of real engines in a storm: processes killed and stopped, nodes lost, memory gone, weights replaced.

    python tests/chaos/storm.py [--seeds 20] [--first 0] [--events 10] [--json FILE]

A seed decides what happens when. All the while the same prompts are rolled out again and again, by two callers;
every answer must be the one of an undisturbed pool, token for token, and the pool's account must balance whenever
it is looked at. Prints, by kind of event, how many there were and how long it took until a new actor served.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout_pool import EngineConfig, PoolConfig, RolloutGroup, RolloutPool, RolloutRequest, SamplingParams
from rollout_pool.weight_sync import ship

ENGINE = EngineConfig(num_slots=4, max_length=128, deterministic="strict")
SAMPLING = SamplingParams(n=2, max_new_tokens=60, ignore_eos=True, seed=7)
PROMPTS = [RolloutRequest([5 + number], metadata=number) for number in range(10)]
DEADLINES = {"heartbeat_timeout_s": 8.0, "step_timeout_s": 8.0}
RECOVERY_S = 180.0
"""Far above what a recovery takes: it tells a pool that never recovers from one on a slow machine."""
CALL_S = 3600.0
"""Events may follow each other for so long that nothing gets done; a call that is over last is waited for."""


@dataclasses.dataclass
class Event:
    """Something that happened to a pool. ``recovery_s``: until a new actor served; None: none was needed."""

    kind: str
    actor: str
    at: float
    recovery_s: float | None = None


def contents(groups: list[RolloutGroup]) -> list[Any]:
    """What must not depend on what happened."""
    return [
        (group.index, group.metadata, group.error, [one.token_ids.tolist() for one in group.samples])
        for group in groups
    ]


def stop_engine(pid: int) -> None:
    """Wedge a process: it is there, and does nothing."""
    os.kill(pid, signal.SIGSTOP)


def slow_down(pid: int, seconds: float = 4.0) -> None:
    """Let a process run a tenth of the time."""

    def alternate() -> None:
        end = time.monotonic() + seconds
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < end:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.18)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.02)

    threading.Thread(target=alternate, daemon=True).start()


def run_short_of_memory(actor: Any, when: str) -> None:
    """Runs within a rollout actor: one of its next forward passes finds no memory."""
    import torch

    def refuse(engine: Any) -> None:
        model = engine.model

        def check(module: Any, arguments: Any, options: dict[str, Any]) -> None:
            is_prefill = options["input_ids"].shape[1] > 1 or options["input_ids"].shape[0] == 1
            if is_prefill == (when == "prefill"):
                hook.remove()
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        hook = model.register_forward_pre_hook(check, with_kwargs=True)

    actor._engine.call(refuse)


class Storm:
    """One pool on a cluster of its own, and what is done to it. ``ranks``: the tensor-parallel size."""

    def __init__(self, model: str, seed: int, ranks: int = 1) -> None:
        self.random = random.Random(seed)
        self.ranks = ranks
        self.events: list[Event] = []
        self.faults: list[str] = []
        self.num_waves = 0
        self._model = model
        self._deck: list[Callable[[], Event | None]] = []
        self._version = 0
        self._is_over = threading.Event()
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self._nodes = [self._add_node() for _ in range(2)]
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        config = PoolConfig(
            model=model,
            num_actors=2,
            tensor_parallel_size=ranks,
            cpus_per_actor=1,
            gpus_per_actor=0,
            engine=ENGINE,
            max_replays=1000,
            **DEADLINES,
        )
        on_head = NodeAffinitySchedulingStrategy(self._cluster.head_node.node_id, soft=False)
        self.pool = RolloutPool.options(scheduling_strategy=on_head).remote(config)
        ray.get(self.pool.ready.remote(), timeout=RECOVERY_S)
        self.expected = contents(ray.get(self.pool.rollout.remote(PROMPTS, SAMPLING), timeout=RECOVERY_S))
        assert all(error is None for _, _, error, _ in self.expected)

    def close(self) -> None:
        """End everything."""
        self._is_over.set()
        ray.shutdown()
        self._cluster.shutdown()

    def run(self, count: int) -> None:
        """So many events, while two callers roll out; then wait until the pool is whole again."""
        callers = [threading.Thread(target=self._roll_out, args=(way,)) for way in ("rollout", "stream")]
        watch = threading.Thread(target=self._watch)
        for thread in (*callers, watch):
            thread.start()
        try:
            for _ in range(count):
                time.sleep(self.random.uniform(0.2, 4.0))
                self._happen()
            self._wait_until_whole()
        finally:
            self._is_over.set()
            for thread in (*callers, watch):
                thread.join(RECOVERY_S)
                if thread.is_alive():
                    self.faults.append(f"{thread.name} hangs")

    def end(self) -> None:
        """Shut the pool down in the middle of a call, with an actor that does not answer."""
        call = self.pool.rollout.remote(PROMPTS, SAMPLING)
        time.sleep(self.random.uniform(0.0, 0.5))
        deadline = time.monotonic() + RECOVERY_S
        while not (members := self._members()):  # the last of them may just have been lost
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            stop_engine(self.random.choice(members)[1][0])
        ray.get(self.pool.shutdown.remote(), timeout=60)
        groups = ray.get(call, timeout=60)
        assert len(groups) == len(PROMPTS)
        for group, (_, _, _, tokens) in zip(groups, self.expected, strict=True):
            if group.error is None:
                assert [one.token_ids.tolist() for one in group.samples] == tokens
            else:
                assert "shut down" in group.error
        stats = self._balance()
        assert stats.in_flight == 0

    # What happens

    def _happen(self) -> None:
        """The next event of a shuffled deck, in which every kind is once."""
        if not self._deck:
            self._deck = self._kinds()
            self.random.shuffle(self._deck)
        happen, event = self._deck.pop(), None
        deadline = time.monotonic() + RECOVERY_S
        while event is None:  # nobody is there to whom it could happen, until the last events are over
            with contextlib.suppress(ProcessLookupError, ray.exceptions.RayError):
                event = happen()
            if event is None and time.monotonic() > deadline:
                self.faults.append(f"no actor to be struck for {RECOVERY_S:.0f} s")
                return
            time.sleep(0.1)
        self.events.append(event)

    def _kinds(self) -> list[Callable[[], Event | None]]:
        kinds: list[Callable[[], Event | None]] = [
            self._kill,
            self._stop,
            self._drop,
            self._lose_node,
            self._slow,
            self._sync,
            self._kill_in_sync,
            self._cancel,
        ]
        if self.ranks == 1:  # a rank of a group cannot run fewer rows than the others: it is lost instead
            kinds += [lambda: self._shortage("prefill"), lambda: self._shortage("decode")]
        return kinds

    def _kill(self) -> Event | None:
        return self._signal("killed", signal.SIGKILL)

    def _stop(self) -> Event | None:
        return self._signal("stopped", signal.SIGSTOP)

    def _signal(self, kind: str, number: signal.Signals) -> Event | None:
        if (member := self._victim()) is None:
            return None
        name, pids, _ = member
        at = time.monotonic()
        os.kill(self.random.choice(pids), number)
        return Event(kind, name, at)

    def _drop(self) -> Event | None:
        if (member := self._victim()) is None:
            return None
        at = time.monotonic()
        ray.kill(member[2])
        return Event("dropped", member[0], at)

    def _lose_node(self) -> Event | None:
        """A node goes and takes its actors along; another one comes."""
        if (member := self._victim()) is None:
            return None
        node = next((node for node in self._nodes if node.node_id == self._node_of(member[2])), None)
        if node is None:
            return None
        at = time.monotonic()
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)
        self._nodes.append(self._add_node())
        return Event("node lost", member[0], at)

    def _slow(self) -> Event | None:
        if (member := self._victim()) is None:
            return None
        slow_down(self.random.choice(member[1]))
        return Event("slow", "", time.monotonic())

    def _shortage(self, when: str) -> Event | None:
        if (member := self._victim()) is None:
            return None
        ray.get(member[2].__ray_call__.remote(run_short_of_memory, when), timeout=30)
        return Event(f"out of memory in {when}", "", time.monotonic())

    def _sync(self) -> Event:
        self._start_sync()
        return Event("weights synced", "", time.monotonic())

    def _kill_in_sync(self) -> Event | None:
        if (member := self._victim()) is None:
            return None
        sync = threading.Thread(target=self._start_sync)
        sync.start()
        time.sleep(self.random.uniform(0.0, 0.3))
        at = time.monotonic()
        try:
            os.kill(self.random.choice(member[1]), signal.SIGKILL)
        finally:
            sync.join(RECOVERY_S)
        return Event("killed in a sync", member[0], at)

    def _cancel(self) -> Event:
        call = self.pool.rollout.remote(PROMPTS, SAMPLING)
        time.sleep(self.random.uniform(0.0, 0.3))
        ray.cancel(call)
        return Event("caller left", "", time.monotonic())

    def _start_sync(self) -> None:
        """The same weights under the next version, so that tokens stay what they are."""
        from transformers import AutoModelForCausalLM

        policy = self.random.choice(["drain", "in_flight"])
        shipment = ship(AutoModelForCausalLM.from_pretrained(self._model))
        try:
            ray.get(self.pool.sync_weights.remote(shipment, policy=policy, timeout_s=60), timeout=RECOVERY_S)
        except ray.exceptions.RayTaskError as error:
            if not any(words in str(error) for words in ("goes on", "new ones get it", "a new one gets")):
                self.faults.append(f"a sync failed without telling what goes on: {error.cause}")

    # What is watched

    def _roll_out(self, way: str) -> None:
        while not self._is_over.is_set():
            try:
                if way == "rollout":
                    groups = ray.get(self.pool.rollout.remote(PROMPTS, SAMPLING), timeout=CALL_S)
                else:
                    groups = [ray.get(ref, timeout=CALL_S) for ref in self._stream()]
                    groups.sort(key=lambda group: group.index)
            except Exception as error:
                self.faults.append(f"{way}: {type(error).__name__}: {error}")
                return
            self.num_waves += 1
            # A group that was cut off for new weights and begins anew is the same; the account says the rest.
            if (found := contents(groups)) != self.expected:
                self.faults.append(
                    f"{way}: other groups than an undisturbed pool gives: {self._other(found)}"
                )

    def _other(self, found: list[Any]) -> str:
        pairs = list(zip(found, self.expected, strict=False))
        first = next((pair for pair in pairs if pair[0] != pair[1]), (len(found), len(self.expected)))
        return f"{first[0]} for {first[1]}"

    def _stream(self) -> Iterator[Any]:
        yield from self.pool.stream.remote(PROMPTS, SAMPLING)

    def _watch(self) -> None:
        """Look for new actors, and at the account."""
        while not self._is_over.is_set():
            try:
                names = ray.get(
                    self.pool.__ray_call__.remote(lambda pool: list(pool._crew.members)), timeout=60
                )
                for event in self.events:
                    if event.actor and event.recovery_s is None and _has_later(names, event.actor):
                        event.recovery_s = time.monotonic() - event.at
                self._balance()
            except Exception as error:
                self.faults.append(f"watch: {type(error).__name__}: {error}")
                return
            time.sleep(0.1)

    def _balance(self) -> Any:
        stats = ray.get(self.pool.stats.remote(), timeout=60)
        if stats.submitted != stats.returned + stats.failed + stats.cancelled + stats.in_flight:
            self.faults.append(f"the account does not balance: {stats}")
        return stats

    def _wait_until_whole(self) -> None:
        deadline = time.monotonic() + RECOVERY_S
        while any(event.actor and event.recovery_s is None for event in self.events):
            if time.monotonic() > deadline:
                late = [event for event in self.events if event.actor and event.recovery_s is None]
                self.faults.append(f"never recovered from {late}")
                return
            time.sleep(0.1)

    def _members(self) -> list[tuple[str, list[int], Any]]:
        """Name, process ids of all ranks, and handle of every actor that serves."""
        return ray.get(
            self.pool.__ray_call__.remote(
                lambda pool: [
                    (member.name, [rank.pid for rank in member.info.ranks], member.handle)
                    for member in pool._crew.members.values()
                ]
            ),
            timeout=60,
        )

    def _victim(self) -> tuple[str, list[int], Any] | None:
        """An actor that nothing has happened to yet."""
        struck = {event.actor for event in self.events}
        members = [member for member in self._members() if member[0] not in struck]
        return self.random.choice(members) if members else None

    def _node_of(self, handle: Any) -> str:
        return ray.get(
            handle.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()), timeout=30
        )

    def _add_node(self) -> Any:
        return self._cluster.add_node(num_cpus=2 * self.ranks)


def _has_later(names: list[str], lost: str) -> bool:
    """Whether an actor serves that came in the place of ``lost``."""
    stem, _, generation = lost.partition(".")
    later = (name.partition(".") for name in names)
    return any(s == stem and int(g or 0) > int(generation or 0) for s, _, g in later)


def summary(storms: list[list[Event]]) -> list[dict[str, Any]]:
    """By kind of event: how many, and the median and the longest time until a new actor served."""
    kinds: dict[str, list[Event]] = defaultdict(list)
    for event in (event for events in storms for event in events):
        kinds[event.kind].append(event)
    lines = []
    for kind, events in sorted(kinds.items()):
        times = [event.recovery_s for event in events if event.recovery_s is not None]
        lines.append(
            {
                "kind": kind,
                "events": len(events),
                "recovered": len(times) if any(event.actor for event in events) else None,
                "median_s": round(statistics.median(times), 1) if times else None,
                "max_s": round(max(times), 1) if times else None,
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--events", type=int, default=10, help="per seed")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    storms: list[Storm] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        model = tiny_model(folder)
        for seed in range(options.first, options.first + options.seeds):
            storms.append(storm := rage(model, seed, options.events))
            faults = ", ".join(storm.faults) or "nothing lost or different"
            print(f"seed {seed}: {len(storm.events)} events, {storm.num_waves} calls, {faults}", flush=True)
    lines = summary([storm.events for storm in storms])
    print(f"\n{'event':26}{'count':>6}{'recovered':>11}{'median s':>10}{'max s':>8}")
    for line in lines:
        cells = ["" if line[key] is None else str(line[key]) for key in ("recovered", "median_s", "max_s")]
        print(f"{line['kind']:26}{line['events']:>6}{cells[0]:>11}{cells[1]:>10}{cells[2]:>8}")
    calls, failed = sum(storm.num_waves for storm in storms), sum(bool(storm.faults) for storm in storms)
    print(f"{len(storms) - failed} of {len(storms)} seeds passed, {calls} calls")
    if options.json:
        options.json.write_text(json.dumps({"seeds": len(storms), "calls": calls, "events": lines}))
    raise SystemExit(1 if failed or len(storms) < options.seeds else 0)


def rage(model: str, seed: int, events: int) -> Storm:
    """One storm from start to end; every fourth is over tensor-parallel groups of two ranks."""
    storm = Storm(model, seed, ranks=2 if seed % 4 == 3 else 1)
    try:
        storm.run(events)
        storm.end()
    finally:
        storm.close()
    return storm


def tiny_model(folder: str) -> str:
    """A random Llama in the Hugging Face format, lively enough for tokens to differ."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
