"""Rows of sampling settings, written as a person would; tests of Triton kernels without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
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


# Triton's kernels run on a GPU, or in its interpreter, which must be chosen before Triton is imported and
# holds for a whole process. So without a GPU a file test_*_triton.py is one test here: pytest runs it in a
# process of its own. `TRITON_INTERPRET=1 pytest FILE` runs its tests one by one.


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    runs_here = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
    if not module_path.name.endswith("_triton.py") or runs_here:
        return None
    return InterpretedFile.from_parent(parent, path=module_path)


class InterpretedFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        tests = InterpretedTests.from_parent(self, name="interpreted")
        tests.add_marker(pytest.mark.slow)
        yield tests


class InterpretedTests(pytest.Item):
    def runtest(self) -> None:
        pytest.importorskip("triton")
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(self.path)],
            cwd=self.config.rootpath,
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
        )
        if run.returncode:
            pytest.fail(f"{run.stdout}\n{run.stderr}", pytrace=False)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where Triton's kernels run: a GPU, or the CPU in the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


GUARD = 64


@pytest.fixture
def guarded_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every tensor that a kernel gets uninitialised is poisoned, and lies between cells that must stay so."""
    made: list[torch.Tensor] = []
    new_empty = torch.empty

    def empty(*shape: Any, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        storage = new_empty(torch.Size(shape).numel() + 2 * GUARD, dtype=dtype, device=device)
        made.append(storage.fill_(float("nan") if dtype.is_floating_point else -(2**30)))
        return storage[GUARD:-GUARD].view(shape)

    def like(tensor: torch.Tensor) -> torch.Tensor:
        return empty(*tensor.shape, dtype=tensor.dtype, device=tensor.device)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_like", like)
    yield
    monkeypatch.undo()
    assert made
    for storage in made:
        ends = torch.cat((storage[:GUARD], storage[-GUARD:]))
        assert bool((ends.isnan() if storage.is_floating_point() else ends == -(2**30)).all())
