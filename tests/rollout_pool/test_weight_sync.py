"""Weights from a trainer to the actors of a pool: all of them, or none."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM
from waiting import stats_of_all, wait_until

from rollout_pool import (
    ConfigError,
    EngineConfig,
    PoolConfig,
    RolloutGroup,
    RolloutPool,
    RolloutRequest,
    SamplingParams,
    WeightSyncError,
    verify,
)
from rollout_pool.weight_sync import Shipment, WeightSource, ship

pytestmark = pytest.mark.usefixtures("cluster")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

ENGINE = EngineConfig(num_slots=4, max_length=256)
SAMPLING = SamplingParams(n=2, max_new_tokens=12, ignore_eos=True, seed=7)
LONG = SamplingParams(n=2, max_new_tokens=200, ignore_eos=True, seed=7)
PROMPTS = [RolloutRequest([5 + number, 9], metadata=number) for number in range(8)]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def pool(tiny_model_dir: str, cluster: None):
    config = PoolConfig(model=tiny_model_dir, num_actors=2, cpus_per_actor=1, engine=ENGINE)
    handle = RolloutPool.remote(config)
    ray.get(handle.ready.remote(), timeout=180)
    yield handle
    ray.kill(handle)


@pytest.fixture(scope="module")
def serving(pool, tiny_model_dir: str) -> dict[str, Any]:
    """The model that the pool should be serving; tests that sync put theirs here."""
    return {"model": load(tiny_model_dir)}


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def trainer(serving: dict[str, Any], tiny_model_dir: str) -> Any:
    """Other weights than those that are served."""
    model = load(tiny_model_dir)
    with torch.no_grad():
        for parameter, served in zip(model.parameters(), serving["model"].parameters(), strict=True):
            parameter.copy_(served + torch.randn_like(served) * 0.05)
    return model


def sync(pool, source: Any, version: int | None = None, **options: Any) -> list:
    return ray.get(pool.sync_weights.remote(source, version, **options), timeout=180)


def refused(pool, source: Any, version: int | None = None, **options: Any) -> str:
    with pytest.raises((WeightSyncError, ConfigError)) as caught:
        sync(pool, source, version, **options)
    return str(caught.value.cause)


def roll(pool, sampling: SamplingParams = SAMPLING) -> list[RolloutGroup]:
    return ray.get(pool.rollout.remote(PROMPTS, sampling), timeout=180)


def assert_serves(pool, model: Any, actors: int = 2) -> None:
    """Whole groups at the pool's version, with the log-probabilities of ``model``; from every actor."""
    version, groups = stats_of_all(pool).weight_version, roll(pool)
    assert verify(groups, model).max_abs_diff < 1e-3
    assert {s.weight_version for group in groups for s in group.samples} == {version}
    assert len({group.timing.actor for group in groups}) == actors


def test_every_rank_gives_a_receipt_and_the_pool_serves_the_trainers_model(pool, serving, trainer) -> None:
    assert_serves(pool, serving["model"])
    before = stats_of_all(pool).weight_version
    receipts = sync(pool, ship(trainer, bucket_bytes=50_000))
    serving["model"] = trainer
    assert [(r.actor, r.rank, r.version) for r in receipts] == [
        ("actor-0", 0, before + 1), ("actor-1", 0, before + 1)
    ]  # fmt: skip
    weights = dict(trainer.named_parameters())
    assert {(r.num_tensors, r.num_bytes) for r in receipts} == {
        (len(weights), sum(p.nbytes for p in weights.values()))
    }
    assert len({r.checksum for r in receipts}) == len({r.weights_checksum for r in receipts}) == 1
    assert all(r.commit_s > 0 and r.stage_s > 0 for r in receipts)
    assert_serves(pool, trainer)
    assert {engine.weight_version for engine in stats_of_all(pool).actors} == {before + 1}


def test_pool_ships_a_state_dict_or_a_checkpoint_itself(pool, serving, trainer, tmp_path) -> None:
    trainer.save_pretrained(tmp_path / "checkpoint")
    sync(pool, str(tmp_path / "checkpoint"))
    assert_serves(pool, trainer)
    with torch.no_grad():
        trainer.model.norm.weight.mul_(1.5)
    sync(pool, trainer.state_dict())
    serving["model"] = trainer
    assert_serves(pool, trainer)


def damaged(trainer: Any, fault: str) -> Any:
    values = dict(trainer.state_dict())
    if fault == "missing":
        del values[UP]
    elif fault == "shape":
        values[UP] = values[UP].t()
    elif fault == "nan":
        values[UP][0, 0] = float("nan")
    shipment = ship(values, bucket_bytes=30_000)
    assert shipment is not None
    if fault == "skipped":
        at = next(
            number
            for number, bucket in enumerate(ray.get(list(shipment.buckets)))
            if UP in [record.name for record in bucket.records]
        )
        kept = shipment.buckets[:at] + shipment.buckets[at + 1 :]
        shipment = dataclasses.replace(shipment, buckets=kept)
    return shipment


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing", f"{UP} is missing"),
        ("shape", f"{UP} has shape [64, 128], here it is [128, 64]"),
        ("nan", f"{UP} holds NaN or infinity"),
        ("skipped", f"{UP} did not arrive"),
    ],
)
def test_update_at_fault_is_named_and_the_old_weights_serve_on(pool, serving, trainer, fault, said) -> None:
    before = stats_of_all(pool)
    message = refused(pool, damaged(trainer, fault))
    assert message.startswith("actor-")
    assert said in message
    assert message.endswith(f"; version {before.weight_version} goes on")
    assert_serves(pool, serving["model"])
    after = stats_of_all(pool)
    assert (after.weight_version, after.actors_lost) == (before.weight_version, before.actors_lost)


def test_versions_only_grow(pool, serving, trainer) -> None:
    present = stats_of_all(pool).weight_version
    shipment = ship(trainer)
    for version in (present, present - 1, -3):
        assert refused(pool, shipment, version) == (
            f"version {version} is not above {present}, which the pool has; nothing was changed"
        )
    assert "must be an integer" in refused(pool, shipment, "two")  # type: ignore[arg-type]
    assert_serves(pool, serving["model"])
    receipts = sync(pool, shipment, present + 10)
    serving["model"] = trainer
    assert {receipt.version for receipt in receipts} == {present + 10}
    assert_serves(pool, trainer)


def test_what_is_not_known_is_refused(pool, serving, trainer) -> None:
    assert "policy: must be one of drain, abort, in_flight" in refused(pool, ship(trainer), policy="wait")
    assert "kv: must be one of" in refused(pool, ship(trainer), kv="maybe")
    assert "takes a Shipment" in refused(pool, 5)
    assert "is neither a folder nor a file" in refused(pool, "/nowhere/at/all")
    assert_serves(pool, serving["model"])


def test_syncs_run_one_after_the_other(pool, serving, trainer) -> None:
    present = stats_of_all(pool).weight_version
    other = {name: tensor * 1.01 for name, tensor in trainer.state_dict().items()}
    calls = [pool.sync_weights.remote(ship(source)) for source in (other, trainer)]
    first, second = ray.get(calls, timeout=180)
    assert [first[0].version, second[0].version] == [present + 1, present + 2]
    serving["model"] = trainer
    assert_serves(pool, trainer)


# While samples are running


def start_long(pool) -> Any:
    """Groups that run now, unless they are done already: the machine may be busy."""
    call = pool.rollout.remote(PROMPTS, LONG)

    def is_running() -> bool:
        return any(e.live_rows for e in stats_of_all(pool).actors) or bool(ray.wait([call], timeout=0)[0])

    wait_until(is_running, "nothing runs")
    return call


def sync_amid(
    pool, trainer: Any, is_amid: Callable[[list[RolloutGroup], int], bool], **options: Any
) -> tuple[int, list[RolloutGroup]]:
    """Sync while groups run, again until it was not too late for them: the version before, and the groups."""
    deadline = time.monotonic() + 120
    while True:
        shipment, old = ship(trainer), stats_of_all(pool).weight_version
        call = start_long(pool)
        sync(pool, shipment, **options)
        groups = ray.get(call, timeout=180)
        if is_amid(groups, old):
            return old, groups
        assert time.monotonic() < deadline, "it was always too late"


def are_aborted(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    return [group for group in groups if any(s.finish_reason == "aborted" for s in group.samples)]


def have_both(groups: list[RolloutGroup], old: int) -> bool:
    """Whether there is a sample with tokens of this version and of the next one."""
    return any({*s.token_versions.tolist()} == {old, old + 1} for g in groups for s in g.samples)


def test_drain_lets_running_groups_finish_with_the_old_weights(pool, serving, trainer) -> None:
    shipment, old = ship(trainer), stats_of_all(pool).weight_version
    call = start_long(pool)
    sync(pool, shipment, policy="drain")
    groups = ray.get(call, timeout=180)
    versions = [{int(v) for s in g.samples for v in s.token_versions} for g in groups]
    assert all(len(found) == 1 for found in versions)
    assert set().union(*versions) <= {old, old + 1}
    assert {old} in versions
    assert all(s.finish_reason == "length" for g in groups for s in g.samples)
    served = [g for g, found in zip(groups, versions, strict=True) if found == {old}]
    assert verify(served, serving["model"]).max_abs_diff < 1e-3
    serving["model"] = trainer
    assert verify([g for g in groups if g not in served], trainer).max_abs_diff < 1e-3
    assert_serves(pool, trainer)


def test_abort_returns_what_there_is_and_it_can_be_resumed(pool, serving, trainer) -> None:
    old, groups = sync_amid(pool, trainer, lambda groups, _: bool(are_aborted(groups)), policy="abort")
    aborted = are_aborted(groups)
    for group in aborted:
        assert any(s.token_ids.size for s in group.samples)
        assert {int(v) for s in group.samples for v in s.token_versions} == {old}
    whole = [g for g in groups if g not in aborted]
    assert all(s.token_ids.size == 200 for g in whole for s in g.samples)
    serving["model"] = trainer
    rest = [
        RolloutRequest(
            g.prompt_token_ids.tolist(), sampling=LONG, resume=[s for s in g.samples if s.token_ids.size]
        )
        for g in aborted
    ]
    for before, after in zip(aborted, ray.get(pool.rollout.remote(rest), timeout=180), strict=True):
        resumed = {sample.sample_index: sample for sample in after.samples}
        for sample in (s for s in before.samples if s.token_ids.size):
            found = resumed[sample.sample_index]
            assert found.token_ids.size == 200
            np.testing.assert_array_equal(found.token_ids[: sample.token_ids.size], sample.token_ids)
            assert found.token_versions[-1] == old + 1
    assert_serves(pool, trainer)


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_in_flight_changes_weights_between_two_tokens(pool, serving, trainer, kv) -> None:
    _, groups = sync_amid(pool, trainer, have_both, policy="in_flight", kv=kv)
    versions = [s.token_versions for g in groups for s in g.samples]
    assert all((np.diff(found) >= 0).all() for found in versions)
    assert all(s.finish_reason == "length" for g in groups for s in g.samples)
    serving["model"] = trainer
    assert_serves(pool, trainer)


def test_weights_that_are_not_everywhere_in_time_are_given_up(pool, serving, trainer) -> None:
    silent, call = Trainer.remote(trainer, 0, lambda: time.sleep(600)), start_long(pool)
    assert "were not everywhere within timeout_s (0.5 s)" in refused(pool, silent, timeout_s=0.5)
    ray.kill(silent)
    assert all(g.error is None for g in ray.get(call, timeout=180))
    assert_serves(pool, serving["model"])


# What dies on the way


def member_call(pool, function: Callable[..., Any]) -> Any:
    return ray.get(pool.__ray_call__.remote(function), timeout=60)


def whole(pool, actors: int = 2) -> None:
    wait_until(lambda: stats_of_all(pool).num_actors == actors, "the lost actor was not replaced")


def test_what_comes_late_of_a_sync_that_was_given_up_is_not_taken_for_the_next(
    pool, serving, trainer
) -> None:
    def hold(self) -> None:
        stage = self._weights.stage
        self._weights.stage = lambda *bucket: (time.sleep(1.0), stage(*bucket))

    handles = member_call(pool, lambda self: [m.handle for m in self._crew.members.values()])
    ray.get([handle.__ray_call__.remote(hold) for handle in handles], timeout=60)
    other = copy.deepcopy(trainer)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    assert "were not everywhere" in refused(pool, ship(other, bucket_bytes=50_000), timeout_s=0.5)
    sync(pool, ship(trainer, bucket_bytes=50_000))
    serving["model"] = trainer
    assert_serves(pool, trainer)
    ray.get([handle.__ray_call__.remote(lambda self: delattr(self._weights, "stage")) for handle in handles])


@pytest.mark.slow
def test_replacement_has_the_present_weights_before_it_serves(pool, serving, trainer) -> None:
    whole(pool)
    sync(pool, ship(trainer))
    serving["model"] = trainer
    lost = stats_of_all(pool).actors_lost
    os.kill(ray.get(pool.ready.remote())[0].pid, signal.SIGKILL)
    assert verify(roll(pool), trainer).max_abs_diff < 1e-3  # whoever is left
    wait_until(lambda: stats_of_all(pool).actors_lost == lost + 1, "nobody noticed")
    whole(pool)
    assert_serves(pool, trainer)
    now = stats_of_all(pool)
    assert {engine.weight_version for engine in now.actors} == {now.weight_version}


@pytest.mark.slow
def test_actor_that_is_killed_during_a_sync_does_not_keep_the_others_from_it(pool, serving, trainer) -> None:
    whole(pool)

    def hold(self) -> None:
        """One actor that begins to stage and does not get on."""

        def stage(*_: Any) -> None:
            self.has_begun = True
            time.sleep(600)

        self.has_begun, self._weights.stage = False, stage

    handles = member_call(pool, lambda self: [m.handle for m in self._crew.members.values()])
    ray.get(handles[0].__ray_call__.remote(hold), timeout=60)
    pid = ray.get(handles[0].place.remote()).pid
    call = pool.sync_weights.remote(ship(trainer, bucket_bytes=50_000))
    has_begun = lambda: ray.get(handles[0].__ray_call__.remote(lambda self: self.has_begun))  # noqa: E731
    wait_until(has_begun, "nothing is staged")
    os.kill(pid, signal.SIGKILL)
    receipts = ray.get(call, timeout=120)
    assert len(receipts) == 1
    serving["model"] = trainer
    whole(pool)
    assert_serves(pool, trainer)


@pytest.mark.slow
def test_actor_that_cannot_write_is_replaced_by_one_that_has_the_weights(pool, serving, trainer) -> None:
    whole(pool)

    def break_writing(self) -> None:
        def fail(version: int) -> None:
            raise RuntimeError("no room")

        self._weights.commit = fail

    handles = member_call(pool, lambda self: [m.handle for m in self._crew.members.values()])
    ray.get(handles[1].__ray_call__.remote(break_writing), timeout=60)
    lost = stats_of_all(pool).actors_lost
    receipts = sync(pool, ship(trainer))
    serving["model"] = trainer
    assert len(receipts) == 1
    assert stats_of_all(pool).actors_lost == lost + 1
    assert verify(roll(pool), trainer).max_abs_diff < 1e-3
    whole(pool)
    assert_serves(pool, trainer)


@ray.remote(num_cpus=0)
class Trainer(WeightSource):
    """A trainer in a process of its own; something may happen before one of its tensors."""

    def __init__(self, model: Any, at: int | None = None, happens: Callable[[], Any] | None = None) -> None:
        self._model, self._at, self._happens = model, at, happens

    def rollout_weights(self) -> Any:
        for number, (name, parameter) in enumerate(self._model.named_parameters()):
            if number == self._at:
                self._happens()
            yield name, parameter

    def weight_buckets(self, bucket_bytes: int = 0) -> Any:
        yield from super().weight_buckets(30_000)


@pytest.mark.slow
def test_trainer_that_is_an_actor_is_asked_for_its_weights(pool, serving, trainer) -> None:
    actor = Trainer.remote(trainer)
    receipts = sync(pool, actor)
    serving["model"] = trainer
    assert receipts[0].num_tensors == len(dict(trainer.named_parameters()))
    assert_serves(pool, trainer)
    ray.kill(actor)
    lost = stats_of_all(pool).actors_lost
    os.kill(ray.get(pool.ready.remote())[1].pid, signal.SIGKILL)  # its buckets outlive the trainer
    wait_until(lambda: stats_of_all(pool).actors_lost == lost + 1, "nobody noticed")
    whole(pool)
    assert_serves(pool, trainer)


def test_trainer_that_is_killed_in_the_middle_leaves_the_old_weights(pool, serving, trainer) -> None:
    before = stats_of_all(pool)
    actor = Trainer.remote(trainer, 5, lambda: os.kill(os.getpid(), signal.SIGKILL))
    call = pool.sync_weights.remote(actor)
    with pytest.raises(WeightSyncError, match="the trainer failed while it sent its weights"):
        ray.get(call, timeout=120)
    after = stats_of_all(pool)
    assert (after.weight_version, after.actors_lost) == (before.weight_version, before.actors_lost)
    assert_serves(pool, serving["model"])


def test_trainer_that_fails_says_why(pool, serving, trainer) -> None:
    def diverge() -> None:
        raise RuntimeError("the optimizer diverged")

    message = refused(pool, Trainer.remote(trainer, 5, diverge))
    assert "the optimizer diverged" in message
    assert_serves(pool, serving["model"])


def test_shipment_is_nothing_without_its_buckets(pool, serving, trainer) -> None:
    shipment = ship(trainer)
    assert isinstance(shipment, Shipment)
    message = refused(pool, dataclasses.replace(shipment, buckets=()))
    assert message.count("did not arrive") == 8
    assert "(and " in message
    assert_serves(pool, serving["model"])
