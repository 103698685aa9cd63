"""The stage: what it asks of Ray Data, and of the pool."""

from __future__ import annotations

import inspect
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rollout_pool.config import PoolConfig
from rollout_pool.errors import CapacityError, ConfigError
from rollout_pool.launch import RolloutPool
from rollout_pool.types import SamplingParams

if TYPE_CHECKING:
    from ray.data import Dataset

LOOKS = 5
"""At the cores that are free: some are in use for a moment only."""
LOOK_INTERVAL_S = 0.3


def rollouts(
    ds: Dataset,
    pool: Any,
    sampling: SamplingParams | None = None,
    *,
    prompt_column: str = "prompt",
    id_column: str | None = None,
    batch_size: int = 16,
    concurrency: int = 8,
    resume_from: str | Path | None = None,
) -> Dataset:
    """Roll out every row of ``ds``; a data set with one row per sample, computed when it is consumed.

    Its columns are those of the row that was rolled out, and of the sample: ``request_id``,
    ``prompt_token_ids``, ``sample_index``, ``text``, ``token_ids``, ``logprobs``, ``sampling_logprobs``,
    ``finish_reason``, ``stop_match``, ``stop_token_id``, ``weight_version``, ``seed`` and ``error``. A prompt
    that failed has one row, with ``error`` and no sample.

    Args:
        ds: its rows have a prompt each: text, token ids or chat messages.
        pool: the handle of a pool; or a configuration, of which a pool is started now that lasts as long as
            the data set.
        sampling: of every prompt; ``seed`` None stands for 0, so that a run that is repeated, or resumed, has
            the same samples.
        prompt_column: where the prompts are.
        id_column: what a row is called, once in all of ``ds``; samples are drawn by that name, whatever the
            order of rows and blocks. None: by the contents of the row, so that rows that are equal in all
            columns have equal samples.
        batch_size: prompts that go to the pool in one call, and come out as one block.
        concurrency: calls at once. No more than ``batch_size * concurrency`` prompts are in the pool, which
            should be some more than its slots hold.
        resume_from: where samples of an earlier, interrupted run were written as Parquet or JSON lines. What
            is there is not computed again.

    Raises :class:`ConfigError`, also when a column is missing or has the name of a column that is to be made.
    """
    _require_ray_data()
    from rollout_pool.data.finished import read_finished
    from rollout_pool.data.stage import Stage, check_columns

    for name, value in (("batch_size", batch_size), ("concurrency", concurrency)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}: must be an integer from 1, got {value!r}")
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise ConfigError(f"sampling must be SamplingParams, got {type(sampling).__name__}")
    sampling = sampling or SamplingParams()
    known = ds.schema(fetch_if_missing=False)
    if known is not None:
        check_columns(known.names, prompt_column, id_column)
    arguments = {
        "pool": _pool(pool),
        "sampling": sampling,
        "prompt_column": prompt_column,
        "id_column": id_column,
        "finished": read_finished(resume_from, sampling.n) if resume_from is not None else None,
    }
    return ds.repartition(target_num_rows_per_block=batch_size).map_batches(
        Stage,
        fn_constructor_kwargs=arguments,
        batch_size=batch_size,
        batch_format="pyarrow",
        num_cpus=0,
        **_one_process(concurrency),
    )


def _one_process(concurrency: int) -> dict[str, Any]:
    """How Ray Data is told to have one process with so many calls at once: its versions differ."""
    strategy: Any = ray.data.ActorPoolStrategy
    if "max_concurrent_calls_per_actor" in inspect.signature(strategy).parameters:
        return {"compute": strategy(size=1, max_concurrent_calls_per_actor=concurrency)}
    return {"concurrency": 1, "max_concurrency": concurrency}


def _pool(pool: Any) -> Any:
    """The handle of a pool that is up and leaves Ray Data a core."""
    if isinstance(pool, PoolConfig):
        pool = RolloutPool.remote(with_a_core_left(pool))
    elif not (hasattr(pool, "rollout") and hasattr(pool, "stats")):
        raise ConfigError(f"pool must be the handle of a pool or a PoolConfig, got {type(pool).__name__}")
    ray.get(pool.ready.remote())
    for _ in range(LOOKS):
        if ray.available_resources().get("CPU", 0) >= 1:
            return pool
        time.sleep(LOOK_INTERVAL_S)
    warnings.warn(
        "no core of the cluster is free, and Ray Data needs one to read and write: set cpus_per_actor of the "
        "pool so that one is left, or it waits until one is",
        stacklevel=3,
    )
    return pool


def with_a_core_left(config: PoolConfig) -> PoolConfig:
    """A pool on cores takes all of them where it is not told how many."""
    total = ray.cluster_resources()
    on_gpus = config.gpus_per_actor or (config.gpus_per_actor is None and total.get("GPU", 0) >= 1)
    if config.cpus_per_actor is not None or on_gpus:
        return config
    cores, num_ranks = int(total.get("CPU", 0)), config.num_actors * config.tensor_parallel_size
    if cores <= num_ranks:
        raise CapacityError(
            f"num_actors: {num_ranks} ranks leave none of {cores} cores to Ray Data, which needs one to read "
            "and write; lower it"
        )
    return config.model_copy(update={"cpus_per_actor": (cores - 1) // num_ranks})


def _require_ray_data() -> None:
    try:
        import ray.data  # noqa: F401
    except ImportError as error:
        remedy = "install it with: pip install 'rollout-pool[data]'"
        raise ConfigError(f"Ray Data cannot be imported ({error}); {remedy}") from None
