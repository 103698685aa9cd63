"""What ``--json FILE`` of several commands does: the figures of a command, as a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rollout_pool.errors import OutputFileError


def require_folder(path: Path | None) -> None:
    """Raise :class:`OutputFileError` when there is no folder for the file: before the work, not after it."""
    if path is not None and not path.absolute().parent.is_dir():
        raise OutputFileError(
            f"cannot write {path}: there is no such folder; make it, or name another --json"
        )


def write_json(path: Path | None, value: Any) -> None:
    """Write ``value``, if a file was asked for. Raises :class:`OutputFileError` when that fails."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputFileError(f"cannot write {path}: {error.strerror}") from None
    print(f"figures are in {path}", file=sys.stderr)
