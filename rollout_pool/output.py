"""Where ``rollout-pool run`` writes: one whole line per finished group, safe to kill and to resume.

Groups are written in the order in which they finish; ``index`` is the place of their prompt. A
Parquet file can't be appended to, so its groups go to ``NAME.parquet.part.jsonl`` next to it and
become the Parquet file, ordered by ``index``, with one rename at the end.

To resume is to keep every group that is there and has samples, and to run the rest: prompts that
have no group yet, and those whose group failed.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rollout_pool.errors import OutputFileError
from rollout_pool.prompt_file import PromptLine
from rollout_pool.records import Record, to_record
from rollout_pool.results import is_parquet, parquet_groups
from rollout_pool.types import RolloutGroup


class OutputFile:
    """The output of one run, open for appending. A context manager; leaving it closes the file.

    ``done`` are the indices of the prompts that have their group in the file, and ``failed`` those
    of them whose group is an error.
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
        self.done: set[int] = set()
        self.failed: set[int] = set()
        self._prompts = prompts
        self._config_hash = config_hash
        self._lines = self.path
        if is_parquet(self.path):
            self._lines = self.path.with_name(self.path.name + ".part.jsonl")
        for there in (self.path, self._lines):
            if there.exists() and not there.is_file():
                kind = "a directory" if there.is_dir() else "not an ordinary file"
                raise OutputFileError(f"{there} is {kind}; name another --output")
        if not resume:
            for taken in (self.path, self._lines):
                if taken.exists() and taken.stat().st_size:
                    raise OutputFileError(f"{taken} exists; continue it with --resume, or remove it")
        if self._lines != self.path and self.path.exists() and not self._lines.exists():
            self._restore_lines()
        self._file = _open_locked(self._lines)
        try:
            self._keep_good_lines()
        except BaseException:
            self._file.close()
            raise

    def append(self, line: PromptLine, group: RolloutGroup) -> None:
        """Write the group that answers ``line``; when this returns, it is in the file.

        Raises :class:`OutputFileError` when the disk is full, say; the file then ends with the
        group before.
        """
        data = _encode(to_record(line, group, self._config_hash))
        end = self._file.tell()
        try:
            if self._file.write(data) != len(data):
                raise OSError(0, "no room for a whole line")
        except OSError as error:
            self._file.truncate(end)
            self._file.seek(end)
            raise OutputFileError(
                f"cannot write {self._lines}: {error.strerror}; it ends with the group before: make room "
                "and --resume"
            ) from None
        self.done.add(line.index)
        if group.error is not None:
            self.failed.add(line.index)

    def finish(self) -> None:
        """All groups are there: make the Parquet file, if it is to be one."""
        if self._lines != self.path and len(self.done) == len(self._prompts):
            from rollout_pool.parquet import write_parquet

            write_parquet(self._lines, self.path)
            self._lines.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if not self.done:  # nothing to keep, and nothing that should ask for --resume
            self._lines.unlink(missing_ok=True)

    def _keep_good_lines(self) -> None:
        """Read what is there; drop failed groups and a last line that was cut off."""
        good: list[tuple[int, int]] = []
        end = 0
        with self._lines.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                start, end = end, end + len(raw)
                if raw.endswith(b"\n") and self._accept(raw, f"{self._lines}, line {number}"):
                    good.append((start, end))
            if sum(stop - start for start, stop in good) < end:
                self._replace_lines(_ranges(lines, good))
        self._file.seek(0, io.SEEK_END)

    def _accept(self, raw: bytes, where: str) -> bool:
        """Whether a line is a group to keep. Raises when it belongs to another run."""
        try:
            record = json.loads(raw)
        except ValueError:
            raise _foreign(where) from None
        self._check(record, where)
        if record["error"] is None:
            self.done.add(record["index"])
        return record["error"] is None

    def _check(self, record: Record, where: str) -> None:
        try:
            index, config_hash, prompt_hash = (record[k] for k in ("index", "config_hash", "prompt_hash"))
            is_known = 0 <= index < len(self._prompts) and "error" in record
        except (KeyError, TypeError):
            raise _foreign(where) from None
        if config_hash != self._config_hash:
            raise OutputFileError(
                f"{where} was written with another model, seed, sampling, dtype or max_length; "
                "resume with the configuration of the first run, or name another --output"
            )
        if not is_known or prompt_hash != self._prompts[index].prompt_hash:
            raise OutputFileError(
                f"{where} answers another prompt {index} than there is now; resume with the same "
                "prompts (more at the end are fine), or name another --output"
            )
        if index in self.done:
            raise OutputFileError(
                f"{where} answers prompt {index}, as an earlier one does; remove one of them, or name "
                "another --output"
            )

    def _restore_lines(self) -> None:
        """A finished Parquet file becomes lines again, so that others can follow them."""
        lines = []
        for number, (record, group) in enumerate(parquet_groups(self.path), start=1):
            self._check(record, f"{self.path}, row {number}")
            lines.append(_encode(to_record(self._prompts[group.index], group, self._config_hash)))
        self._write_aside(lines)

    def _replace_lines(self, lines: Iterable[bytes]) -> None:
        self._write_aside(lines)
        self._file.close()
        self._file = _open_locked(self._lines)

    def _write_aside(self, lines: Iterable[bytes]) -> None:
        scratch = self._lines.with_name(self._lines.name + ".tmp")
        try:
            with scratch.open("wb") as file:
                file.writelines(lines)
            os.replace(scratch, self._lines)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise OutputFileError(
                f"cannot write {self._lines}: {error.strerror}; it is as it was: make room and --resume"
            ) from None


def _encode(record: Record) -> bytes:
    return json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _ranges(file: io.BufferedReader, ranges: list[tuple[int, int]]) -> Iterator[bytes]:
    for start, stop in ranges:
        file.seek(start)
        yield file.read(stop - start)


def _foreign(where: str) -> OutputFileError:
    return OutputFileError(f"{where}: not written by rollout-pool run; name another --output")


def _open_locked(path: Path) -> io.FileIO:
    """Open for reading and writing, without a buffer, as the only writer."""
    try:
        file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")
    except OSError as error:
        raise OutputFileError(
            f"cannot write {path}: {error.strerror}; name an --output that can be written"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise OutputFileError(
            f"another run is writing {path}; wait for it, or name another --output"
        ) from None
    return file
