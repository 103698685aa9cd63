"""Rollouts as a stage of Ray Data: the samples of `pool.rollout`, whatever the blocks, and none twice."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from waiting import wait_until

from rollout_pool import (
    CapacityError,
    ConfigError,
    EngineConfig,
    PoolConfig,
    RolloutPool,
    RolloutRequest,
    SamplingParams,
)

pytest.importorskip("pandas", reason="Ray Data needs pandas")
import pyarrow as pa
import pyarrow.parquet as pq

from rollout_pool.data import rollouts
from rollout_pool.data.rollouts import with_a_core_left

SAMPLING = SamplingParams(n=2, max_new_tokens=8, ignore_eos=True, stop_token_ids=(30, 31, 32, 33))
TEXTS = [f"the text of row {number}" for number in range(11)]
PROMPTS: list[Any] = ["" if number == 7 else text for number, text in enumerate(TEXTS)]
ROWS = [{"id": number, "prompt": prompt, "answer": f"a{number}"} for number, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def config(tiny_model_dir: str) -> PoolConfig:
    engine = EngineConfig(num_slots=4, max_length=64, deterministic="strict")
    return PoolConfig(model=tiny_model_dir, cpus_per_actor=1, engine=engine)


@pytest.fixture(scope="module")
def pool(cluster: None, config: PoolConfig) -> Iterator[Any]:
    ray.data.DataContext.get_current().enable_progress_bars = False
    handle = RolloutPool.remote(config.model_copy(update={"num_actors": 2}))
    yield handle
    ray.kill(handle)


@pytest.fixture(scope="module")
def expected(pool: Any) -> dict[tuple[str, int | None], list[int] | None]:
    """Tokens by id and sample, from `pool.rollout`."""
    requests = [RolloutRequest(row["prompt"], request_id=row["id"], seed=0) for row in ROWS]
    found: dict[tuple[str, int | None], list[int] | None] = {}
    for group in ray.get(pool.rollout.remote(requests, SAMPLING), timeout=300):
        if group.error is not None:
            found[str(group.request_id), None] = None
        for sample in group.samples:
            found[str(group.request_id), sample.sample_index] = sample.token_ids.tolist()
    assert len(found) == 2 * (len(ROWS) - 1) + 1
    return found


def keyed(rows: list[dict[str, Any]]) -> dict[tuple[str, int | None], list[int] | None]:
    keys = [(row["request_id"], row["sample_index"]) for row in rows]
    assert len(set(keys)) == len(keys)
    tokens = [None if row["token_ids"] is None else list(row["token_ids"]) for row in rows]
    return dict(zip(keys, tokens, strict=True))


def submitted(pool: Any) -> int:
    return int(ray.get(pool.stats.remote(), timeout=60).submitted)


def test_the_samples_are_those_of_the_pool_in_any_order_of_rows_and_blocks(pool: Any, expected: Any) -> None:
    shuffled = random.Random(1).sample(ROWS, len(ROWS))
    ds = ray.data.from_items(shuffled, override_num_blocks=3)
    rows = rollouts(ds, pool, SAMPLING, id_column="id", batch_size=2, concurrency=3).take_all()
    assert keyed(rows) == expected
    for row in rows:
        assert row["answer"] == f"a{row['request_id']}" == f"a{row['id']}"
        if row["error"] is None:
            assert len(row["logprobs"]) == len(row["sampling_logprobs"]) == len(row["token_ids"])
            assert row["stop_token_id"] in (None, *SAMPLING.stop_token_ids)
            assert (row["stop_token_id"] is None) == (row["finish_reason"] == "length")
        else:
            assert "the prompt is empty" in row["error"]


def num_readable(folder: Path) -> int:
    """Files that were written to their end."""
    found = 0
    for path in folder.glob("*.parquet"):
        with contextlib.suppress(pa.ArrowInvalid, OSError):
            pq.read_metadata(path)
            found += 1
    return found


@pytest.mark.slow
def test_an_interrupted_run_is_resumed_to_the_same_rows_none_of_them_twice(
    pool: Any, config: PoolConfig, expected: Any, tmp_path: Path
) -> None:
    source, target = tmp_path / "prompts", tmp_path / "samples"
    source.mkdir()
    (source / "p.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    victim = RolloutPool.remote(config)
    ray.get(victim.ready.remote(), timeout=300)

    def answer_six(self: Any) -> None:
        """The pool answers so many calls and no more, so that it dies before the run is over."""
        import asyncio

        submit, left = self._submit, iter(range(6))

        async def submit_or_wait(*arguments: Any) -> None:
            if next(left, None) is None:
                await asyncio.Event().wait()
            await submit(*arguments)

        self._submit = submit_or_wait

    ray.get(victim.__ray_call__.remote(answer_six))

    def interrupt() -> None:
        deadline = time.monotonic() + 120
        while num_readable(target) < 6 and time.monotonic() < deadline:
            time.sleep(0.02)
        ray.kill(victim)

    def samples(of: Any) -> Any:
        ds = ray.data.read_json(str(source))
        return rollouts(ds, of, SAMPLING, id_column="id", batch_size=1, concurrency=1, resume_from=target)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Exception, match="Actor"):
        samples(victim).write_parquet(str(target))
    written = sorted(target.glob("*.parquet"))
    assert len(written) == num_readable(target) == 6
    pq.write_table(pq.read_table(written[0]).slice(1), written[0])  # a group that was written in part
    written[1].write_bytes(written[1].read_bytes()[:-20])  # a file that was cut off

    before = submitted(pool)
    samples(pool).write_parquet(str(target))
    rows = ray.data.read_parquet(str(target)).take_all()
    good = [row for row in rows if row["error"] is None]
    assert keyed(good) == {key: tokens for key, tokens in expected.items() if tokens is not None}
    assert submitted(pool) - before <= len(ROWS) - (len(written) - 2)
    assert [path.name for path in (tmp_path / "samples.cut-off").iterdir()] == [written[1].name]


def test_json_lines_are_read_and_written_and_what_is_there_is_not_computed_again(
    pool: Any, tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"text_in": text, "n": 1}) for text in TEXTS[:4]))
    target = str(tmp_path / "samples")

    def write() -> None:
        ds = ray.data.read_json(str(tmp_path / "p.jsonl"))
        rollouts(ds, pool, SAMPLING, prompt_column="text_in", resume_from=target).write_json(target)

    write()
    before = submitted(pool)
    write()
    assert submitted(pool) == before
    lines = [
        json.loads(line) for path in Path(target).glob("*.json") for line in path.read_text().splitlines()
    ]
    assert sorted((line["text_in"], line["sample_index"]) for line in lines) == [
        (text, index) for text in sorted(TEXTS[:4]) for index in (0, 1)
    ]
    assert len({line["request_id"] for line in lines}) == 4


def test_a_pool_of_the_stage_s_own_leaves_ray_data_a_core_and_ends_with_the_data_set(
    pool: Any, config: PoolConfig
) -> None:
    on_cores = config.model_copy(update={"cpus_per_actor": None, "gpus_per_actor": 0})
    assert with_a_core_left(on_cores).cpus_per_actor == 3
    assert with_a_core_left(on_cores.model_copy(update={"num_actors": 2})).cpus_per_actor == 1
    with pytest.raises(CapacityError, match="num_actors: 4 ranks leave none of 4 cores to Ray Data"):
        rollouts(ray.data.from_items(ROWS), on_cores.model_copy(update={"num_actors": 4}))

    samples = rollouts(ray.data.from_items(ROWS[:2]), config, SAMPLING)
    assert samples.count() == 4
    assert len(ray.util.list_named_actors()) == 2
    del samples

    def is_gone() -> bool:
        gc.collect()
        return len(ray.util.list_named_actors()) == 1

    wait_until(is_gone, "a pool outlives its samples")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_column": "missing"}, "prompt_column: there is no column 'missing'; there are: "),
        ({"id_column": "missing"}, "id_column: there is no column 'missing'"),
        ({"prompt_column": "text"}, "the column 'text' has the name of one that is made; rename it"),
        ({"batch_size": 0}, "batch_size: must be an integer from 1, got 0"),
        ({"sampling": {"n": 2}}, "sampling must be SamplingParams, got dict"),
        ({"pool": "pool"}, "pool must be the handle of a pool or a PoolConfig, got str"),
    ],
)
def test_a_mistake_is_told_before_anything_is_computed(
    pool: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    column = "text" if changes.get("prompt_column") == "text" else "prompt"
    ds = ray.data.from_items([{column: "a"}])
    with pytest.raises(ConfigError, match=message):
        rollouts(ds, **{"pool": pool, **changes})
