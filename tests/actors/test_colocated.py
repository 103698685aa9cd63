"""Engines on the model of a DeepSpeed trainer, on two real ranks with different prompts, at every ZeRO stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
CASES: dict[str, list[Any]] = {
    "ZeRO-0, engine": ["rollouts", 0, "layers", False],
    "ZeRO-1, module": ["rollouts", 1, "layers", True],
    "ZeRO-2, engine": ["rollouts", 2, "layers", False],
    "ZeRO-3 by layers, engine": ["rollouts", 3, "layers", False],
    "ZeRO-3 whole, module": ["rollouts", 3, "whole", True],
    "steps, ZeRO-1": ["steps", 1, "layers"],
    "steps, ZeRO-3": ["steps", 3, "layers"],
    "steps, ZeRO-3 whole": ["steps", 3, "whole"],
    "refusals": ["refusals"],
}
ROLLOUTS = [name for name, case in CASES.items() if case[0] == "rollouts"]
STEPS = [name for name, case in CASES.items() if case[0] == "steps"]


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """By rank and case. All cases run in one pair of processes, which take longer to start than to run."""
    pytest.importorskip("deepspeed")
    arguments = json.dumps({"cases": list(CASES.values())})
    command = [sys.executable, "-P", str(HERE / "rank_launcher.py"), str(HERE / "colocated_ranks.py")]
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    done = subprocess.run(
        [*command, "colocated", "2", arguments], capture_output=True, text=True, env=environment, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [dict(zip(CASES, rank, strict=True)) for rank in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", ROLLOUTS)
def test_tokens_are_those_of_generate_on_the_gathered_model(results: Any, case: str, rank: int) -> None:
    found = results[rank][case]
    assert found["tokens"] == found["expected"]
    if rank == 0:
        first, *_, last = found["tokens"]
        assert first != last, "training has changed nothing"
    assert found["versions"] == [[0], [1], [2], [3]]
    assert (found["held"] < sum(found["numbers"]) / 10) == ("ZeRO-3" in case)


@pytest.mark.parametrize("case", ROLLOUTS)
def test_training_goes_on_bit_for_bit_as_without_rollouts(results: Any, case: str) -> None:
    for rank in results:
        assert rank[case]["losses"] == rank[case]["twin"]
    assert results[0][case]["losses"] != results[1][case]["losses"]


@pytest.mark.parametrize("case", ROLLOUTS)
def test_a_trainers_model_comes_back_as_it_was_also_after_an_error(results: Any, case: str) -> None:
    for rank in results:
        assert rank[case]["changed"] == []
        assert set(rank[case]["errors"]) == {"out of luck"}
    assert len(results[0][case]["errors"]) == 3


def test_ranks_run_the_same_number_of_forwards_when_layers_are_gathered(results: Any) -> None:
    first, second = (rank["ZeRO-3 by layers, engine"] for rank in results)
    assert first["forwards"] == second["forwards"] > 0
    assert second["dummies"] > first["dummies"]  # it has fewer prompts


def test_ranks_run_only_forwards_of_their_own_when_the_model_is_whole(results: Any) -> None:
    first, second = (rank["ZeRO-3 whole, module"] for rank in results)
    assert first["forwards"] > second["forwards"] > 0
    assert first["dummies"] == second["dummies"] == 0


@pytest.mark.parametrize("case", STEPS)
def test_no_token_comes_from_kv_of_weights_that_were_trained_since(results: Any, case: str) -> None:
    for rank in results:
        assert rank[case]["is_greedy"]
        assert rank[case]["versions"] == [0, 1]
        assert rank[case]["num_mixed"] >= 1  # there were samples in the middle
        assert rank[case]["after"]
        assert rank[case]["after_versions"] == [2]


@pytest.mark.parametrize("case", STEPS)
def test_logprobs_are_those_of_a_plain_forward_on_every_rank(results: Any, case: str) -> None:
    for rank in results:
        assert rank[case]["logprobs off by"] < 1e-4
    assert results[0][case]["scored"] > results[1][case]["scored"] > 0


@pytest.mark.parametrize("case", STEPS)
def test_a_rank_without_prompts_or_that_fails_holds_up_nobody(results: Any, case: str) -> None:
    assert results[0][case]["alone"] is True
    assert results[1][case]["alone"] == "no more prompts"


@pytest.mark.parametrize("case", STEPS)
def test_a_trainers_weights_are_not_put_to_sleep_and_versions_only_grow(results: Any, case: str) -> None:
    sleeping, backwards = results[0][case]["refusals"]
    assert "the weights are a trainer's" in sleeping
    assert backwards == "version 1 is not above the present one, 2"


def test_what_one_rank_cannot_serve_is_refused_on_all(results: Any) -> None:
    first, second = (rank["refusals"] for rank in results)
    assert first[:3] == second[:3]
    assert first[0] == "ZeRO-3 has partitioned this model: give verify an Engine on it, on all ranks"
    assert all("'transposed' would take the weights out of their trainer's" in one for one in first[1:3])
    assert first[3].startswith("CapacityError: engine.num_slots 65536")
    assert second[3] == (
        "ConfigError: another rank of the trainer could not serve the model; its own error says why"
    )
