"""Two runs side by side: differences, divergences, shares of tensors, and how much may differ."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollout_pool.actors.rank_records import Share, TopTwo
from rollout_pool.errors import ConfigError
from rollout_pool.tp_validation.comparison import (
    Difference,
    Divergence,
    agreement,
    divergences,
    first_difference,
    located,
    logprob_difference,
    odd_ranks,
    share_faults,
)
from rollout_pool.tp_validation.tolerances import DEFAULTS, NAMES, parse_tolerances
from rollout_pool.types import RolloutGroup, Sample, SamplingParams

TOKENS = st.lists(st.integers(0, 3), max_size=8)


def sample(tokens: list[int], index: int = 0, logprobs: Any = None) -> Sample:
    ids = np.array(tokens, dtype=np.int64)
    values = np.full(len(tokens), -1.0, dtype=np.float32) if logprobs is None else np.float32(logprobs)
    return Sample(ids, "", values, values, "length", None, 0, ids * 0, 0, index)


def group(index: int, *samples: list[int], error: str | None = None) -> RolloutGroup:
    made = [sample(tokens, number) for number, tokens in enumerate(samples)]
    return RolloutGroup(index, index, np.array([5, 6]), made, error, None, SamplingParams())


@given(TOKENS, TOKENS)
@settings(deadline=None)
def test_the_first_difference_is_the_first(left: list[int], right: list[int]) -> None:
    position = first_difference(left, right)
    if position is None:
        assert left == right
    else:
        assert left[:position] == right[:position]
        assert left[position : position + 1] != right[position : position + 1]


@settings(deadline=None)
@given(
    st.lists(st.lists(TOKENS, min_size=2, max_size=2), max_size=4),
    st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_divergences_are_exactly_the_samples_that_differ(
    texts: list[list[list[int]]], flips: list[bool]
) -> None:
    reference = [group(index, *two) for index, two in enumerate(texts)]
    flip = iter(flips)
    changed = [[[*tokens, 9] if next(flip) else tokens for tokens in two] for two in texts]
    run = [group(index, *two) for index, two in enumerate(changed)]
    expected = {
        (index, number, len(texts[index][number]))
        for index, two in enumerate(changed)
        for number, tokens in enumerate(two)
        if tokens != texts[index][number]
    }
    found = divergences(run, reference)
    assert {(one.prompt, one.sample, one.position) for one in found} == expected
    assert all(one.tokens == (9, None) for one in found)
    same, total = agreement(run, reference)
    assert same == total == sum(len(tokens) for two in texts for tokens in two)


def test_a_divergence_is_located_with_both_logits_and_their_gap() -> None:
    (found,) = divergences([group(0, [1, 2, 3, 4])], [group(0, [1, 2, 7, 5])])
    assert (found.position, found.tokens) == (2, (3, 7))
    run = TopTwo(np.array([[1, 0], [2, 0], [3, 7], [4, 0]]), np.float32([[9, 1], [9, 1], [5.0, 4.5], [9, 1]]))
    reference = TopTwo(
        np.array([[1, 0], [2, 0], [7, 3], [5, 0]]), np.float32([[9, 1], [9, 1], [4.75, 4.5], [9, 1]])
    )
    at = located(found, run, reference)
    assert at.run is not None
    assert at.reference is not None
    assert (at.run.gap, at.reference.gap, at.gap) == (0.5, 0.25, 0.5)
    assert at.describe() == (
        "prompt 0, sample 0, position 2: token 3, not token 7; here 5 for 3 and 4.5 for 7, a gap of 5.00e-01; "
        "on a single rank 4.75 for 7 and 4.5 for 3, a gap of 2.50e-01"
    )


def test_without_logits_a_divergence_counts_as_no_tie() -> None:
    assert Divergence(0, 0, 0, (1, 2)).gap == math.inf


def test_missing_samples_are_divergences() -> None:
    run, reference = [group(0, [1], error="lost"), group(1)], [group(0, [1], [2]), group(1, [3], [4])]
    found = divergences(run, reference)
    assert [(one.prompt, one.sample, one.tokens) for one in found] == [
        (0, 1, (None, 2)),
        (1, 0, (None, 3)),
        (1, 1, (None, 4)),
    ]
    assert agreement(run, reference) == (1, 4)


ARRAYS = hnp.arrays(np.float32, st.integers(1, 20), elements=st.floats(-100, 100, width=32))


@given(ARRAYS, st.data())
@settings(deadline=None)
def test_a_difference_is_that_of_numpy_and_adds_up(expected: Any, data: Any) -> None:
    got = data.draw(hnp.arrays(np.float32, expected.shape, elements=st.floats(-100, 100, width=32)))
    cut = data.draw(st.integers(0, len(expected)))
    whole = Difference.of(got, expected)
    parts = Difference.of(got[:cut], expected[:cut]) + Difference.of(got[cut:], expected[cut:])
    wide = np.abs(got.astype(np.float64) - expected)
    for one in (whole, parts):
        assert one.largest == wide.max()
        assert one.mean == pytest.approx(wide.mean())


@given(
    hnp.arrays(np.float32, st.integers(1, 20), elements=st.integers(-80, 80)),
    st.sampled_from([0.125, 0.5, 8.0, 1024.0]),  # powers of two: scaling rounds nothing
)
@settings(deadline=None)
def test_a_relative_difference_does_not_depend_on_scale(expected: Any, factor: float) -> None:
    assume(expected.any())
    got = expected + np.float32(0.5)
    plain = Difference.relative(got[None], expected[None])
    scaled = Difference.relative(got[None] * factor, expected[None] * factor)
    assert scaled.largest == pytest.approx(plain.largest, rel=1e-5)
    assert 0 < plain.largest <= 0.5 / float(np.sqrt(np.mean(expected**2))) + 1e-6


def test_a_relative_difference_is_over_element_and_vector() -> None:
    expected = np.float32([[3.0, -4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])  # rms 2.5 and 0
    got = expected + np.float32([[0.0, 0.0, 0.5, 0.0], [0.25, 0.0, 0.0, 0.0]])
    found = Difference.relative(got, expected)
    assert found.largest == 0.25
    assert found.mean == pytest.approx((0.5 / 2.5 + 0.25) / 8)
    assert Difference.relative(expected * 1.01, expected).largest == pytest.approx(0.04 / 6.5, rel=1e-3)


def test_a_nan_on_one_side_is_an_infinite_difference() -> None:
    nan, one = np.float32([np.nan]), np.float32([1.0])
    assert Difference.of(nan, one).largest == math.inf
    assert Difference.of(one, nan).largest == math.inf
    assert Difference.of(np.float32([np.inf]), one).largest == math.inf
    assert Difference.of(one, np.float32([-np.inf])).largest == math.inf
    assert Difference.of(np.float32([np.inf]), np.float32([np.inf])).largest == 0.0
    assert Difference.relative(np.float32([[np.nan, 1]]), np.float32([[1, 1]])).largest == math.inf
    assert Difference.relative(np.float32([[1, 1]]), np.float32([[np.nan, 1]])).largest == math.inf
    assert Difference.of(nan, nan).largest == 0.0
    assert Difference.of(one, np.float32([1.0, 2.0])).largest == math.inf


def test_logprobs_are_compared_up_to_where_the_tokens_part() -> None:
    run = RolloutGroup(0, 0, np.array([1]), [sample([1, 2, 3], 0, [-1.0, -2.0, -9.0])])
    reference = RolloutGroup(0, 0, np.array([1]), [sample([1, 2, 4], 0, [-1.0, -2.5, -1.0])])
    assert logprob_difference([run], [reference]).largest == 0.5


@pytest.mark.parametrize(
    ("checksums", "odd"),
    [
        (["a", "a", "a"], {}),
        (["a", "b", "a"], {"x": [1]}),
        (["b", "a", "a"], {"x": [0]}),
        (["a", "b"], {"x": [1]}),
        (["a"], {}),
    ],
)
def test_the_odd_rank_is_the_one_unlike_the_others(checksums: list[str], odd: dict[str, list[int]]) -> None:
    assert odd_ranks([{"x": value, "y": "same"} for value in checksums]) == odd


def share(name: str = "w", layout: str = "split in dimension 0", **changes: Any) -> Share:
    right = Share(name, layout, 8, 16, 0, 0.0, 1.0, 2.0, "abc", "abc")
    return dataclasses.replace(right, **changes)


def test_right_shares_have_no_fault() -> None:
    norm = share("norm", "replicated", full_elements=8)
    assert share_faults([[share(), norm], [share(), norm]]) == []


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            [share(num_wrong=3, largest_error=0.5, checksum="def")],
            "rank 1: w (split in dimension 0): 3 of 8 elements",
        ),
        ([share(layout="split in dimension 1")], "w: ranks disagree on how it is split"),
        ([], "w: only 1 of 2 ranks have it"),
        ([share(layout="unknown", num_wrong=8, expected="")], "rank 1: w: 8 elements are no part"),
        ([share(full_elements=0, num_wrong=8, expected="")], "rank 1: w is not in the checkpoint"),
        ([share(elements=4)], "w: the parts of all ranks do not make up the whole"),
    ],
)
def test_a_wrong_share_is_told_with_rank_and_name(second: list[Share], message: str) -> None:
    (fault,) = share_faults([[share()], second])
    assert fault.startswith(message)


def test_tolerances_are_set_for_one_dtype_or_for_all() -> None:
    found = parse_tolerances(["logprobs_max=0.5", "float32.greedy_gap=0", "float32.logprobs_max=1e-6"])
    assert found["float32"].logprobs_max == 1e-6
    assert found["bfloat16"].logprobs_max == 0.5
    assert found["float32"].greedy_gap == 0
    assert found["bfloat16"].greedy_gap == DEFAULTS["bfloat16"].greedy_gap
    assert parse_tolerances([]) == DEFAULTS


@pytest.mark.parametrize(
    "setting", ["logprobs_max", "logprob=1", "float64.logprobs_max=1", "logprobs_max=x", "logprobs_max=-1",
                "logprobs_max=nan", ".logprobs_max=1", "=1"],
)  # fmt: skip
def test_a_wrong_tolerance_is_named(setting: str) -> None:
    with pytest.raises(ConfigError, match="--tolerance"):
        parse_tolerances([setting])


def test_every_tolerance_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tp_validation.md").read_text(encoding="utf-8")
    for name in NAMES:
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        values = [cell.strip() for cell in row.split("|")[2:5]]
        assert [float(value) for value in values] == [
            getattr(DEFAULTS[dtype], name) for dtype in ("float32", "bfloat16", "float16")
        ]
