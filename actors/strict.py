"""What ``deterministic="strict"`` needs from the CPU's matrix products, and whether it has it.

Strict decoding fixes the shapes of its forward passes. Two things are left to the library below: the
number of threads, and the number of rows of an expert's product in mixture-of-experts models. Intel
MKL gives the same bits for any of both when ``MKL_CBWR`` says so before its first product.
"""

from __future__ import annotations

import os
import warnings

import torch
from torch.nn import functional

SETTING = ("MKL_CBWR", "AUTO,STRICT")


def ask_for_strict_products() -> None:
    """Ask MKL for reproducible products; it listens before its first product in a process."""
    os.environ.setdefault(*SETTING)


def warn_unless_strict() -> None:
    """Warn when MKL was asked too late, or is not what computes products here."""
    if not products_are_strict():
        warnings.warn(
            f"deterministic='strict': matrix products here depend on the number of rows or threads, so "
            f"mixture-of-experts models, and runs with other thread counts, may differ in the last bits; "
            f"set {SETTING[0]}={SETTING[1]} in the environment before the process starts",
            RuntimeWarning,
            stacklevel=3,
        )


def products_are_strict() -> bool:
    """Whether one row's product has the same bits among any number of rows and threads, by trial."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(576, 1536, generator=generator)
    rows = torch.randn(64, 1536, generator=generator)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in {1, threads}:
            torch.set_num_threads(count)
            results += [functional.linear(rows[:size], weight)[:1] for size in (1, 3, 8, 64)]
    finally:
        torch.set_num_threads(threads)
    return all(torch.equal(result, results[0]) for result in results)
