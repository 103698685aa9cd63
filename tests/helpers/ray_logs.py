"""What the processes of the driver's Ray session have written."""

from __future__ import annotations

from pathlib import Path

import ray


def worker_logs() -> dict[str, list[str]]:
    """Of each worker, by its process id, the lines of its standard error, where our log goes."""
    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    return {
        path.stem.rpartition("-")[2]: path.read_text(encoding="utf-8", errors="replace").splitlines()
        for path in sorted(folder.glob("worker-*.err"))
    }
