"""Groups as a Parquet file: one row per group, samples as a nested list.

What has no fixed type in JSON is text here: ``request_id``, ``metadata`` and ``sampling`` (JSON),
``prompt`` (JSON unless it is text). A stop string is in ``stop_match``, a stop id in
``stop_token_id``. Needs pyarrow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollout_pool.errors import InputFileError, OutputFileError, one_line
from rollout_pool.records import Record

ROWS_PER_WRITE = 256

_SAMPLE = pa.struct(
    [
        ("sample_index", pa.int64()),
        ("text", pa.string()),
        ("token_ids", pa.list_(pa.int64())),
        ("logprobs", pa.list_(pa.float32())),
        ("sampling_logprobs", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("stop_match", pa.string()),
        ("stop_token_id", pa.int64()),
        ("weight_version", pa.int64()),
        ("seed", pa.int64()),
    ]
)
SCHEMA = pa.schema(
    [
        ("index", pa.int64()),
        ("request_id", pa.string()),
        ("prompt", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int64())),
        ("samples", pa.list_(_SAMPLE)),
        ("error", pa.string()),
        ("metadata", pa.string()),
        ("sampling", pa.string()),
        ("config_hash", pa.string()),
        ("prompt_hash", pa.string()),
    ]
)


def write_parquet(lines: Path, target: Path) -> None:
    """Turn a JSONL file of records into ``target``, ordered by index, with one rename at the end.

    Holds ``ROWS_PER_WRITE`` groups in memory at a time.
    """
    scratch = target.with_name(target.name + ".tmp")
    try:
        with lines.open("rb") as file, pq.ParquetWriter(scratch, SCHEMA, compression="zstd") as writer:
            offsets = _offsets(file)
            for start in range(0, len(offsets), ROWS_PER_WRITE):
                rows = []
                for offset in offsets[start : start + ROWS_PER_WRITE]:
                    file.seek(offset)
                    rows.append(_row(json.loads(file.readline())))
                writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
        os.replace(scratch, target)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise OutputFileError(
            f"cannot write {target}: {error.strerror or one_line(error, 120)}; its groups are in "
            f"{lines.name}: make room and --resume"
        ) from None


def read_parquet(path: Path) -> Iterator[Record]:
    """The records of a file that :func:`write_parquet` wrote. Raises :class:`InputFileError`."""
    try:
        with pq.ParquetFile(path) as file:
            if file.schema_arrow.names != SCHEMA.names:
                raise InputFileError(
                    f"{path}: its columns are not those that rollout-pool run writes; name what it wrote"
                )
            for batch in file.iter_batches(ROWS_PER_WRITE):
                yield from map(_record, batch.to_pylist())
    except (OSError, pa.ArrowException) as error:
        raise InputFileError(
            f"cannot read {path}: {one_line(error, 120)}; name what rollout-pool run wrote"
        ) from None


def _offsets(file: Any) -> list[int]:
    """Where each record starts, in the order of their indices."""
    found = []
    offset = 0
    for raw in file:
        found.append((json.loads(raw)["index"], offset))
        offset += len(raw)
    return [offset for _, offset in sorted(found)]


def _row(record: Record) -> Record:
    prompt = record["prompt"]
    return {
        **record,
        "request_id": str(record["request_id"]),
        "prompt": prompt if prompt is None or isinstance(prompt, str) else _json(prompt),
        "samples": [_split_match(sample) for sample in record["samples"]],
        "metadata": _json(record["metadata"]),
        "sampling": _json(record["sampling"]),
    }


def _split_match(sample: Record) -> Record:
    match = sample["stop_match"]
    is_id = isinstance(match, int)
    return {**sample, "stop_match": None if is_id else match, "stop_token_id": match if is_id else None}


def _record(row: Record) -> Record:
    samples = row["samples"]
    for sample in samples:
        token_id = sample.pop("stop_token_id")
        sample["stop_match"] = sample["stop_match"] if token_id is None else token_id
    return {**row, "metadata": json.loads(row["metadata"]), "sampling": json.loads(row["sampling"])}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
