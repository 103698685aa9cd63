"""All checks in their order: a later one is skipped when an earlier one has shown that it cannot work."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rollout_pool.doctor import devices, packages, process, storage
from rollout_pool.doctor.check import Check, Checks, guarded, skipped
from rollout_pool.doctor.devices import Gpus

if TYPE_CHECKING:
    from rollout_pool.config import PoolConfig
    from rollout_pool.run_config import RunConfig

T = TypeVar("T")

RING_TIMEOUT_S = 300.0
NO_CONFIG = "no configuration was given (--config FILE)"


@dataclass(frozen=True)
class Wanted:
    """What is to be checked."""

    config: Path | None
    output: Path
    timeout_s: float | None
    """Of the engine's start; None: as the configuration says."""
    cluster: Callable[[], AbstractContextManager[None]]
    """Connects to Ray, or starts it."""
    joins: bool = False
    """The cluster is there already, so what engines need may be on its other nodes."""


def examine(wanted: Wanted) -> Generator[tuple[str, Check], None, None]:
    """Every check with its subject, as soon as it is over."""
    yield from _about("environment", _environment())
    config = yield from _about("configuration", _configuration(wanted))
    asked_for = config is not None and bool(config.gpus_per_actor) and not wanted.joins
    gpus = yield from _about("devices", _devices(asked_for))
    local, fits = yield from _about("model", _model(config, wanted.joins))
    yield from _about("storage", guarded("output", storage.check_output, wanted.output))
    yield from _about("cluster", _cluster(wanted, local, fits, gpus))


def _about(subject: str, checks: Checks[T]) -> Generator[tuple[str, Check], None, T]:
    while True:
        try:
            check = next(checks)
        except StopIteration as end:
            value: T = end.value
            return value
        yield subject, check


def _environment() -> Checks[None]:
    environment = process.first_environment()
    yield from guarded("Python", packages.check_python)
    yield from guarded("packages", packages.check_packages)
    yield from guarded("kernels", packages.check_kernels)
    yield from guarded("module path", packages.check_shadows, packages.leading_places(environment))
    yield from guarded("threads", process.check_threads, environment)
    yield from guarded("open files", process.check_open_files)


def _configuration(wanted: Wanted) -> Checks[RunConfig | None]:
    if wanted.config is None:
        yield skipped("configuration", NO_CONFIG)
        return None
    config = yield from guarded("configuration", _of_model("check_config"), wanted.config)
    extras = ["deepspeed"] if config is not None and config.tensor_parallel_backend == "deepspeed" else []
    extras += ["parquet"] if wanted.output.suffix == ".parquet" else []
    for extra in extras:
        yield from guarded(f"extra {extra}", packages.check_extra, extra)
    return config


def _devices(asked_for: bool) -> Checks[Gpus]:
    gpus = (yield from guarded("torch build", devices.check_torch)) or Gpus()
    yield from guarded("GPU", devices.check_gpus, gpus, asked_for)
    yield from guarded("Triton", devices.check_triton, gpus, asked_for)
    return gpus


def _model(config: RunConfig | None, joins: bool) -> Checks[tuple[PoolConfig | None, bool]]:
    """The configuration with the model's folder, when there is one, and whether it fits."""
    local = None if config is None else (yield from guarded("model", _of_model("check_model"), config))
    if local is None:
        why = NO_CONFIG if config is None else "the model cannot be read"
        for name in ("tokenizer", "supported", "memory"):
            yield skipped(name, why)
        return None, False
    yield from guarded("tokenizer", _of_model("check_tokenizer"), local)
    fits = yield from guarded("memory", _of_model("check_memory"), local, joins)
    return local, bool(fits)


def _of_model(name: str) -> Callable[..., Checks[Any]]:
    """A check of :mod:`rollout_pool.doctor.model`, which can be imported only where all packages are."""

    def check(*arguments: Any) -> Checks[Any]:
        return (yield from getattr(import_module("rollout_pool.doctor.model"), name)(*arguments))

    return check


def _cluster(wanted: Wanted, config: PoolConfig | None, fits: bool, gpus: Gpus) -> Checks[None]:
    started = False

    def on_cluster() -> Checks[None]:
        nonlocal started
        with wanted.cluster():
            started = True
            yield from _on_cluster(wanted, config, fits, gpus)

    yield from guarded("Ray", on_cluster)
    if not started:
        for name in ("room for actors", "ring", "engine"):
            yield skipped(name, "Ray does not start")


def _on_cluster(wanted: Wanted, config: PoolConfig | None, fits: bool, gpus: Gpus) -> Checks[None]:
    from rollout_pool.doctor import cluster, engine, ring

    yield from guarded("Ray", cluster.check_cluster)
    yield from guarded("GPUs in Ray", cluster.check_gpus_agree, gpus)
    yield from guarded("shared memory", storage.check_shared_memory, cluster.store_bytes_here())
    yield from guarded("Ray's disk", storage.check_session_disk, cluster.session_folder())
    asked = None if config is None else (yield from guarded("room for actors", cluster.check_room, config))
    if config is None or asked is None:
        why = (
            "there is no configuration whose actors could be started"
            if config is None
            else "there is no room"
        )
        for name in ("ring", "engine"):
            yield skipped(name, why)
        return
    timeout_s = wanted.timeout_s or config.start_timeout_s
    yield from guarded("ring", ring.check_ring, config, asked, min(timeout_s, RING_TIMEOUT_S))
    if fits:
        yield from guarded("engine", engine.check_engine, config, asked, timeout_s)
    else:
        yield skipped("engine", "what failed above would keep it from starting")
