"""Rows of sampling settings, written as a person would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from rollout_pool.kernels import ops

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The work is small, and the machine is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def sampling_rows() -> Callable[..., Any]:
    """``sampling_rows(rows, temperature=..., ...)``: one setting for all rows, or a list with one each.

    Every row is a sample of its own, so that many rows are many independent draws.
    """

    def make(
        rows: int,
        *,
        temperature: Any = 1.0,
        top_k: Any = 0,
        top_p: Any = 1.0,
        min_p: Any = 0.0,
        penalty: Any = 1.0,
        blocked: Sequence[int] = (),
        seen: torch.Tensor | None = None,
        seed: int = 0,
        position: int = 0,
        first: int = 0,
        **flags: bool,
    ) -> Any:
        keys = torch.tensor(
            [ops.sample_key(seed, "index:0", first + row) for row in range(rows)], dtype=torch.int32
        )

        def column(value: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)

        return ops.SamplingRows(
            temperature=column(temperature, torch.float32),
            top_k=column(top_k, torch.int64),
            top_p=column(top_p, torch.float32),
            min_p=column(min_p, torch.float32),
            penalty=column(penalty, torch.float32),
            keys=ops.position_keys(keys.view(-1, 2), torch.full((rows,), position)),
            blocked=torch.tensor([list(blocked) or [-1]] * rows, dtype=torch.int64),
            seen=None if seen is None else seen.expand(rows, -1).clone(),
            **flags,
        )

    return make
