"""What runs in Ray Data's process: a block of prompts to the pool, its samples back as a table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from rollout_pool.data.finished import Finished
from rollout_pool.errors import ConfigError
from rollout_pool.parquet import SCHEMA
from rollout_pool.types import RolloutGroup, RolloutRequest, Sample, SamplingParams

SAMPLE_FIELDS = [
    SCHEMA.field("request_id"),
    SCHEMA.field("prompt_token_ids"),
    *SCHEMA.field("samples").type.value_type,
    SCHEMA.field("error"),
]
"""The columns that a sample has, with the types of ``rollout-pool run``'s Parquet files."""
SAMPLE_COLUMNS = tuple(field.name for field in SAMPLE_FIELDS)


class Stage:
    """A callable of ``map_batches`` over tables. Several blocks are with the pool at once."""

    def __init__(
        self,
        pool: Any,
        sampling: SamplingParams,
        prompt_column: str,
        id_column: str | None,
        finished: Finished | None,
    ) -> None:
        self._pool = pool
        self._sampling = sampling
        self._seed = sampling.seed if sampling.seed is not None else 0
        self._prompt_column = prompt_column
        self._id_column = id_column
        self._finished = finished or Finished()

    async def __call__(self, rows: pa.Table) -> Any:
        check_columns(rows.column_names, self._prompt_column, self._id_column)
        ids = list(row_ids(rows, self._id_column))
        wanted = [number for number, name in enumerate(ids) if name not in self._finished.whole]
        rows, ids = _take(rows, wanted), [ids[number] for number in wanted]
        groups: list[RolloutGroup] = []
        if ids:
            prompts = rows.column(self._prompt_column).to_pylist()
            requests = [
                RolloutRequest(prompt, request_id=name, seed=self._seed)
                for prompt, name in zip(prompts, ids, strict=True)
            ]
            groups = await self._pool.rollout.remote(requests, self._sampling)
        samples: list[tuple[int, RolloutGroup, Sample | None]] = []
        for number, (name, group) in enumerate(zip(ids, groups, strict=True)):
            there = self._finished.part.get(name, ())
            samples += [(number, group, one) for one in group.samples if one.sample_index not in there]
            if not group.samples:
                samples.append((number, group, None))
        kept = rows if self._id_column != "request_id" else rows.drop_columns(["request_id"])
        yield with_samples(_take(kept, [number for number, _, _ in samples]), ids, samples)


def check_columns(names: Collection[str], prompt_column: str, id_column: str | None) -> None:
    """Raises :class:`ConfigError` when a column is missing, or has the name of one that is made."""
    for argument, name in (("prompt_column", prompt_column), ("id_column", id_column)):
        if name is not None and name not in names:
            raise ConfigError(f"{argument}: there is no column {name!r}; there are: {', '.join(names)}")
    for name in names:
        if name in SAMPLE_COLUMNS and not name == id_column == "request_id":
            raise ConfigError(
                f"the column {name!r} has the name of one that is made; rename it with ds.rename_columns"
            )


def row_ids(rows: pa.Table, id_column: str | None) -> Iterator[str]:
    """What each row is called: by its column, or by a hash of all that is in it."""
    if id_column is not None:
        for value in rows.column(id_column).to_pylist():
            if value is None:
                raise ConfigError(f"id_column: a row has no {id_column!r}")
            yield str(value)
        return
    for row in rows.to_pylist():
        text = json.dumps(row, sort_keys=True, default=_plain)
        yield hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def with_samples(
    rows: pa.Table, ids: list[str], samples: Iterable[tuple[int, RolloutGroup, Sample | None]]
) -> pa.Table:
    """``rows``, one per sample, with the columns of the samples; each comes with the place of its id."""
    values = [_values(ids[number], group, sample) for number, group, sample in samples]
    for field in SAMPLE_FIELDS:
        column = pa.array([value.get(field.name) for value in values], field.type)
        rows = rows.append_column(field, column)
    return rows


def _take(rows: pa.Table, numbers: list[int]) -> pa.Table:
    return rows.take(pa.array(numbers, pa.int64()))  # without numbers pyarrow knows no type of them


def _values(name: str, group: RolloutGroup, sample: Sample | None) -> dict[str, Any]:
    values = {"request_id": name, "prompt_token_ids": group.prompt_token_ids, "error": group.error}
    if sample is None:
        return values
    match = sample.stop_match
    return {
        **values,
        "sample_index": sample.sample_index,
        "text": sample.text,
        "token_ids": sample.token_ids,
        "logprobs": sample.logprobs,
        "sampling_logprobs": sample.sampling_logprobs,
        "finish_reason": sample.finish_reason,
        "stop_match": match if isinstance(match, str) else None,
        "stop_token_id": match if isinstance(match, int) else None,
        "weight_version": sample.weight_version,
        "seed": sample.seed,
    }


def _plain(value: Any) -> Any:
    """What JSON has no form for: arrays, bytes, times."""
    return value.tolist() if isinstance(value, np.ndarray) else repr(value)
