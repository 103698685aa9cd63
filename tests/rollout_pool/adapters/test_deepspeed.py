"""DeepSpeed's own classes and losses take our batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout_pool import ConfigError, Engine, EngineConfig, RequestError, SamplingParams

pytest.importorskip("deepspeed", reason="needs rollout-pool[deepspeed]")

from deepspeed.runtime.rollout import (
    ResponseTokenBatch,
    RolloutBatch,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
    generalized_jsd_loss,
)

from rollout_pool.adapters.deepspeed import PoolRollout, rollout_batch, sampling_params, scored_targets

PROMPTS = [[5, 6, 7, 8], [9], [10, 11]]
PAD = EOS = 1  # one id for both, as many tokenizers have it


@pytest.fixture(scope="module")
def engine(tiny_model_dir: str) -> Engine:
    return Engine(tiny_model_dir, EngineConfig(num_slots=6, max_length=64))


def request_of(prompts: list[list[int]]) -> RolloutRequest:
    """Prompts as a DeepSpeed trainer has them: padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return RolloutRequest(prompt_ids=ids, prompt_attention_mask=mask)


def test_the_engine_returns_deepspeeds_batch(engine: Engine) -> None:
    rollout = PoolRollout(engine, pad_token_id=PAD)
    assert isinstance(rollout, RolloutEngine)
    request = request_of(PROMPTS)
    batch = rollout.generate(request, SamplingConfig(max_new_tokens=9, n_samples_per_prompt=2))
    assert type(batch) is RolloutBatch
    assert batch.batch_size == 6
    assert batch.response_start_idx.tolist() == [4] * 6
    # Prompts are repeated in DeepSpeed's order and come back as they were.
    assert torch.equal(batch.input_ids[:, :4], request.prompt_ids.repeat_interleave(2, dim=0))
    assert torch.equal(batch.attention_mask[:, :4], request.prompt_attention_mask.repeat_interleave(2, dim=0))
    samples = [sample for group in rollout.last_groups for sample in group.samples]
    for row, sample in enumerate(samples):
        size = sample.token_ids.size
        assert batch.input_ids[row, 4 : 4 + size].tolist() == sample.token_ids.tolist()
        assert batch.attention_mask[row, 4:].tolist() == [1] * size + [0] * (batch.seq_len - 4 - size)
    assert batch.seq_len == 4 + max(sample.token_ids.size for sample in samples)


def test_greedy_rows_equal_generate(engine: Engine) -> None:
    rollout = PoolRollout(engine, pad_token_id=PAD)
    batch = rollout.generate(request_of(PROMPTS), SamplingConfig(max_new_tokens=8, temperature=0.0))
    for row, prompt in enumerate(PROMPTS):
        out = engine.model.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=PAD
        )
        mask = batch.attention_mask[row].bool()
        assert batch.input_ids[row][mask].tolist() == out[0].tolist()


def test_the_final_eos_counts_although_it_is_the_pad_id(engine: Engine) -> None:
    # Every token ends a sample, so every response is one token that looks like anything, PAD included.
    (group,) = engine.generate(
        [[5, 6]], SamplingParams(n=4, max_new_tokens=5, stop_token_ids=tuple(range(128)))
    )
    batch = rollout_batch([group], pad_token_id=int(group.samples[0].token_ids[-1]))
    tokens = ResponseTokenBatch.from_rollout(batch)
    assert tokens.response_mask.sum(dim=1).tolist() == [1, 1, 1, 1]


def test_every_call_draws_anew_and_a_seed_draws_again(engine: Engine) -> None:
    config = SamplingConfig(max_new_tokens=12, n_samples_per_prompt=2)
    first, again = (
        PoolRollout(engine, pad_token_id=PAD, seed=3),
        PoolRollout(engine, pad_token_id=PAD, seed=3),
    )
    one, two = first.generate(request_of(PROMPTS), config), first.generate(request_of(PROMPTS), config)
    assert one.input_ids.tolist() != two.input_ids.tolist()
    assert one.input_ids.tolist() == again.generate(request_of(PROMPTS), config).input_ids.tolist()


def test_targets_are_aligned_with_their_log_probabilities(engine: Engine) -> None:
    groups = engine.generate(PROMPTS, SamplingParams(n=2, max_new_tokens=9, temperature=0.7, seed=5))
    scored = scored_targets(groups, pad_token_id=PAD)
    tokens = scored.tokens
    assert type(tokens) is ResponseTokenBatch
    assert scored.logprobs.shape == tokens.target_ids.shape == tokens.response_mask.shape
    with torch.inference_mode():
        output = engine.model(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, position_ids=scored.position_ids
        )
    logits = tokens.select_causal_logits(output.logits).float() / 0.7
    found = torch.log_softmax(logits, dim=-1).gather(2, tokens.target_ids.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(found * tokens.response_mask, scored.logprobs, atol=1e-4, rtol=0)
    assert (scored.logprobs < 0).equal(tokens.response_mask)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_deepspeeds_distillation_loss_learns_from_our_batch(engine: Engine, beta: float) -> None:
    groups = engine.generate(PROMPTS, SamplingParams(n=2, max_new_tokens=6, seed=6))
    scored = scored_targets(groups, pad_token_id=PAD)
    tokens = scored.tokens
    with torch.no_grad():
        teacher = engine.model(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, position_ids=scored.position_ids
        ).logits
    teacher = tokens.select_causal_logits(teacher.detach().clone())
    num_tokens = sum(sample.token_ids.size for group in groups for sample in group.samples)

    same = generalized_jsd_loss(teacher, teacher, tokens.response_mask, beta=beta)
    assert int(same.valid_token_count) == num_tokens
    assert float(same.loss.abs()) < 1e-6

    student = (
        teacher + torch.randn(teacher.shape, generator=torch.Generator().manual_seed(0))
    ).requires_grad_()
    different = generalized_jsd_loss(student, teacher, tokens.response_mask, beta=beta)
    different.loss.backward()
    assert different.loss.item() > 1e-3
    assert student.grad is not None
    touched = student.grad.abs().sum(dim=-1) > 0
    assert touched.equal(tokens.response_mask)  # nothing is learnt from prompts and padding


def test_sampling_is_taken_over_and_the_rest_is_the_callers() -> None:
    config = SamplingConfig(max_new_tokens=4, temperature=0.0, top_p=0.9, top_k=0, n_samples_per_prompt=3)
    params = sampling_params(
        config, SamplingParams(min_p=0.1, stop="x", n=7, min_new_tokens=9, max_new_tokens=9)
    )
    expected = SamplingParams(
        n=3, max_new_tokens=4, min_new_tokens=4, temperature=0, top_p=0.9, min_p=0.1, stop="x"
    )
    assert params == expected
    assert sampling_params(SamplingConfig(max_new_tokens=4, top_k=5)).top_k == 5


def test_a_prompt_that_cannot_be_served_is_an_error(engine: Engine) -> None:
    rollout = PoolRollout(engine, pad_token_id=PAD)
    with pytest.raises(RequestError, match="1 of 2 groups failed"):
        rollout.generate(request_of([[5] * 70, [6]]), SamplingConfig(max_new_tokens=4))
    with pytest.raises(ConfigError, match="from an Engine or from the handle of a pool, got str"):
        PoolRollout("engine", pad_token_id=PAD).generate(request_of([[6]]), SamplingConfig(max_new_tokens=4))


def test_weights_are_brought_by_the_callers_function(engine: Engine) -> None:
    steps: list[int] = []
    PoolRollout(engine, pad_token_id=PAD, sync=steps.append).sync_weights(7)
    PoolRollout(engine, pad_token_id=PAD).sync_weights(8)
    assert steps == [7]


@pytest.mark.slow
def test_a_pool_rolls_out_what_an_engine_does(cluster: None, engine: Engine, tiny_model_dir: str) -> None:
    import ray

    from rollout_pool import PoolConfig, RolloutPool

    config = PoolConfig(model=tiny_model_dir, engine=EngineConfig(num_slots=6, max_length=64))
    pool: Any = RolloutPool.remote(config)
    sampling = SamplingConfig(max_new_tokens=9, n_samples_per_prompt=2)
    from_pool = PoolRollout(pool, pad_token_id=PAD, seed=1).generate(request_of(PROMPTS), sampling)
    here = PoolRollout(engine, pad_token_id=PAD, seed=1).generate(request_of(PROMPTS), sampling)
    assert torch.equal(from_pool.input_ids, here.input_ids)
    assert torch.equal(from_pool.attention_mask, here.attention_mask)
    ray.kill(pool)
