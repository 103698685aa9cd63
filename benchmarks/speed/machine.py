"""Where and with what the figures were made."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from typing import Any


def machine(threads: int, dtype: str) -> dict[str, Any]:
    """Of this machine and environment. ``load`` is what else ran when the measurement began."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "ray")}
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "dtype": dtype,
        "load": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        **versions,
    }


def machine_line(at: dict[str, Any]) -> str:
    """The same as a sentence."""
    versions = ", ".join(f"{name} {at[name]}" for name in ("torch", "transformers", "ray"))
    return (
        f"{at['cpu']}, {at['cores']} cores, {at['threads']} threads; {at['dtype']}; {versions}; load "
        f"{at['load']} at the start; {at['date']}."
    )


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
