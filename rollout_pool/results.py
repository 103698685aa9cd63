"""Reads back what ``rollout-pool run`` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rollout_pool.errors import ConfigError, InputFileError, OutputFileError
from rollout_pool.records import Record, from_record
from rollout_pool.types import RolloutGroup


def read_groups(path: str | Path) -> Iterator[RolloutGroup]:
    """The groups of a JSONL or Parquet file, one at a time, in the order of the file.

    Raises :class:`InputFileError` with the line at fault.
    """
    for _, group in read_records(path):
        yield group


def read_records(path: str | Path, *, may_grow: bool = False) -> Iterator[tuple[Record, RolloutGroup]]:
    """Each record of a JSONL or Parquet file, and the group that it holds, as :func:`read_groups`.

    may_grow: a run may be writing the file now, so a last line without an end is left out.
    """
    path = Path(path)
    if not path.is_file():
        raise InputFileError(f"there is no file {path}; name what rollout-pool run wrote")
    if path.suffix == ".parquet":
        yield from parquet_groups(path)
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}, line {number}"
            if may_grow and not raw.endswith(b"\n"):
                return
            try:
                record = json.loads(raw)
            except ValueError:
                torn = "; name what rollout-pool run wrote"
                if not raw.endswith(b"\n"):
                    torn = "; it is cut off, so resume that run"
                raise InputFileError(f"{where}: not valid JSON{torn}") from None
            yield record, _group(record, where)


def parquet_groups(path: Path) -> Iterator[tuple[Record, RolloutGroup]]:
    """Each record of a Parquet file, and the group that it holds."""
    require_pyarrow()
    from rollout_pool.parquet import read_parquet

    for number, record in enumerate(read_parquet(path), start=1):
        yield record, _group(record, f"{path}, row {number}")


def is_parquet(path: Path) -> bool:
    """Whether the name asks for Parquet. Raises when it asks for neither that nor JSONL."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise OutputFileError(f"{path}: expected a name that ends in .jsonl or .parquet")
    if path.suffix == ".parquet":
        require_pyarrow()
    return path.suffix == ".parquet"


def require_pyarrow() -> None:
    """Raises :class:`ConfigError` with the remedy when pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        remedy = "install it with: pip install 'rollout-pool[parquet]'"
        raise ConfigError(f"Parquet needs pyarrow; {remedy}") from None


def _group(record: Record, where: str) -> RolloutGroup:
    try:
        return from_record(record)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise InputFileError(
            f"{where}: not a group that rollout-pool run wrote ({reason[:100]}); name what it wrote"
        ) from None
