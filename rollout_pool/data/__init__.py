"""Rollouts as a stage of Ray Data: a data set of prompts in, a data set of samples out.

::

    ds = ray.data.read_json("prompts/")
    samples = rollouts(ds, pool, SamplingParams(n=8), id_column="id", resume_from="samples/")
    samples.write_parquet("samples/")

Needs the extra ``data``. See docs/ray_data.md.
"""

from rollout_pool.data.rollouts import rollouts as rollouts
