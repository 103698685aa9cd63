"""Puts an engine with its weights to sleep and wakes it, and prints what memory it takes, as JSON.

In a process of its own: in one that has done much, the C library keeps memory for later.
"""

from __future__ import annotations

import json
import sys

import psutil

from rollout_pool import Engine, EngineConfig


def main(folder: str, dtype: str, cycles: int) -> None:
    engine = Engine(folder, EngineConfig(num_slots=4, max_length=32), dtype=dtype)  # type: ignore[arg-type]
    process = psutil.Process()
    found: dict[str, list[float]] = {"awake": [], "asleep": []}
    for _ in range(cycles):
        engine.sleep(weights=True)
        found["asleep"].append(process.memory_info().rss / 2**20)
        engine.wake()
        found["awake"].append(process.memory_info().rss / 2**20)
    size = sum(parameter.nbytes for parameter in engine.model.parameters()) / 2**20
    print(json.dumps({**found, "size": size}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
