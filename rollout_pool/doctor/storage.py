"""Where results, Ray's session and Ray's objects go."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from rollout_pool.doctor.check import Checks, failed, ok, warning

LEAST_OUTPUT_BYTES = 2**30
FULL = 0.95
"""Ray stops placing objects on a disk that is fuller than this."""
SHARED = Path("/dev/shm")


def check_output(output: Path) -> Checks[None]:
    """output: the file that results will be written to, or its folder."""
    output = output.absolute()
    folder = output if output.is_dir() else output.parent
    if not folder.is_dir():
        yield failed("output", f"there is no folder {folder}", f"mkdir -p {folder}")
        return
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
        if output.is_file() and not os.access(output, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        yield failed(
            "output", f"{folder} cannot be written: {error.strerror}", "choose another folder for --output"
        )
        return
    free = shutil.disk_usage(folder).free
    if free < LEAST_OUTPUT_BYTES:
        yield warning(
            "output", f"{free / 2**20:.0f} MiB free in {folder}", "free some space: a full disk ends a run"
        )
    else:
        yield ok("output", f"{folder} can be written, {free / 2**30:.1f} GiB free")


def check_session_disk(folder: Path) -> Checks[None]:
    """folder: where Ray keeps its session, logs and spilled objects."""
    usage = shutil.disk_usage(folder)
    if usage.used > FULL * usage.total or usage.free < LEAST_OUTPUT_BYTES:
        yield warning(
            "Ray's disk",
            f"{folder} is on a disk with {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free",
            "free some space, or set RAY_TMPDIR: Ray takes no objects on a disk that is 95 % full",
        )
    else:
        yield ok("Ray's disk", f"{usage.free / 2**30:.1f} GiB free in {folder}")


def check_shared_memory(store_bytes: float, shared: Path = SHARED) -> Checks[None]:
    """store_bytes: the object store that Ray has made on this node."""
    text = f"object store of {store_bytes / 2**30:.2f} GiB"
    if not shared.is_dir():
        yield warning(
            "shared memory",
            f"{text}, and no {shared}",
            "the store is in files, which is slow; mount a tmpfs there",
        )
        return
    size = shutil.disk_usage(shared).total
    if size < store_bytes:
        yield warning(
            "shared memory",
            f"{text}, and {shared} has {size / 2**30:.2f} GiB, so the store may be in files, which is slow",
            f"make {shared} larger, in a container with --shm-size={store_bytes / 2**30:.0f}g",
        )
    else:
        yield ok("shared memory", f"{text}, {shared} has {size / 2**30:.1f} GiB")
