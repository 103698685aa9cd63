"""The GPU check goes through its whole flow on a CPU, and sees what it is there to see."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
KERNELS = (
    "expand_kv",
    "expand_in_place",
    "compact_kv",
    "move_rows",
    "trim_kv",
    "write_kv",
    "decode_attention",
)
FAMILIES = ("Llama, grouped heads", "Gemma 3, sliding window", "Qwen3-MoE")
USE = "from gpu_check import use_checkout; use_checkout()"
WAYS = ("ours, graphs", "ours, no graphs", "generate", "generate_batch")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def run(*arguments: str, code: str = "", interpreted: bool = False) -> subprocess.CompletedProcess[str]:
    """The script as a user starts it; or ``code`` beside its modules."""
    command = [sys.executable, str(SCRIPT), *arguments]
    if code:
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n{code}"]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Any]:
    """What the dry run of all parts printed, and its JSON file."""
    file = tmp_path_factory.mktemp("gpu") / "check.json"
    done = run("--dry-run", "--seed", "7", "--json", str(file))
    assert done.returncode == 0, done.stderr[-5000:] + done.stdout
    return done, json.loads(file.read_text())


def rows(found: Any, letter: str) -> dict[str, Any]:
    return {row["what"]: row for row in found["parts"][letter]["rows"]}


@pytest.mark.slow
@needs_triton
def test_a_dry_run_reaches_the_end_of_every_part(dry_run: Any) -> None:
    _, found = dry_run
    assert list(found["parts"]) == ["a", "b", "c", "d", "e"]
    for part in found["parts"].values():
        assert part["rows"]
        assert part["skipped"] == part["broken"] == part["false_claims"] == []
    assert all(row["holds"] for letter in "ab" for row in rows(found, letter).values())


@pytest.mark.slow
@needs_triton
def test_a_dry_run_covers_kernels_models_ways_and_workloads(dry_run: Any) -> None:
    _, found = dry_run
    for kernel in KERNELS:
        assert {f"{kernel}, {dtype}" for dtype in ("fp16", "bf16", "fp32")} <= set(rows(found, "a"))
    for family in FAMILIES:
        for graphs in ("auto", "off"):
            for readback in ("default", "1"):
                assert f"{family}: graphs {graphs}, read-back {readback}" in rows(found, "b")
        assert f"{family}: graphs auto, read-back default, layout aligned" in rows(found, "b")
        assert sum(name.startswith(f"{family}: strict") for name in rows(found, "b")) == 3
    assert any("decode_attention" in name for name in rows(found, "c"))
    timed = {(row["figures"]["model"], row["figures"]["way"]) for row in rows(found, "d").values()}
    assert timed == {(model, way) for model in ("1B", "7B") for way in WAYS}
    assert all("seconds" in json.dumps(row["figures"]) for row in rows(found, "d").values())
    assert sum(name.endswith("prefill") for name in rows(found, "e")) == 4


@pytest.mark.slow
@needs_triton
def test_the_table_comes_last_and_says_that_a_dry_run_measures_nothing(dry_run: Any) -> None:
    done, found = dry_run
    lines = done.stdout.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert lines[-len(table) :] == table
    assert "dry run: figures mean nothing" in table[0]
    assert found["note"] == "dry run: figures mean nothing"
    for line in ("seed: 7", "device: CPU", "torch: ", "triton: ", "transformers: "):
        assert any(one.startswith(line) for one in lines), line


@pytest.mark.slow
@needs_triton
def test_parts_out_of_time_are_named_and_are_no_success() -> None:
    done = run("--dry-run", "--parts", "a,c", "--minutes", "0.02")
    assert done.returncode == 3, done.stderr[-3000:]
    assert done.stdout.count("were used up") == 2
    assert done.stdout.splitlines()[-1].startswith("| c |")


FAULTY_KERNELS = """
import torch
from gpu import moves
from gpu.parts import Setting
from rollout_pool.kernels import cache_triton
right = cache_triton.write_kv
def one_row_less(keys, values, new_keys, new_values, cells):
    right(keys, values, new_keys[:-1], new_values[:-1], cells[: -keys.shape[1]])
def one_cell_beyond(keys, values, new_keys, new_values, cells):
    right(keys, values, new_keys, new_values, cells)
    values.as_strided((1,), (1,), values.storage_offset() + values.numel()).fill_(0.5)
for form in (right, one_row_less, one_cell_beyond):
    cache_triton.write_kv = form
    (row,) = moves.check(Setting(torch.device("cpu"), True, 7), moves.write_kv, "bf16")
    print(row.holds, row.seen)
"""


@pytest.mark.slow
@needs_triton
def test_a_cell_too_few_or_too_many_is_seen() -> None:
    done = run(code=USE + FAULTY_KERNELS, interpreted=True)
    assert done.returncode == 0, done.stderr[-3000:]
    right, less, beyond = done.stdout.splitlines()
    assert right.startswith("True")
    assert less.startswith("False")
    assert beyond.startswith("False")
    assert "around tensor 1" in beyond


WRONG_TOKENS = """
import torch
from gpu import exactness
from gpu.parts import Setting
case = exactness.Case(Setting(torch.device("cpu"), True, 7), exactness.FAMILIES[0])
case.expected()[1][4] += 1
(row,) = exactness.check_greedy(case, "off", 1, "ragged")
print(row.holds, row.seen)
"""


@pytest.mark.slow
def test_a_wrong_token_is_seen_and_located() -> None:
    done = run(code=USE + WRONG_TOKENS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("False 5 of 6 samples")
    assert "first difference: prompt of 5, new token 4" in done.stdout


EXIT_CODES = """
from gpu import report
from gpu.parts import PARTS
from gpu.supervision import Outcome
def code(letter, holds=True, **values):
    row = {"what": "a step", "seen": "", "holds": holds, "figures": {}}
    return report.exit_code([Outcome(PARTS[letter], 1.0, rows=[row], **values)])
print(code("a"), code("b", False), code("c", None, broken=["a step"]), code("b", skipped=["a step"]),
      code("d", None, skipped=["a step"]), code("a", False, skipped=["a step"]))
"""


def test_exit_codes_tell_failed_from_incomplete() -> None:
    done = run(code=EXIT_CODES)
    assert done.stdout.split() == ["0", "1", "1", "3", "0", "1"], done.stderr


def test_a_missing_package_is_named_with_the_parts_that_run_without() -> None:
    code = "sys.modules['pydantic'] = None\nsys.argv = ['gpu_check.py']\nimport gpu_check\nsys.exit(gpu_check.main())"
    done = run(code=code)
    assert done.returncode == 2
    assert "not installed: pydantic; pip install pydantic" in done.stderr
    assert "--parts a,c runs without" in done.stderr


@needs_triton
def test_without_a_gpu_it_says_so() -> None:
    done = run("--parts", "c")
    assert done.returncode == 2
    assert "there is no CUDA device here; --dry-run" in done.stderr


def test_an_unknown_part_is_refused() -> None:
    done = run("--parts", "a,x")
    assert done.returncode == 2
    assert "parts are a, b, c, d, e; got 'a,x'" in done.stderr


TROUBLE = """
import os, signal, sys, time
from gpu import worker
from gpu.parts import Part, Row, Step
def good():
    return [Row("good", "seen", True)]
def dead():
    os.kill(os.getpid(), signal.SIGKILL)
def wrong():
    raise ValueError("no such thing")
class Trouble(Part):
    def steps(self, setting):
        runs = {"good": good, "dead": dead, "wrong": wrong, "good too": good, "hangs": lambda: time.sleep(999)}
        return [Step(name, run) for name, run in (*runs.items(), ("never", good))]
part = Trouble("a", "trouble", "", 600, (), True)
if "--worker" in sys.argv:
    worker.main(part, int(sys.argv[-1]), True, 0)
from gpu import report, supervision
class Impatient(supervision.Supervisor):
    def _take(self, event):
        super()._take(event)
        if "begin" in event and self._steps[event["begin"]] == "hangs":  # the time is up, without a wait
            real = supervision.monotonic
            supervision.monotonic = lambda: real() + 600
outcome = Impatient(part, 600, [sys.executable, __file__], True).run()
for row in outcome.rows:
    print(row["what"], "|", row["seen"])
print(outcome.broken, outcome.skipped, report.exit_code([outcome]))
"""


@pytest.mark.slow
@needs_triton
def test_a_step_that_dies_or_hangs_does_not_take_the_rest_with_it(tmp_path: Path) -> None:
    script = tmp_path / "trouble.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n{USE}{TROUBLE}")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "good | seen",
        "dead | its process ended with code -9",
        "wrong | ValueError: no such thing",
        "good | seen",
    ], done.stderr[-3000:]
    assert lines[4].startswith("hangs | stopped after ")
    assert lines[4].endswith(" s: the part's 600 s were used up")
    assert lines[5].startswith("never | skipped: the part's 600 s were used up")
    assert lines[6] == "['dead', 'wrong'] ['hangs', 'never'] 1"
