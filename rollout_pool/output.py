"""Where ``rollout-pool run`` writes: one whole line per finished group, safe to kill and to resume.

Groups are written in the order in which they finish; ``index`` is the place of their prompt. A
Parquet file can't be appended to, so its groups go to ``NAME.parquet.part.jsonl`` next to it and
become the Parquet file, ordered by ``index``, with one rename at the end.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rollout_pool.errors import ConfigError, InputFileError, OutputFileError
from rollout_pool.prompt_file import PromptLine
from rollout_pool.records import Record, from_record, to_record
from rollout_pool.types import RolloutGroup


class OutputFile:
    """The output of one run, open for appending. A context manager; leaving it closes the file.

    ``done`` are the indices of the prompts that have their group in the file, ``num_failed`` how
    many of those groups are errors.
    """

    def __init__(
        self, path: str | Path, prompts: Sequence[PromptLine], config_hash: str, *, resume: bool
    ) -> None:
        """Open ``path`` (JSONL or Parquet, by its ending) and, to resume, read what it holds.

        Raises :class:`OutputFileError` when it exists and ``resume`` is not set, when it holds
        something else than results of these prompts under this configuration, when another run
        writes it, or when it can't be written.
        """
        self.path = Path(path)
        self._prompts = prompts
        self._config_hash = config_hash
        self._is_parquet = _is_parquet(self.path)
        self._lines_path = self.path
        self.done: set[int] = set()
        self.num_failed = 0
        if self._is_parquet:
            self._lines_path = self.path.with_name(self.path.name + ".part.jsonl")
        if not resume:
            for taken in {self.path, self._lines_path}:
                if taken.exists() and taken.stat().st_size:
                    raise OutputFileError(f"{taken} exists; continue it with --resume, or remove it")
        self._file = _open_locked(self._lines_path)
        try:
            self._resume()
        except BaseException:
            self._file.close()
            raise

    def append(self, line: PromptLine, group: RolloutGroup) -> None:
        """Write the group that answers ``line``; when this returns, it is in the file.

        Raises :class:`OutputFileError` when the disk is full, say; the file then ends with the
        group before.
        """
        record = to_record(line, group, self._config_hash)
        data = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        end = self._file.tell()
        try:
            written = self._file.write(data)
            if written != len(data):
                raise OSError(0, "no space for a whole line")
        except OSError as error:
            self._file.truncate(end)
            raise OutputFileError(f"cannot write {self._lines_path}: {error.strerror}") from None
        self._count(record)

    def finish(self) -> None:
        """All groups are there: make the Parquet file, if it is to be one."""
        if self._is_parquet and len(self.done) == len(self._prompts) and not self.path.exists():
            from rollout_pool.parquet import write_parquet

            write_parquet(self._lines_path, self.path)
        if self._is_parquet and self.path.exists():
            self._lines_path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if not self.done:  # nothing to keep, and nothing that asks for --resume
            self._lines_path.unlink(missing_ok=True)

    def _resume(self) -> None:
        if self._is_parquet and self.path.exists():
            for number, record in enumerate(_parquet_records(self.path), start=1):
                self._accept(record, f"{self.path}, row {number}")
            if len(self.done) < len(self._prompts):
                raise OutputFileError(
                    f"{self.path} is complete with {len(self.done)} groups, and there are more prompts now; "
                    "name another --output for the new ones"
                )
            return
        end = 0
        with self._lines_path.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if not raw.endswith(b"\n"):  # torn by a kill in the middle of a write
                    break
                where = f"{self._lines_path}, line {number}"
                try:
                    record = json.loads(raw)
                except ValueError:
                    raise OutputFileError(
                        f"{where}: not valid JSON; not written by rollout-pool run"
                    ) from None
                self._accept(record, where)
                end += len(raw)
        self._file.truncate(end)
        self._file.seek(end)

    def _accept(self, record: Record, where: str) -> None:
        try:
            index, config_hash, prompt_hash = (record[key] for key in ("index", "config_hash", "prompt_hash"))
            is_known = 0 <= index < len(self._prompts)
        except (KeyError, TypeError):
            raise OutputFileError(f"{where}: not written by rollout-pool run") from None
        if config_hash != self._config_hash:
            raise OutputFileError(
                f"{where} was written with another model, seed, sampling, dtype or max_length; "
                "resume with the configuration of the first run, or name another --output"
            )
        if not is_known or prompt_hash != self._prompts[index].prompt_hash:
            raise OutputFileError(
                f"{where} answers prompt {index} as it was, and the prompts differ there now; "
                "resume with the same prompts (more at the end are fine), or name another --output"
            )
        if index in self.done:
            raise OutputFileError(f"{where} answers prompt {index}, which an earlier one answers already")
        self._count(record)

    def _count(self, record: Record) -> None:
        self.done.add(record["index"])
        self.num_failed += record["error"] is not None


def read_groups(path: str | Path) -> Iterator[RolloutGroup]:
    """The groups of a file that ``rollout-pool run`` wrote, JSONL or Parquet.

    Raises :class:`InputFileError` with the line at fault.
    """
    path = Path(path)
    if not path.is_file():
        raise InputFileError(f"there is no file {path}")
    unit = "row" if path.suffix == ".parquet" else "line"
    records = _parquet_records(path) if path.suffix == ".parquet" else _json_records(path)
    for number, record in enumerate(records, start=1):
        try:
            yield from_record(record)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise InputFileError(
                f"{path}, {unit} {number}: not a group that rollout-pool run wrote ({reason})"
            ) from None


def _json_records(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield json.loads(raw)
            except ValueError:
                torn = "" if raw.endswith(b"\n") else "; it is cut off, so resume that run"
                raise InputFileError(f"{path}, line {number}: not valid JSON{torn}") from None


def _parquet_records(path: Path) -> Iterator[Record]:
    _require_pyarrow()
    from rollout_pool.parquet import read_parquet

    return read_parquet(path)


def _is_parquet(path: Path) -> bool:
    if path.suffix not in (".jsonl", ".parquet"):
        raise OutputFileError(f"{path}: expected a name that ends in .jsonl or .parquet")
    if path.suffix == ".parquet":
        _require_pyarrow()
    return path.suffix == ".parquet"


def _require_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ConfigError(
            "Parquet needs pyarrow; install it with: pip install 'rollout-pool[parquet]'"
        ) from None


def _open_locked(path: Path) -> io.FileIO:
    """Open for reading and appending, without a buffer, as the only writer."""
    try:
        file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")
    except OSError as error:
        raise OutputFileError(f"cannot write {path}: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise OutputFileError(f"another run is writing {path}") from None
    return file
