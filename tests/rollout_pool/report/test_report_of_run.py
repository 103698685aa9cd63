"""From `rollout-pool run` to its page: a real pool, stopped in the middle, resumed, drawn."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_pool.cli import main
from rollout_pool.errors import OutputFileError
from rollout_pool.results import read_groups
from rollout_pool.trace import TraceFile, read_trace

NUM_PROMPTS, N, NUM_SLOTS = 12, 3, 4


def test_the_page_of_a_resumed_run_shows_all_of_it(
    cluster: None, tiny_model_dir: str, tmp_path: Path, visit: Callable[..., Any]
) -> None:
    prompts, output = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps(f"prompt number {number}") + "\n" for number in range(NUM_PROMPTS)))
    settings = {"--n": N, "--num-slots": NUM_SLOTS, "--max-length": 128, "--max-new-tokens": 40, "--seed": 1}
    words = ["--model", tiny_model_dir, *(str(word) for item in settings.items() for word in item)]
    command = ["run", "--prompts", str(prompts), "--output", str(output), "--set", "cpus_per_actor=1", *words]
    assert main([*command, "--num-actors", "2"]) == 0
    lines = output.read_text().splitlines(keepends=True)
    output.write_text("".join(lines[:9]))
    assert main([*command, "--resume"]) == 0

    events = list(read_trace(tmp_path / "out.trace.jsonl"))
    starts = [event for event in events if event["event"] == "run"]
    assert [(start["num_prompts"], start["num_kept"]) for start in starts] == [
        (NUM_PROMPTS, 0),
        (NUM_PROMPTS, 9),
    ]
    told = [event for event in events if event["event"] == "group"]
    assert sorted(group["index"] for group in told[:NUM_PROMPTS]) == list(range(NUM_PROMPTS))
    assert len(told) == NUM_PROMPTS + 3
    seats = defaultdict(list)
    for group in told:
        assert {stay[0] for stay in group["stays"]} == set(range(N))
        for _, slot, start, ready, end in group["stays"]:
            assert 0 <= slot < NUM_SLOTS
            assert start <= ready <= end
            seats[group["actor"], slot].append((start, end))
    for stays in seats.values():
        stays.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(stays))

    assert main(["report", str(output)]) == 0
    page = visit(output.with_suffix(".html"))
    assert page.locator("#state").text_content() == "finished"
    assert page.locator("#incidents li span").all_text_contents() == ["the run was stopped and resumed"]
    samples = [sample for group in read_groups(output) for sample in group.samples]
    assert page.locator("#count").text_content() == f"{len(samples)} of {NUM_PROMPTS * N}"
    page.locator(".row").nth(4).click()
    for place in range(N):
        card = page.locator(".sibling").nth(place)
        card.locator(".text").wait_for(state="attached")  # drawn when it comes into view
        tokens = card.locator(".token:not(.beside)").all_text_contents()
        assert "".join(tokens) == samples_of(output, 1)[place].text


def samples_of(output: Path, index: int) -> list[Any]:
    return next(group.samples for group in read_groups(output) if group.index == index)


def test_a_trace_takes_the_place_of_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.trace.jsonl"
    path.write_text('{"mine": 1}\n')
    with pytest.raises(OutputFileError, match="is not the trace of a run; remove it, or use --no-trace"):
        TraceFile(path)
    assert path.read_text() == '{"mine": 1}\n'


def test_a_full_disk_ends_the_trace_and_not_the_run() -> None:
    with TraceFile("/dev/full") as trace:
        trace.end()
        trace.end()
        assert trace.fault is not None
        assert "ends early: No space left on device" in trace.fault
