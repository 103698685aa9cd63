"""Output files: whole lines whatever happens, and a resumed file that equals an uninterrupted one."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rollout_pool.errors import InputFileError, OutputFileError
from rollout_pool.output import OutputFile
from rollout_pool.prompt_file import PromptLine, read_prompts
from rollout_pool.results import read_groups
from rollout_pool.run_config import RunConfig
from rollout_pool.types import RolloutGroup, Sample

CONFIG = RunConfig.load(None, {"model": "m"})
LINES = [
    '"zero"',
    "[1, 2]",
    '{"prompt": "two", "request_id": "b", "metadata": {"answer": [1, "x"]}}',
    '"three"',
]


def prompts(folder: Path, lines: Sequence[str] = LINES) -> list[PromptLine]:
    (folder / "p.jsonl").write_text("\n".join(lines))
    return read_prompts(str(folder / "p.jsonl"), CONFIG)


def answer(line: PromptLine, error: str | None = None) -> RolloutGroup:
    """A group with two samples that differ in everything that a file must keep."""
    logprobs = np.float32([-0.1, -1e-7, -123.456])
    sample = Sample(
        token_ids=np.array([5, 6, line.index], dtype=np.int64),
        text=f"text {line.index} \u2028 \u00e9\n",
        logprobs=logprobs,
        sampling_logprobs=logprobs * 2,
        finish_reason="stop",
        stop_match="###",
        weight_version=3,
        token_versions=np.full(3, 3, dtype=np.int64),
        seed=2**63 - 1,
        sample_index=0,
    )
    second = dataclasses.replace(sample, sample_index=1, stop_match=2, seed=1)
    samples = [] if error else [sample, second]
    ids = np.array([1, 2], dtype=np.int64)
    return RolloutGroup(line.request.request_id, 99, ids, samples, error, sampling=line.sampling)


def write(path: Path, lines: list[PromptLine], order: Sequence[int], *, resume: bool = False) -> None:
    with OutputFile(path, lines, "hash", resume=resume) as output:
        for index in order:
            output.append(lines[index], answer(lines[index]))
        output.finish()


@pytest.fixture(params=["out.jsonl", "out.parquet"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def part(target: Path) -> Path:
    """The file that lines go to while a run goes on."""
    return target if target.suffix == ".jsonl" else target.with_name(target.name + ".part.jsonl")


def test_what_is_written_reads_back(tmp_path: Path, target: Path) -> None:
    lines = prompts(tmp_path)
    write(target, lines, [2, 0, 3, 1])
    groups = {group.index: group for group in read_groups(target)}
    assert sorted(groups) == [0, 1, 2, 3]
    for line in lines:
        found, wanted = groups[line.index], answer(line)
        assert str(found.request_id) == str(wanted.request_id)
        assert (found.metadata, found.sampling) == (line.request.metadata, line.sampling)
        assert found.prompt_token_ids.tolist() == [1, 2]
        for sample, original in zip(found.samples, wanted.samples, strict=True):
            for field in dataclasses.fields(Sample):
                np.testing.assert_array_equal(getattr(sample, field.name), getattr(original, field.name))
            assert sample.logprobs.dtype == np.float32
    assert not part(target).exists() or part(target) == target


def test_parquet_rows_are_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    lines = prompts(tmp_path)
    write(tmp_path / "o.parquet", lines, [2, 0, 3, 1])
    assert [group.index for group in read_groups(tmp_path / "o.parquet")] == [0, 1, 2, 3]


def test_jsonl_lines_are_json_and_short_decimals(tmp_path: Path) -> None:
    lines = prompts(tmp_path)
    write(tmp_path / "o.jsonl", lines, [0])
    (text,) = (tmp_path / "o.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    record = json.loads(text)
    assert record["prompt"] == "zero"
    assert '"logprobs":[-0.1,-1e-07,-123.456]' in text


def test_a_number_that_json_lacks_becomes_null(tmp_path: Path) -> None:
    (line, *_), path = prompts(tmp_path), tmp_path / "o.jsonl"
    group = answer(line)
    group.samples[0].logprobs[:2] = [np.nan, -np.inf]
    with OutputFile(path, [line], "hash", resume=False) as output:
        output.append(line, group)
    assert json.loads(path.read_text())["samples"][0]["logprobs"] == [None, None, -123.456]
    (back,) = read_groups(path)
    assert np.isnan(back.samples[0].logprobs[:2]).all()


def test_resuming_keeps_what_is_there_and_ends_with_the_same_file(tmp_path: Path, target: Path) -> None:
    lines = prompts(tmp_path)
    write(target.with_stem("whole"), lines, [2, 0, 1, 3])
    with OutputFile(target, lines, "hash", resume=False) as output:
        output.append(lines[2], answer(lines[2]))
        output.append(lines[0], answer(lines[0]))
    with OutputFile(target, lines, "hash", resume=True) as output:
        assert output.done == {0, 2}
        for index in (1, 3):
            output.append(lines[index], answer(lines[index]))
        output.finish()
    assert target.read_bytes() == target.with_stem("whole").read_bytes()


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path: Path, target: Path) -> None:
    lines = prompts(tmp_path)
    with OutputFile(target, lines, "hash", resume=False) as output:
        output.append(lines[0], answer(lines[0]))
    whole = part(target).read_bytes()
    for cut in (1, len(whole) // 2, len(whole) - 1):
        part(target).write_bytes(whole + whole[:cut])
        with OutputFile(target, lines, "hash", resume=True) as output:
            assert output.done == {0}
        assert part(target).read_bytes() == whole


def test_failed_groups_are_tried_again(tmp_path: Path, target: Path) -> None:
    lines = prompts(tmp_path)
    with OutputFile(target, lines, "hash", resume=False) as output:
        for index in range(4):
            output.append(lines[index], answer(lines[index], "lost" if index in (1, 3) else None))
        assert output.failed == {1, 3}
        output.finish()
    assert {group.index: group.error for group in read_groups(target)} == {
        0: None,
        1: "lost",
        2: None,
        3: "lost",
    }
    with OutputFile(target, lines, "hash", resume=True) as output:
        assert (output.done, output.failed) == ({0, 2}, set())
        for index in (1, 3):
            output.append(lines[index], answer(lines[index]))
        output.finish()
    assert sorted(group.index for group in read_groups(target) if group.error is None) == [0, 1, 2, 3]


def test_a_finished_output_may_be_continued_with_more_prompts(tmp_path: Path, target: Path) -> None:
    few, all_lines = prompts(tmp_path, LINES[:3]), prompts(tmp_path)
    write(target, few, [0, 1, 2])
    write(target, all_lines, [3], resume=True)
    write(target.with_stem("whole"), all_lines, [0, 1, 2, 3])
    assert target.read_bytes() == target.with_stem("whole").read_bytes()


def test_resuming_a_finished_output_changes_nothing(tmp_path: Path, target: Path) -> None:
    lines = prompts(tmp_path)
    write(target, lines, [3, 2, 1, 0])
    before = target.read_bytes()
    write(target, lines, [], resume=True)
    assert target.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["p.jsonl", target.name])


def test_a_run_without_results_leaves_no_file(tmp_path: Path, target: Path) -> None:
    with OutputFile(target, prompts(tmp_path), "hash", resume=False):
        assert part(target).exists()
    assert not part(target).exists()


def test_an_existing_output_is_refused_with_the_remedy(tmp_path: Path, target: Path) -> None:
    lines = prompts(tmp_path)
    with OutputFile(target, lines, "hash", resume=False) as output:
        output.append(lines[0], answer(lines[0]))
    with pytest.raises(OutputFileError, match="exists; continue it with --resume, or remove it"):
        OutputFile(target, lines, "hash", resume=False)
    assert len(part(target).read_bytes().splitlines()) == 1


@pytest.mark.parametrize(
    ("lines", "config_hash", "message"),
    [
        (LINES, "other", "line 1 was written with another model, seed, sampling, dtype or max_length"),
        (['"changed"', *LINES[1:]], "hash", "line 2 answers another prompt 0 than there is now"),
        (LINES[1:], "hash", "line 1 answers another prompt 2 than there is now"),
        (LINES[:1], "hash", "line 1 answers another prompt 2 than there is now"),
    ],
)
def test_an_output_of_another_run_is_refused(
    tmp_path: Path, target: Path, lines: list[str], config_hash: str, message: str
) -> None:
    first = prompts(tmp_path)
    with OutputFile(target, first, "hash", resume=False) as output:
        for index in (2, 0):
            output.append(first[index], answer(first[index]))
    before = part(target).read_bytes()
    with pytest.raises(OutputFileError, match=message):
        OutputFile(target, prompts(tmp_path, lines), config_hash, resume=True)
    assert part(target).read_bytes() == before


@pytest.mark.parametrize(
    "data", [b"hello\n", b"{}\n", b"[1]\n", b'{"index": "0", "config_hash": 1, "prompt_hash": 2}\n']
)
def test_a_file_of_something_else_is_refused_untouched(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_bytes(data)
    with pytest.raises(OutputFileError, match="notes.jsonl, line 1: not written by rollout-pool run"):
        OutputFile(path, prompts(tmp_path), "hash", resume=True)
    assert path.read_bytes() == data


def test_two_answers_to_one_prompt_are_refused(tmp_path: Path) -> None:
    lines, path = prompts(tmp_path), tmp_path / "o.jsonl"
    write(path, lines, [0])
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(OutputFileError, match="line 2 answers prompt 0, as an earlier one does"):
        OutputFile(path, lines, "hash", resume=True)


def test_only_one_run_writes_a_file(tmp_path: Path, target: Path) -> None:
    lines = prompts(tmp_path)
    with (
        OutputFile(target, lines, "hash", resume=False),
        pytest.raises(OutputFileError, match="another run is writing"),
    ):
        OutputFile(target, lines, "hash", resume=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("out.csv", "expected a name that ends in .jsonl or .parquet"),
        ("out", "expected a name that ends in .jsonl or .parquet"),
        ("no/such/folder/out.jsonl", "cannot write .*: No such file or directory"),
        ("no/such/folder/out.parquet", "cannot write .*: No such file or directory"),
    ],
)
def test_a_name_that_cannot_be_written_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(OutputFileError, match=message):
        OutputFile(tmp_path / name, prompts(tmp_path), "hash", resume=False)


def test_a_full_disk_leaves_whole_lines_and_says_so(tmp_path: Path) -> None:
    lines, path = prompts(tmp_path), tmp_path / "o.jsonl"
    with OutputFile(path, lines, "hash", resume=False) as output:
        output.append(lines[0], answer(lines[0]))
        whole = path.read_bytes()
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:  # the limit on a file's size stands in for a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, old[1]))
            with pytest.raises(OutputFileError, match="cannot write"):
                output.append(lines[1], answer(lines[1]))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
            signal.signal(signal.SIGXFSZ, ignored)
        assert path.read_bytes() == whole
        output.append(lines[1], answer(lines[1]))
    assert [group.index for group in read_groups(path)] == [0, 1]


def test_a_group_is_in_the_file_as_soon_as_it_is_appended(tmp_path: Path) -> None:
    """Killed without warning right after, the process leaves what it appended."""
    prompts(tmp_path)
    code = f"""
import importlib.util, os, signal
from pathlib import Path
spec = importlib.util.spec_from_file_location("test_output", {__file__!r})
tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tests)
lines = tests.prompts(Path({str(tmp_path)!r}))
output = tests.OutputFile({str(tmp_path / "o.jsonl")!r}, lines, "hash", resume=False)
output.append(lines[1], tests.answer(lines[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [group.index for group in read_groups(tmp_path / "o.jsonl")] == [1]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "o.jsonl",
            b"{}\n",
            r"o.jsonl, line 1: not a group that rollout-pool run wrote \('sampling' is missing\)",
        ),
        ("o.jsonl", b"hello\n", "o.jsonl, line 1: not valid JSON; name what"),
        ("o.jsonl", b'{"index": 0, "samp', "line 1: not valid JSON; it is cut off, so resume that run"),
        ("o.parquet", b"PAR1 not really", "cannot read .*o.parquet"),
        (None, b"", "there is no file"),
    ],
)
def test_a_result_file_that_is_none_is_told(
    tmp_path: Path, name: str | None, data: bytes, message: str
) -> None:
    path = tmp_path / (name or "none.jsonl")
    if name:
        path.write_bytes(data)
    with pytest.raises(InputFileError, match=message):
        list(read_groups(path))


def test_a_parquet_file_of_another_shape_is_told(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}), tmp_path / "o.parquet")
    with pytest.raises(InputFileError, match="its columns are not those that rollout-pool run writes"):
        list(read_groups(tmp_path / "o.parquet"))


def test_a_parquet_file_is_written_in_several_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_pool.parquet.ROWS_PER_WRITE", 3)
    lines = prompts(tmp_path, [f'"{number}"' for number in range(8)])
    write(tmp_path / "o.parquet", lines, [7, 6, 5, 4, 3, 2, 1, 0])
    assert [group.index for group in read_groups(tmp_path / "o.parquet")] == list(range(8))
    assert not [name for name in os.listdir(tmp_path) if name.endswith((".tmp", ".part.jsonl"))]
