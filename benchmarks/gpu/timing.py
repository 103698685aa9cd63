"""Time on the device, and the copy that all bandwidths are compared with."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import torch

from gpu.parts import Setting

WARM_UPS = 3
REPEATS = 20
_FLUSH_BYTES = 1 << 29
"""More than any cache holds; and writing it keeps the device busy until the host is ahead of it."""


def median_seconds(setting: Setting, call: Callable[[], object], repeats: int = REPEATS) -> float:
    """The median time that the device needs for what ``call`` launches, with cold caches."""
    if setting.is_dry:
        begin = perf_counter()
        call()
        return perf_counter() - begin
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=setting.device)
    for _ in range(WARM_UPS):
        call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin_event, end_event in pairs:
        flush.zero_()
        begin_event.record()
        call()
        end_event.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1000


def copy_bandwidth(setting: Setting) -> float:
    """Bytes per second of a large device-to-device copy, read and written bytes both counted."""
    size = 1 << (16 if setting.is_dry else 30)
    source = torch.ones(size, dtype=torch.int8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(setting, lambda: target.copy_(source))


def wall_seconds(setting: Setting, call: Callable[[], object]) -> float:
    """The time of ``call`` on the host's clock, from an idle device to an idle device."""
    if not setting.is_dry:
        torch.cuda.synchronize()
    begin = perf_counter()
    call()
    if not setting.is_dry:
        torch.cuda.synchronize()
    return perf_counter() - begin
