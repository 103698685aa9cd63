"""What goes into a page, read from files that are whole, growing, resumed, or not there."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_pool.cli import main
from rollout_pool.report.collected import Collected
from rollout_pool.report.pieces import Pieces
from rollout_pool.report.timeline import timeline_of


def blob(page: Path, name: str) -> bytes:
    found = re.search(rf'id="blob-{name}">([A-Za-z0-9+/=]*)</script>', page.read_text())
    assert found is not None
    return gzip.decompress(base64.b64decode(found[1]))


def overview(page: Path) -> Any:
    return json.loads(blob(page, "overview"))


def test_a_report_holds_every_token_and_its_log_probability(fake_run: Callable[..., Any]) -> None:
    run = fake_run(8, 4)
    assert main(["report", str(run.output)]) == 0
    page = run.output.with_suffix(".html")
    vocabulary = json.loads(blob(page, "texts"))["ids"]
    places = np.frombuffer(blob(page, "ids"), dtype=np.uint16)
    assert [vocabulary[place] for place in places] == [
        i for sample in run.samples for i in sample["token_ids"]
    ]
    packed = np.frombuffer(blob(page, "logprobs"), dtype=np.uint16)
    logprobs = np.where(packed == 65_535, np.nan, packed / -1000)
    wanted = [np.nan if value is None else value for sample in run.samples for value in sample["logprobs"]]
    np.testing.assert_allclose(logprobs, wanted, atol=6e-4)


def test_nothing_that_a_sample_says_is_html(fake_run: Callable[..., Any]) -> None:
    run = fake_run(8, 4)
    main(["report", str(run.output)])
    page = run.output.with_suffix(".html").read_text()
    assert "pwned" not in page
    assert "xylophone" not in page
    named = run.output.with_name("<img src=x>.jsonl")
    run.output.rename(named)
    assert main(["report", str(named), "-o", str(named.parent / "named.html")]) == 0
    page = (named.parent / "named.html").read_text()
    assert "<img src=x>" not in page
    assert "&lt;img src=x&gt;" in page


def test_a_growing_run_is_drawn_as_far_as_it_is(
    fake_run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = fake_run(8, 4)
    lines = run.output.read_text().splitlines(keepends=True)
    run.output.write_text("".join(lines[:3]) + lines[3][:100])
    trace = run.output.with_suffix(".trace.jsonl")
    trace.write_text("".join(trace.read_text().splitlines(keepends=True)[:8])[:-20])
    assert main(["report", str(run.output)]) == 0
    facts = overview(run.output.with_suffix(".html"))
    assert (facts["num_groups"], facts["num_prompts"], facts["is_over"]) == (3, 8, False)
    trace.unlink()
    assert main(["report", str(run.output)]) == 0
    assert "no timeline: there is no trace" in capsys.readouterr().err


def test_without_its_tokenizer_a_run_is_drawn_with_plain_texts(
    fake_run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fake_run(8, 4)
    assert main(["report", str(run.output), "--tokenizer", str(tmp_path)]) == 0
    assert f"not split into tokens: there is no tokenizer.json in {tmp_path}" in capsys.readouterr().err
    assert json.loads(blob(run.output.with_suffix(".html"), "texts"))["pieces"] is None


def test_texts_are_thinned_by_whole_groups_and_counts_are_not(fake_run: Callable[..., Any]) -> None:
    run = fake_run(20, 4)
    collected = Collected(run.output, max_samples=30)
    assert list(collected.groups) == [0, 4, 8, 12, 16]
    assert [len(group["texts"]) for group in collected.groups.values()] == [4] * 5
    assert collected.num_samples == len(run.samples) == 76
    assert len(collected.columns["length"]) == 77
    assert collected.tokens()[0].size == sum(
        len(sample["token_ids"]) for index in collected.groups for sample in run.records[index]["samples"]
    )


def test_parts_of_a_resumed_run_follow_each_other_without_the_pause(fake_run: Callable[..., Any]) -> None:
    events = fake_run(8, 4).events
    whole = timeline_of(events)
    later = [{**event, "time": event["time"] + 86_400} for event in events]
    for event in later:
        if event["event"] == "group":
            event["stays"] = [[*stay[:2], *(at + 86_400 for at in stay[2:])] for stay in event["stays"]]
    both = timeline_of([*events[:-1], *later])
    assert both.seconds == pytest.approx(2 * whole.seconds, abs=0.01)
    assert [kind for _, kind, _ in both.incidents].count("resumed") == 1
    assert both.totals["new_tokens"] == 2 * whole.totals["new_tokens"]
    first, second = both.stays[: len(whole.stays)], both.stays[len(whole.stays) :]
    for stay, again in zip(first, second, strict=True):
        assert stay[:4] == again[:4]
        assert again[4] == pytest.approx(stay[4] + whole.seconds, abs=0.01)


def test_rates_count_every_token_once(fake_run: Callable[..., Any]) -> None:
    run = fake_run(8, 4)
    timeline = timeline_of(run.events)
    times = np.array([0.0, *(point[0] for point in timeline.points)])
    rates = np.array([point[3] for point in timeline.points])
    assert float(np.diff(times) @ rates) == pytest.approx(timeline.totals["new_tokens"], rel=0.01)


def test_pieces_are_texts_of_single_tokens(tokenizer_dir: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    ids = [*tokenizer.encode("the answer é").ids, 0]
    pieces = Pieces(str(tokenizer_dir))
    assert "".join(pieces.of(ids)).startswith("the answer ")
    assert pieces.of(ids)[-3:] == ["\ufffd", "\ufffd", "<eos>"]  # two halves of a character
    assert pieces.special(ids) == [len(ids) - 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jsonl"], "there is no file nowhere.jsonl"),
        (["RUN", "--trace", "gone.jsonl"], "there is no file gone.jsonl"),
        (["RUN", "-o", "no/such/folder/page.html"], "cannot write no/such/folder/page.html"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, fake_run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = fake_run(8, 4)
    assert main(["report", *(str(run.output) if part == "RUN" else part for part in arguments)]) == 2
    assert message in capsys.readouterr().err
