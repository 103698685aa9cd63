"""verify finds what is wrong with log-probabilities, and nothing where nothing is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollout_pool import (
    ConfigError,
    Engine,
    EngineConfig,
    RolloutGroup,
    SamplingParams,
    VerificationError,
    verify,
)

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]


@pytest.fixture(scope="module")
def engine(tiny_model_dir: str) -> Engine:
    return Engine(tiny_model_dir, EngineConfig(num_slots=4, max_length=64))


@pytest.fixture(scope="module")
def groups(engine: Engine) -> list[RolloutGroup]:
    return engine.generate(
        PROMPTS, SamplingParams(n=2, max_new_tokens=9, temperature=0.7, seed=1, ignore_eos=True)
    )


def perturbed(
    groups: list[RolloutGroup], group: int, sample: int, token: int, value: float
) -> list[RolloutGroup]:
    """The groups with one log-probability replaced."""
    old = groups[group].samples[sample]
    logprobs = old.logprobs.copy()
    logprobs[token] = value
    samples = list(groups[group].samples)
    samples[sample] = replace(old, logprobs=logprobs)
    return [g.replace(samples=samples) if i == group else g for i, g in enumerate(groups)]


def test_true_logprobs_pass(engine: Engine, groups: list[RolloutGroup]) -> None:
    report = verify(groups, engine)
    assert report.max_abs_diff < 1e-4
    assert 0 < report.mean_abs_diff <= report.max_abs_diff
    assert (report.num_samples, report.num_tokens) == (6, 54)
    assert set(report.group_max) == {0, 1, 2}
    assert max(report.group_max.values()) == report.max_abs_diff
    report.check(1e-3)
    assert "54 tokens in 6 samples" in report.describe()


@pytest.mark.parametrize(("group", "sample", "token"), [(0, 0, 0), (1, 1, 8), (2, 0, 4)])
def test_a_perturbed_logprob_is_found_at_its_place(
    group: int, sample: int, token: int, engine: Engine, groups: list[RolloutGroup]
) -> None:
    value = float(groups[group].samples[sample].logprobs[token]) + 0.25
    report = verify(perturbed(groups, group, sample, token, value), engine)
    assert report.worst == (group, sample, token)
    assert report.max_abs_diff == pytest.approx(0.25, abs=1e-4)
    assert report.group_max[group] == report.max_abs_diff
    assert all(report.group_max[other] < 1e-4 for other in range(3) if other != group)
    with pytest.raises(
        VerificationError, match=f"request {group}, sample {sample}, token {token}.*tolerance is 0.001"
    ):
        report.check(1e-3)
    report.check(0.3)


@pytest.mark.parametrize("group", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_logprob_that_is_no_number_never_passes(
    value: float, group: int, engine: Engine, groups: list[RolloutGroup]
) -> None:
    """Wherever it stands: what comes after it must not hide it."""
    report = verify(perturbed(groups, group, 0, 3, value), engine)
    assert report.worst == (group, 0, 3)
    with pytest.raises(VerificationError):
        report.check(1e9)


def test_the_wrong_token_is_found(engine: Engine, groups: list[RolloutGroup]) -> None:
    old = groups[0].samples[0]
    tokens = old.token_ids.copy()
    tokens[4] = (tokens[4] + 1) % 100
    changed = [groups[0].replace(samples=[replace(old, token_ids=tokens)])]
    assert verify(changed, engine).max_abs_diff > 0.05


def test_the_temperature_is_the_groups_own_unless_one_is_given(
    engine: Engine, groups: list[RolloutGroup]
) -> None:
    assert verify(groups, engine, temperature=0.7).max_abs_diff < 1e-4
    assert verify(groups, engine, temperature=1.0).max_abs_diff > 0.05
    without = [group.replace(sampling=None) for group in groups]
    assert verify(without, engine).max_abs_diff == verify(groups, engine, temperature=1.0).max_abs_diff


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0, max_new_tokens=9),
        SamplingParams(temperature=1.6, top_k=5, top_p=0.8, min_p=0.05, max_new_tokens=9),
        SamplingParams(temperature=0.5, repetition_penalty=1.5, min_new_tokens=5, max_new_tokens=9),
    ],
    ids=["greedy", "filtered", "penalised"],
)
def test_logprobs_are_those_of_the_plain_distribution_whatever_was_drawn_from(
    sampling: SamplingParams, engine: Engine
) -> None:
    assert verify(engine.generate(PROMPTS, sampling), engine).max_abs_diff < 1e-4


def test_a_model_with_other_weights_does_not_pass(engine: Engine, groups: list[RolloutGroup]) -> None:
    import copy

    other = copy.deepcopy(engine.model)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(1.05)
    with pytest.raises(VerificationError):
        verify(groups, other).check(1e-3)


def test_a_model_an_engine_and_a_folder_give_one_result(
    engine: Engine, groups: list[RolloutGroup], tiny_model_dir: str
) -> None:
    reports = [verify(groups, scorer) for scorer in (engine, engine.model, tiny_model_dir)]
    assert all(report.max_abs_diff < 1e-4 for report in reports)
    assert len({report.num_tokens for report in reports}) == 1


def test_the_models_mode_and_gradients_are_restored(engine: Engine, groups: list[RolloutGroup]) -> None:
    model = engine.model
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    verify(groups, model)
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    model.eval()


def test_the_mode_is_restored_when_scoring_fails(engine: Engine, groups: list[RolloutGroup]) -> None:
    model = engine.model.train()
    broken = [groups[0].replace(prompt_token_ids=np.array([10**6]))]
    with pytest.raises(IndexError):
        verify(broken, model)
    assert all(module.training for module in model.modules())
    model.eval()


def test_nothing_to_compare_is_said(engine: Engine) -> None:
    failed = engine.generate([[], [10**6]], SamplingParams(max_new_tokens=3))
    report = verify(failed, engine)
    assert (report.num_tokens, report.num_samples, report.worst) == (0, 0, None)
    assert "no tokens" in report.describe()
    report.check(0.0)


def test_failed_groups_are_passed_over(engine: Engine, groups: list[RolloutGroup]) -> None:
    failed = engine.generate([[]], SamplingParams(max_new_tokens=3))
    assert verify([*failed, *groups], engine).num_samples == 6


@pytest.mark.parametrize("scorer", [None, 7, object()])
def test_something_that_is_no_model_is_refused(scorer: Any, groups: list[RolloutGroup]) -> None:
    with pytest.raises(ConfigError, match="causal LM"):
        verify(groups, scorer)
