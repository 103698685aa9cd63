"""From what ranks tell to a verdict, a table and JSON. The ranks are fakes that answer from a table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import numpy as np
import pytest

from rollout_pool.actors.rank_records import Checked, Rolled, RollPlan, Share, States, TopTwo, Usage
from rollout_pool.actors.rollout_actor import RankInfo
from rollout_pool.config import PoolConfig
from rollout_pool.errors import CapacityError, ConfigError, RolloutPoolError, UnsupportedModelError
from rollout_pool.tp_validation.findings import findings
from rollout_pool.tp_validation.job import validate
from rollout_pool.tp_validation.report import Report
from rollout_pool.tp_validation.tolerances import DEFAULTS, parse_tolerances
from rollout_pool.types import RolloutGroup, Sample, SamplingParams
from rollout_pool.verification import Verification

PLAN = RollPlan(((5, 6), (5, 7)), 3, 2, 0)
GREEDY = [[1, 2, 3], [4, 5, 6]]


def group(index: int, *samples: list[int], error: str | None = None) -> RolloutGroup:
    made = []
    for number, tokens in enumerate(samples):
        ids = np.array(tokens, dtype=np.int64)
        values = np.full(len(tokens), -1.0, dtype=np.float32)
        made.append(Sample(ids, "", values, values, "length", None, 0, ids * 0, 0, number))
    return RolloutGroup(index, index, np.array([5, 6]), made, error, None, SamplingParams())


def share(name: str = "w", layout: str = "split in dimension 0", **changes: Any) -> Share:
    right = Share(name, layout, 8, 16, 0, 0.0, 1.0, 2.0, "abc", "abc")
    return dataclasses.replace(right, **changes)


class FakeRanks:
    """Ranks that answer from a table; ``changes`` replaces answers of single methods."""

    def __init__(self, size: int, changes: dict[str, Any]) -> None:
        self.places = [RankInfo(rank, 100 + rank, "here", "cpu") for rank in range(size)]
        self.size = size
        self.changes = changes
        self.called: list[tuple[str, Any]] = []

    def call(self, method: str, *arguments: Any) -> list[Any]:
        self.called.append((method, arguments))
        answer = self.changes.get(method, getattr(self, f"_{method}", None))
        return [answer(rank, *arguments) for rank in range(1 if method == "apply" else self.size)]

    def call_and_keep(self, method: str, *arguments: Any) -> tuple[list[Any], Any]:
        pairs = self.call(method, *arguments)
        return [first for first, _ in pairs], lambda: pairs[0][1]

    def _shares(self, rank: int) -> list[Share]:
        split = share(elements=16 // self.size) if self.size > 1 else share(layout="replicated", elements=16)
        return [split]

    def _all_reduce(self, rank: int) -> Checked:
        return Checked({"sum": "s"} if self.size > 1 else {})

    def _states(self, rank: int, prompt: Any) -> tuple[Checked, States | None]:
        numbers = np.float32([[1.0, -1.0]])
        return Checked({"logits": "l"}), States({"hidden": numbers}, numbers) if rank == 0 else None

    def _roll(self, rank: int, plan: RollPlan) -> Rolled | None:
        if rank:
            return None
        greedy = [group(index, tokens) for index, tokens in enumerate(GREEDY)]
        shared = [group(index, tokens, tokens) for index, tokens in enumerate(GREEDY)]
        return Rolled(greedy, shared, shared, 12, 2.0)

    def _top_two(self, rank: int, prompt: Any, completion: list[int]) -> TopTwo | None:
        ids = np.array([[token, 0] for token in completion])
        return None if rank else TopTwo(ids, np.float32([[2.0, 1.0]] * len(completion)))

    def _usage(self, rank: int) -> Usage:
        return Usage(2**20, 2**21, 2**22)

    def _apply(self, rank: int, function: Any, groups: Any) -> Verification:
        return Verification(1e-6, 1e-7, 18, 6, ("0", 0, 0), {})

    def _apply_on(self, rank: int, target: int, function: Any) -> None:
        if rank == target:
            function("the model", rank)


def validated(sizes: list[int], *, after_load: Any = None, **changes: Any) -> tuple[Report, list[str]]:
    """Validate fakes; ``changes`` are answers of the ranks of sizes above 1, or errors at their start."""
    started: list[str] = []

    @contextmanager
    def launch(config: PoolConfig) -> Iterator[FakeRanks]:
        size = config.tensor_parallel_size
        error = changes.get(f"error_{size}")
        if error is not None:
            raise error
        started.append(f"{size} {config.dtype}")
        yield FakeRanks(size, changes if size > 1 else {})

    report = validate(
        PoolConfig(model="m"), PLAN, sizes, ["float32"], DEFAULTS, launch, after_load=after_load
    )
    return report, started


def failed(report: Report) -> list[tuple[int, str]]:
    return [(found.size, found.check) for row in report.rows for found in row.findings if not found.passed]


def test_equal_runs_pass_and_the_single_rank_comes_last_but_is_shown_first() -> None:
    report, started = validated([2, 4])
    assert report.passed
    assert started == ["2 float32", "4 float32", "1 float32"]
    assert [row.outcome.size for row in report.rows] == [1, 2, 4]
    assert list(report.violations()) == []
    assert report.verdict() == "all 20 checks passed"
    checks = {found.check for found in report.rows[1].findings}
    assert checks == {"parameters", "same bits on ranks", "hidden", "logits", "greedy tokens", "sampled tokens",
                      "rollouts", "shared prefill", "logprobs"}  # fmt: skip


def logits_off(rank: int, prompt: Any) -> tuple[Checked, States | None]:
    numbers = np.float32([[1.0, -1.0]])
    return Checked({"logits": "l"}), States({"hidden": numbers}, numbers + np.float32(0.01))


def other_bits(rank: int, prompt: Any) -> tuple[Checked, States | None]:
    numbers = np.float32([[1.0, -1.0]])
    return Checked({"logits": f"l{rank}"}), States({"hidden": numbers}, numbers)


def parted(rank: int, plan: RollPlan) -> Rolled | None:
    right = FakeRanks(2, {})._roll(rank, plan)
    return right and dataclasses.replace(right, greedy=[group(0, [1, 2, 9]), right.greedy[1]])


def unshared(rank: int, plan: RollPlan) -> Rolled | None:
    right = FakeRanks(2, {})._roll(rank, plan)
    return right and dataclasses.replace(right, apart=[group(0, [1, 2, 3], [1, 9, 3]), right.shared[1]])


def broken(rank: int, plan: RollPlan) -> Rolled | None:
    right = FakeRanks(2, {})._roll(rank, plan)
    return right and dataclasses.replace(
        right, greedy=[group(0, error="logits are not finite"), right.greedy[1]]
    )


@pytest.mark.parametrize(
    ("changes", "checks", "message"),
    [
        (
            {"shares": lambda rank: [share(num_wrong=rank, checksum="d")]},
            ["parameters"],
            "  rank 1: w (split in dimension 0): 1 of 8 elements are not the checkpoint's",
        ),
        ({"states": logits_off}, ["logits"], "FAILED size 2, float32, logits: relative max 5.0e-03, mean 5.0e-03; absolute max 1.0e-02 (tolerance: max 0.001, mean 1e-05)"),
        ({"states": other_bits}, ["same bits on ranks"], "  prompt 0, logits: other bits on rank 1"),
        ({"all_reduce": lambda rank: Checked({"sum": str(rank)})}, ["same bits on ranks"], "  sum: other bits on rank 1"),
        ({"roll": parted}, ["greedy tokens"], "  prompt 0, sample 0, position 2: token 9, not token 3; here 2 for 9"),
        ({"roll": unshared}, ["shared prefill"], "  prompt 0, sample 1, position 1: token 9, not token 2"),
        ({"roll": broken}, ["greedy tokens", "rollouts"], "  greedy: logits are not finite"),
    ],
    ids=["share", "logits", "bits", "all-reduce", "greedy", "prefill", "error"],
)  # fmt: skip
def test_what_is_wrong_fails_its_own_check_with_a_line(changes: Any, checks: list[str], message: str) -> None:
    report, _ = validated([2], **changes)
    assert failed(report) == [(2, check) for check in checks]
    assert not report.passed
    assert any(line.startswith(message) for line in report.violations()), list(report.violations())


def test_tokens_that_part_at_a_tie_pass_with_a_note() -> None:
    def tied(rank: int, prompt: Any, completion: list[int]) -> TopTwo | None:
        return TopTwo(np.array([[9, 3]] * 3), np.float32([[2.0, 2.0]] * 3))

    report, _ = validated([2], roll=parted, top_two=tied)
    assert failed(report) == [(2, "greedy tokens")]  # on the single rank it was no tie
    limits = parse_tolerances(["greedy_gap=1"])
    rows = report.rows
    assert rows[1].outcome.measured is not None
    again = findings(rows[1].outcome, rows[0].outcome, limits["float32"])
    report = Report("m", "transformers", PLAN, [dataclasses.replace(rows[1], findings=again)])
    assert report.passed
    assert [line for line in report.notes() if "position 2: token 9, not token 3" in line]


def test_a_refused_size_does_not_stop_the_others() -> None:
    report, started = validated([2, 3, 4], error_3=UnsupportedModelError("4 heads cannot be split over 3"))
    assert started == ["2 float32", "4 float32", "1 float32"]
    assert failed(report) == [(3, "refused")]
    assert "FAILED size 3, float32, refused: 4 heads cannot be split over 3" in "\n".join(report.violations())


def test_no_room_is_a_refusal_and_a_lost_rank_a_failure() -> None:
    report, _ = validated(
        [2, 4], error_4=CapacityError("the cluster has 2 GPUs"), error_2=RolloutPoolError("rank 1: died")
    )
    assert failed(report) == [(2, "failed"), (4, "refused")]


def test_without_the_single_rank_the_comparison_fails_but_the_rest_is_told() -> None:
    report, _ = validated([2], error_1=CapacityError("too large for one"))
    assert failed(report) == [(1, "refused"), (2, "single rank")]
    assert "parameters" in {found.check for found in report.rows[1].findings if found.passed}


def test_a_model_that_cannot_be_loaded_ends_it() -> None:
    with pytest.raises(ConfigError, match="cannot load"):
        validated([2], error_2=ConfigError("cannot load model"))


def test_after_load_is_called_on_every_rank() -> None:
    seen: list[tuple[Any, int]] = []
    validated([2], after_load=lambda model, rank: seen.append((model, rank)))
    assert seen == [("the model", 0), ("the model", 1), ("the model", 0)]


def test_the_table_and_the_json_hold_every_figure() -> None:
    from rich.console import Console

    report, _ = validated([2, 3], error_3=UnsupportedModelError("2 KV heads [not 3]"))
    text = StringIO()
    for table in report.tables():
        Console(file=text, width=132).print(table)
    shown = text.getvalue()
    assert max(map(len, shown.splitlines())) <= 132
    for piece in ("1 tensors, 1 split; 8 of 16 elements per rank", "6 tokens/s", "6 of 6 tokens equal",
                  "2 KV heads [not 3]", "max 1.0e-06", "peak MiB", "FAILED"):  # fmt: skip
        assert piece in shown, piece
    data = json.loads(json.dumps(report.as_json()))
    assert data["passed"] is False
    one, two, three = data["sizes"]
    assert (one["size"], two["size"], three["size"]) == (1, 2, 3)
    assert (three["status"], three["reason"]) == ("refused", "2 KV heads [not 3]")
    assert two["tokens_per_second"] == 6.0
    assert [rank["kv_bytes"] for rank in two["ranks"]] == [2**21, 2**21]
    logits = next(found for found in two["findings"] if found["check"] == "logits")
    assert logits["values"] == {"max": 0.0, "mean": 0.0, "absolute_max": 0.0, "absolute_mean": 0.0}
    assert data["violations"][0].startswith("FAILED size 3")
