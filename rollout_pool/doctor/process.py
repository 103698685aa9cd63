"""Limits and variables that a process starts with."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path

from rollout_pool.doctor.check import Checks, ok, warning

FEWEST_FILES = 8192
"""Ray's processes hold a socket to each worker, and each a few files: this is enough for some 100 actors."""


def first_environment() -> dict[str, str]:
    """The variables that this process was started with, before anything in it changed them."""
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return dict(os.environ)
    pairs = (part.split(b"=", 1) for part in raw.split(b"\0") if b"=" in part)
    return {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}


def check_threads(environment: Mapping[str, str], num_cores: int | None = None) -> Checks[None]:
    """How threads of torch wait, and how many there are."""
    cores = num_cores or os.cpu_count() or 1
    waiting = environment.get("OMP_WAIT_POLICY", "")
    if waiting.upper() == "PASSIVE":
        yield ok("OMP_WAIT_POLICY", "PASSIVE")
    else:
        yield warning(
            "OMP_WAIT_POLICY",
            f"{waiting or 'not set'}; actors and commands use PASSIVE, an Engine of your own does not",
            "export OMP_WAIT_POLICY=PASSIVE: on CPUs, threads that spin can make a step ten times slower",
        )
    number = environment.get("OMP_NUM_THREADS")
    if number is None:
        yield ok(
            "OMP_NUM_THREADS", f"not set; actors get their own, a process of yours takes all {cores} cores"
        )
    elif not number.isdecimal() or not 0 < int(number) <= cores:
        yield warning(
            "OMP_NUM_THREADS",
            f"{number}, and there are {cores} cores; actors get their own number",
            f"unset OMP_NUM_THREADS, or set it to at most {cores}",
        )
    else:
        yield ok("OMP_NUM_THREADS", f"{number} of {cores} cores; actors get their own number")


def check_open_files(limits: tuple[int, int] | None = None) -> Checks[None]:
    """limits: soft and hard; Ray raises the first to the second."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= FEWEST_FILES:
        top = "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard}"
        yield ok("open files", f"{soft}, which Ray may raise to {top}")
    else:
        yield warning(
            "open files",
            f"at most {hard} in a process; Ray runs out of them with many actors",
            "raise the hard limit to 65536: limits.conf, or a container's --ulimit nofile=65536",
        )
