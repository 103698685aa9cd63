"""What an interrupted run has written: which samples need not be drawn again."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq
from pyarrow import fs

from rollout_pool.errors import InputFileError

logger = logging.getLogger(__name__)

COLUMNS = ["request_id", "sample_index", "error"]
JSON_SUFFIXES = (".json", ".jsonl")


@dataclass(frozen=True, slots=True)
class Finished:
    """By the names of rows: those with all their samples, and which samples others have."""

    whole: frozenset[str] = frozenset()
    part: dict[str, frozenset[int]] = field(default_factory=dict)


def read_finished(folder: str | Path, num_samples: int) -> Finished:
    """What the Parquet and JSON files of a folder hold, on any file system that pyarrow knows.

    A file that the interruption has cut off goes to ``FOLDER.cut-off``, for readers stumble over it in the
    folder, whatever its name; its samples are drawn again. Raises :class:`InputFileError` for a file with
    other columns.
    """
    filesystem, root = _locate(folder)
    indexes: defaultdict[str, set[int]] = defaultdict(set)
    for path in _files(filesystem, root):
        table = _read(filesystem, root, path)
        for name, index, error in zip(*(table.column(column).to_pylist() for column in COLUMNS), strict=True):
            if error is None:
                indexes[str(name)].add(index)
    whole = frozenset(name for name, found in indexes.items() if len(found) >= num_samples)
    part = {name: frozenset(found) for name, found in indexes.items() if name not in whole}
    return Finished(whole, part)


def _locate(folder: str | Path) -> tuple[Any, str]:
    if "://" in str(folder):
        filesystem, root = fs.FileSystem.from_uri(str(folder))
        return filesystem, root
    return fs.LocalFileSystem(), str(Path(folder).absolute())


def _files(filesystem: Any, root: str) -> Iterator[str]:
    found = filesystem.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
    for info in sorted(found, key=lambda info: info.path):
        is_hidden = info.base_name.startswith((".", "_"))
        if info.is_file and not is_hidden and info.base_name.endswith((".parquet", *JSON_SUFFIXES)):
            yield info.path


def _read(filesystem: Any, root: str, path: str) -> pa.Table:
    try:
        with filesystem.open_input_file(path) as file:
            table = pq.read_table(file) if path.endswith(".parquet") else pyarrow.json.read_json(file)
    except (pa.ArrowInvalid, OSError):
        aside = f"{root}.cut-off/{path.rpartition('/')[2]}"
        filesystem.create_dir(f"{root}.cut-off")
        filesystem.move(path, aside)
        logger.warning("%s is cut off and was moved to %s; its samples are drawn again", path, aside)
        return pa.table({column: [] for column in COLUMNS})
    if missing := [column for column in ("request_id", "sample_index") if column not in table.column_names]:
        raise InputFileError(f"{path} holds no samples: it has no column {missing[0]!r}; name another folder")
    if "error" not in table.column_names:  # JSON leaves out what is null
        table = table.append_column("error", pa.nulls(table.num_rows, pa.string()))
    return table.select(COLUMNS)
