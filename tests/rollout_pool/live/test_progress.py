"""Progress where it is shown: logs, terminals, notebooks."""

from __future__ import annotations

import io
import math
import queue
import re
from collections.abc import Iterator
from typing import Any

import pytest

from rollout_pool import track
from rollout_pool.live.progress import Progress
from rollout_pool.live.rates import Rate, duration
from rollout_pool.types import EngineStats, PoolStats

STATS = PoolStats(actors=(EngineStats(num_slots=8, live_rows=3), EngineStats(num_slots=8, live_rows=8)))
CELL = """
from rollout_pool.live import displays, progress
displays.NOTEBOOK_INTERVAL_S = 0.0
progress.LEAST_SPAN_S = float("inf")
from rollout_pool import track
total = sum(track(iter(range(5)), total=5, description="of the notebook"))
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_than_on_a_terminal_it_is_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_pool.live.displays.PLAIN_INTERVAL_S", 0.0)
    monkeypatch.setattr("rollout_pool.live.progress.LEAST_SPAN_S", math.inf)
    with Progress(10, done=4) as progress:
        progress.update(STATS)
        progress.add_group()
        progress.say("that's it")
    assert capsys.readouterr().err.splitlines() == [
        "4/10 groups, 0 tokens/s, 11/16 slots in use",
        "5/10 groups, 0 tokens/s, 11/16 slots in use",
        "that's it",
    ]


def test_plain_lines_are_few_and_the_last_group_always_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_pool.live.displays.PLAIN_INTERVAL_S", math.inf)
    lines = io.StringIO()
    assert list(track(iter("abc"), total=3, stream=lines)) == ["a", "b", "c"]
    assert lines.getvalue() == "3/3 groups\n"


def test_on_a_terminal_it_is_a_bar_that_leaves_room_for_lines() -> None:
    terminal = Terminal()
    with Progress(10, stream=terminal) as progress:
        progress.update(STATS)
        progress.add_group()
        progress.say("[a line]")
    shown = terminal.getvalue()
    assert "[a line]" in shown
    assert "1/10" in shown
    assert "11/16 slots in use" in shown


def test_the_rest_of_the_time_is_told_when_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    with Progress(10, stream=io.StringIO()) as progress:
        for _ in range(4):
            clock[0] += 20.0
            progress.add_group()
        assert str(progress) == "4/10 groups, 2 min left"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    pytest.importorskip("ipykernel")
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=120)
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_in_a_notebook_it_is_one_output_that_is_renewed(kernel: Any) -> None:
    request = kernel.execute(CELL)
    shown, renewed, streams = [], [], []
    while True:
        try:
            message = kernel.get_iopub_msg(timeout=120)
        except queue.Empty:
            pytest.fail("the kernel gave no answer")
        if message["parent_header"].get("msg_id") != request:  # of what was asked at its start
            continue
        kind, content = message["msg_type"], message["content"]
        assert kind != "error", content
        if kind == "display_data":
            shown.append(content["data"]["text/plain"])
        elif kind == "update_display_data":
            renewed.append(content["data"]["text/plain"])
        elif kind == "stream":
            streams.append(content["text"])
        elif kind == "status" and content["execution_state"] == "idle":
            break
    assert (len(shown), streams) == (1, [])
    assert re.fullmatch("░+ 0/5 of the notebook", shown[0])
    assert re.fullmatch("█+░+ 1/5 of the notebook", renewed[0])
    assert re.fullmatch("█+ 5/5 of the notebook", renewed[-1])


def test_the_rate_is_that_of_the_last_seconds_and_survives_a_lost_actor() -> None:
    rate = Rate()
    for second in range(31):
        rate.add(100 * min(second, 15), now=float(second))  # 100 tokens/s, and nothing for 15 s
    assert rate.per_second == 0.0
    rate.add(40, now=31.0)  # a new actor counts from zero
    rate.add(90, now=32.0)
    assert rate.per_second == 50.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (89, "89 s"), (91, "2 min"), (5370, "1 h 30 min"), (11100, "3 h 05 min")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text
