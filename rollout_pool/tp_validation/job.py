"""All sizes in all dtypes. The single rank comes last, for it rescores the samples of the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rollout_pool.actors.rank_records import RollPlan
from rollout_pool.config import Dtype, PoolConfig
from rollout_pool.tp_validation.findings import findings
from rollout_pool.tp_validation.measured import AfterLoad, Launch, Say, measure, measure_and_rescore
from rollout_pool.tp_validation.report import Report, Row
from rollout_pool.tp_validation.tolerances import Tolerances


def validate(
    config: PoolConfig,
    plan: RollPlan,
    sizes: Sequence[int],
    dtypes: Sequence[Dtype],
    tolerances: Mapping[str, Tolerances],
    launch: Launch,
    say: Say = lambda _: None,
    after_load: AfterLoad | None = None,
    *,
    single_on_cpu: bool = False,
) -> Report:
    """Measure every size in every dtype and compare each with the single rank, which is added if need be.

    ``single_on_cpu``: the single rank runs on cores, for a model that no device holds alone.
    A size that is refused or fails takes nothing from the others. Raises ConfigError when the model
    cannot be loaded at all.
    """
    rows: list[Row] = []
    for dtype in dtypes:
        others = [
            measure(_of(config, size, dtype), plan, launch, say, after_load) for size in sizes if size > 1
        ]
        alone = _of(config, 1, dtype, on_cpu=single_on_cpu)
        single, rescored = measure_and_rescore(alone, plan, launch, say, after_load, others)
        for outcome in (single, *others):
            scored = dataclasses.replace(outcome, rescored=rescored.get(outcome.size))
            rows.append(Row(scored, findings(scored, single, tolerances[dtype])))
    return Report(config.model, config.tensor_parallel_backend, plan, rows)


def _of(config: PoolConfig, size: int, dtype: Dtype, *, on_cpu: bool = False) -> PoolConfig:
    changes = {"tensor_parallel_size": size, "num_actors": 1, "dtype": dtype}
    # Prompts that are kept would be computed neither once for all samples nor once for each.
    shared = {"engine": config.engine.model_copy(update={"prefix": "expand", "prefix_cache_tokens": 0})}
    return config.model_copy(update={**changes, **shared, **({"gpus_per_actor": 0} if on_cpu else {})})
