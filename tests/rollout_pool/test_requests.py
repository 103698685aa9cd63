"""What the caller leaves open is filled in: sampling, seed, identity, index."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_pool import ConfigError, RequestError, RolloutRequest, SamplingParams
from rollout_pool.requests import call_seed, failed_group, resolve_requests
from rollout_pool.types import MAX_SEED

SEEDED = SamplingParams(seed=5)


def test_an_unnamed_request_is_its_index_in_the_call() -> None:
    requests = resolve_requests(["a", [1, 2], RolloutRequest("c")], None, seed=9)
    assert [request.identity for request in requests] == ["index:0", "index:1", "index:2"]
    assert [request.request_id for request in requests] == [0, 1, 2]
    assert [request.index for request in requests] == [0, 1, 2]
    assert [request.seed for request in requests] == [9, 9, 9]
    assert [request.label for request in requests] == ["prompt 0", "prompt 1", "prompt 2"]
    assert all(request.sampling == SamplingParams() for request in requests)


def test_a_named_request_keeps_its_identity_in_any_place() -> None:
    named = RolloutRequest("a", request_id="x")
    first, second = (
        resolve_requests([named, "b"], None, seed=1)[0],
        resolve_requests(["b", named], None, seed=1)[1],
    )
    assert first.identity == second.identity == "name:x"
    assert (first.index, second.index) == (0, 1)
    assert first.label == "request 'x'"


def test_a_name_is_not_an_index() -> None:
    """A request that is named 1 and the second one of a call are different."""
    named, _, second = resolve_requests([RolloutRequest("a", request_id=1), "b", "c"], None, seed=1)
    assert named.identity not in (second.identity, "index:1")


def test_the_seed_is_the_requests_then_the_samplings_then_the_calls() -> None:
    prompts = [
        RolloutRequest("a", seed=1, sampling=SEEDED),
        RolloutRequest("a", sampling=SEEDED),
        RolloutRequest("a", sampling=SamplingParams()),
        RolloutRequest("a", seed=0),
        "a",
    ]
    assert [r.seed for r in resolve_requests(prompts, SamplingParams(seed=7), seed=9)] == [1, 5, 7, 0, 7]


def test_sampling_of_the_request_replaces_that_of_the_call() -> None:
    call, own = SamplingParams(n=4), SamplingParams(temperature=0)
    requests = resolve_requests(["a", RolloutRequest("b", sampling=own)], call, seed=0)
    assert [request.sampling for request in requests] == [call, own]


def test_metadata_and_offset_are_passed_on() -> None:
    metadata = object()
    (request,) = resolve_requests([RolloutRequest("a", metadata=metadata, sample_offset=3)], None, seed=0)
    assert request.metadata is metadata
    assert request.sample_offset == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"sample_offset": -1}, "sample_offset"),
        ({"sample_offset": None}, "sample_offset"),
        ({"request_id": 1.5}, "request_id.*float"),
        ({"request_id": ("a",)}, "request_id.*tuple"),
        ({"sampling": {"n": 2}}, "SamplingParams.*dict"),
    ],
)
def test_a_wrong_field_is_a_fault_of_its_own_request(changes: dict[str, Any], message: str) -> None:
    good, bad = resolve_requests(["a", RolloutRequest("b", **changes)], None, seed=0)
    assert good.fault is None
    assert bad.fault is not None
    assert re.search(message, bad.fault)


@pytest.mark.parametrize(
    "prompts", ["text", b"text", {"role": "user"}, RolloutRequest("a"), 5, None, [1, 2, 3]]
)
def test_a_single_prompt_is_a_mistake_of_the_call(prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompts"):
        resolve_requests(prompts, None, seed=0)


def test_sampling_of_the_call_must_be_sampling() -> None:
    with pytest.raises(RequestError, match=r"SamplingParams.*dict"):
        resolve_requests(["a"], {"n": 2}, seed=0)  # type: ignore[arg-type]


def test_any_iterable_of_prompts_will_do() -> None:
    assert len(resolve_requests((text for text in "abc"), None, seed=0)) == 3
    assert resolve_requests([], None, seed=0) == []
    rows = resolve_requests(np.array([[1, 2], [3, 4]]), None, seed=0)
    assert [row.prompt.tolist() for row in rows] == [[1, 2], [3, 4]]


def test_a_failed_group_has_its_place_and_no_samples() -> None:
    (request,) = resolve_requests([RolloutRequest("a", request_id="x", metadata=3)], SEEDED, seed=0)
    group = failed_group(request, "it is empty")
    assert (group.request_id, group.index, group.samples, group.metadata) == ("x", 0, [], 3)
    assert group.sampling == SEEDED
    assert group.prompt_token_ids.dtype == np.int64
    assert group.error is not None
    assert "'x'" in group.error
    assert "it is empty" in group.error


@given(seed=st.integers(0, MAX_SEED - 1), call=st.integers(0, 1000))
def test_a_call_seed_is_a_seed(seed: int, call: int) -> None:
    assert 0 <= call_seed(seed, call) < MAX_SEED
    assert call_seed(seed, call) == call_seed(seed, call)


def test_call_seeds_of_neighbours_never_meet() -> None:
    """seed + call would give (1, 2) and (2, 1) the same draws."""
    seeds = {call_seed(seed, call) for seed in range(100) for call in range(100)}
    assert len(seeds) == 10_000


# Sampling parameters


@pytest.mark.parametrize("off", [None, 0, -1])
def test_top_k_is_off_in_every_spelling(off: int | None) -> None:
    assert SamplingParams(top_k=off) == SamplingParams()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("max_new_tokens", 0), ("min_new_tokens", -1), ("temperature", -0.1), ("temperature", float("nan")),
        ("temperature", float("inf")), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2), ("min_p", 1.5),
        ("repetition_penalty", 0.0), ("seed", -1), ("seed", 2**63), ("stop", ""), ("stop", ["a", ""]), ("stop", 3),
        ("stop_token_ids", [1.5]), ("stop_token_ids", True), ("temprature", 1.0),
    ],
)  # fmt: skip
def test_a_wrong_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        SamplingParams(**{field: value})
    assert "\n" not in str(caught.value)


def test_min_new_tokens_above_the_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_new_tokens \(9\).*max_new_tokens \(8\)"):
        SamplingParams(min_new_tokens=9, max_new_tokens=8)


def test_one_stop_may_stand_alone() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=7).stop_token_ids == (7,)
    assert SamplingParams(stop_token_ids=[7, 8]).stop_token_ids == (7, 8)
