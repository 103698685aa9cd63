"""verl's own ``DataProto``, and what verl computes from it, take our batches."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from rollout_pool import Engine, EngineConfig, RequestError, RolloutGroup, RolloutRequest, SamplingParams

pytest.importorskip("verl", reason="needs verl, which pins other versions of torch and Transformers")

from verl import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.model import compute_position_id_with_mask

from rollout_pool.adapters.verl import data_proto

PAD = 1  # the EOS id as well
WIDTHS: dict[str, Any] = {"prompt_length": 7, "response_length": 12, "pad_token_id": PAD}
KEYS = {
    "prompts",
    "responses",
    "response_mask",
    "input_ids",
    "attention_mask",
    "position_ids",
    "rollout_log_probs",
}
PROMPTS = [[5, 6, 7, 8], [9], [10, PAD, 11]]


@pytest.fixture(scope="module")
def engine(tiny_model_dir: str) -> Engine:
    return Engine(tiny_model_dir, EngineConfig(num_slots=6, max_length=64))


@pytest.fixture(scope="module")
def groups(engine: Engine) -> list[RolloutGroup]:
    requests = [
        RolloutRequest(prompt, request_id=f"r{place}", metadata={"place": place})
        for place, prompt in enumerate(PROMPTS)
    ]
    sampling = SamplingParams(
        n=2, max_new_tokens=12, temperature=0.7, top_p=0.95, seed=4, stop_token_ids=(9, 13, 20)
    )
    return engine.generate(requests, sampling)


def test_a_data_proto_has_verls_keys_shapes_and_paddings(groups: list[RolloutGroup]) -> None:
    data = data_proto(groups, **WIDTHS)
    assert type(data) is DataProto
    assert len(data) == 6
    assert set(data.batch.keys()) == KEYS
    data.check_consistency()
    pairs = [(group, sample) for group in groups for sample in group.samples]
    for row, (group, sample) in enumerate(pairs):
        left, right = group.prompt_token_ids.size, sample.token_ids.size
        prompt = [PAD] * (7 - left) + group.prompt_token_ids.tolist()
        response = sample.token_ids.tolist() + [PAD] * (12 - right)
        mask = [0] * (7 - left) + [1] * (left + right) + [0] * (12 - right)
        assert data.batch["prompts"][row].tolist() == prompt
        assert data.batch["responses"][row].tolist() == response
        assert data.batch["input_ids"][row].tolist() == prompt + response
        assert data.batch["attention_mask"][row].tolist() == mask
        assert data.batch["response_mask"][row].tolist() == mask[7:]
        assert data.batch["rollout_log_probs"][row, :right].tolist() == sample.logprobs.tolist()
        assert not data.batch["rollout_log_probs"][row, right:].any()
    positions = compute_position_id_with_mask(data.batch["attention_mask"])
    assert torch.equal(data.batch["position_ids"], positions)
    assert len(set(data.batch["response_mask"].sum(dim=1).tolist())) > 1  # some rows are padded


def test_what_is_no_tensor_comes_along(groups: list[RolloutGroup]) -> None:
    data = data_proto(groups, uids=["a", "b", "c"], **WIDTHS)
    assert data.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b", "c", "c"]
    assert data.non_tensor_batch["metadata"][4] == {"place": 2}
    assert data.non_tensor_batch["request_id"].tolist()[::2] == ["r0", "r1", "r2"]
    assert data.non_tensor_batch["__num_turns__"].tolist() == [2] * 6
    assert data.non_tensor_batch["min_global_steps"].tolist() == [0] * 6
    assert data.meta_info == {"temperature": 0.7}
    fresh = data_proto(groups, **WIDTHS).non_tensor_batch["uid"].tolist()
    assert len(set(fresh)) == 3


def test_verl_takes_the_batch_apart_and_puts_it_together(groups: list[RolloutGroup]) -> None:
    data = data_proto(groups, rewards=lambda group, sample: 1.0, **WIDTHS)
    whole = DataProto.concat(data.chunk(3))
    for key in (*KEYS, "rm_scores"):
        assert torch.equal(whole.batch[key], data.batch[key])
    assert whole.non_tensor_batch["uid"].tolist() == data.non_tensor_batch["uid"].tolist()
    back = data.select_idxs(torch.tensor([5, 0]))
    assert back.batch["responses"].tolist() == data.batch["responses"][[5, 0]].tolist()


def test_verls_advantages_follow_our_rewards(groups: list[RolloutGroup]) -> None:
    data = data_proto(groups, rewards=[[1.0, 0.0], [0.5, 0.5], [0.0, 2.0]], **WIDTHS)
    scores = data.batch["rm_scores"]
    assert scores.sum(dim=1).tolist() == [1.0, 0.0, 0.5, 0.5, 0.0, 2.0]
    last = data.batch["response_mask"].sum(dim=1) - 1
    assert scores[torch.arange(6), last].tolist() == scores.sum(dim=1).tolist()
    advantages, _ = compute_grpo_outcome_advantage(
        scores, data.batch["response_mask"], np.array(data.non_tensor_batch["uid"])
    )
    signs = advantages.sum(dim=1).sign().tolist()
    assert signs == [1, -1, 0, 0, -1, 1]
    assert not advantages[data.batch["response_mask"] == 0].any()


def test_verl_measures_no_mismatch_with_the_model_itself(engine: Engine, groups: list[RolloutGroup]) -> None:
    data = data_proto(groups, **WIDTHS)
    with torch.inference_mode():
        logits = engine.model(
            input_ids=data.batch["input_ids"],
            attention_mask=data.batch["attention_mask"],
            position_ids=data.batch["position_ids"],
        ).logits[:, -13:-1]
    scored = torch.log_softmax(logits.float() / data.meta_info["temperature"], dim=-1)
    data.batch["old_log_probs"] = scored.gather(2, data.batch["responses"].unsqueeze(2)).squeeze(2).clone()
    metrics = calculate_debug_metrics(data)
    assert metrics["training/rollout_probs_diff_valid"] == 1
    assert metrics["training/rollout_probs_diff_max"] < 1e-4

    config = {"rollout_is": "token", "rollout_is_threshold": 2.0}
    corrected, found = compute_rollout_correction_and_add_to_batch(data, config)
    ratio = corrected.batch["rollout_is_weights"][data.batch["response_mask"].bool()]
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-4, rtol=0)
    assert found


def test_the_other_log_probabilities_are_after_top_p(groups: list[RolloutGroup]) -> None:
    drawn = data_proto(groups, logprobs="sampling_logprobs", **WIDTHS).batch["rollout_log_probs"]
    whole = data_proto(groups, **WIDTHS).batch["rollout_log_probs"]
    assert (drawn >= whole - 1e-5).all()
    assert (drawn > whole + 1e-3).any()


def test_what_does_not_fit_is_refused(groups: list[RolloutGroup]) -> None:
    with pytest.raises(RequestError, match="the response has 12 tokens, response_width is 11"):
        data_proto(groups, **(WIDTHS | {"response_length": 11}))
    with pytest.raises(RequestError, match="2 uids for 3 groups"):
        data_proto(groups, uids=["a", "b"], **WIDTHS)
    failed = groups[0].replace(error="prompt 0: too long", samples=[])
    with pytest.raises(RequestError, match=re.escape("1 of 3 groups failed, first prompt 0: too long")):
        data_proto([failed, *groups[1:]], **WIDTHS)
