"""One prefill for all samples of a prompt: the same samples, a fraction of the prompt tokens."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_pool import Engine, EngineConfig, RolloutGroup, RolloutRequest, SamplingParams


def tokens_of(groups: list[RolloutGroup]) -> list[list[list[int]]]:
    return [[sample.token_ids.tolist() for sample in group.samples] for group in groups]


def roll_out(model: Any, prefix: Any, prompts: Any, sampling: SamplingParams, slots: int = 4) -> Any:
    engine = Engine(model, EngineConfig(num_slots=slots, max_length=64, prefix=prefix), seed=3)
    return engine.generate(prompts, sampling), engine.stats()


@pytest.mark.parametrize(
    ("lengths", "n", "slots"),
    [([5], 2, 4), ([6, 9, 3], 3, 4), ([5, 8], 7, 3), ([1], 4, 2), ([1, 1, 12], 2, 8), ([4, 5], 3, 1)],
    ids=["one-prompt", "three-prompts", "n-larger-than-slots", "one-token-prompt", "mixed", "one-slot"],
)
def test_sharing_gives_the_same_samples_for_a_fraction_of_the_prompt_tokens(
    lengths: list[int], n: int, slots: int, llama: Any, prompts_of: Any
) -> None:
    prompts = prompts_of(lengths)
    sampling = SamplingParams(n=n, max_new_tokens=12, temperature=1.0)
    shared, with_sharing = roll_out(llama, "expand", prompts, sampling, slots)
    alone, without = roll_out(llama, "off", prompts, sampling, slots)
    assert tokens_of(shared) == tokens_of(alone)
    assert [len(group.samples) for group in shared] == [n] * len(prompts)
    assert with_sharing.prefill_tokens == sum(lengths)
    assert without.prefill_tokens == n * sum(lengths)
    assert with_sharing.prefills == len(prompts)
    assert without.prefills == n * len(prompts)
    assert with_sharing.prefill_tokens_saved == (n - 1) * sum(lengths)
    assert without.prefill_tokens_saved == 0
    assert [group.timing.prefill_tokens for group in shared] == lengths


def test_samples_of_one_prompt_differ(llama: Any, prompts_of: Any) -> None:
    groups, _ = roll_out(
        llama, "expand", prompts_of([5, 5]), SamplingParams(n=6, max_new_tokens=10), slots=12
    )
    for group in groups:
        assert len({tuple(sample.token_ids.tolist()) for sample in group.samples}) == 6
        assert [sample.sample_index for sample in group.samples] == list(range(6))


def test_all_samples_draw_their_first_token_from_one_row_of_logits(llama: Any, prompts_of: Any) -> None:
    """Equal first tokens have equal log-probabilities, to the bit."""
    groups, _ = roll_out(llama, "expand", prompts_of([7]), SamplingParams(n=64, max_new_tokens=1), slots=16)
    first: dict[int, set[float]] = {}
    for sample in groups[0].samples:
        first.setdefault(int(sample.token_ids[0]), set()).add(float(sample.logprobs[0]))
    assert len(first) > 3
    assert all(len(values) == 1 for values in first.values())


@pytest.mark.parametrize("prefix", ["expand", "off"])
@pytest.mark.parametrize("slots", [2, 8])
def test_a_group_whose_first_token_is_eos_ends_at_once(
    prefix: Any, slots: int, llama: Any, prompts_of: Any, hf_greedy: Any
) -> None:
    short, other = prompts_of([6, 9])
    (first,) = hf_greedy(llama, short, 1)
    requests = [
        RolloutRequest(short, SamplingParams(n=5, temperature=0, max_new_tokens=9, stop_token_ids=(first,))),
        RolloutRequest(other, SamplingParams(n=2, temperature=0, max_new_tokens=9, ignore_eos=True)),
    ]
    groups, stats = roll_out(llama, prefix, requests, SamplingParams(), slots)
    assert tokens_of(groups)[0] == [[first]] * 5
    assert {(sample.finish_reason, sample.stop_match) for sample in groups[0].samples} == {("stop", first)}
    assert tokens_of(groups)[1] == [hf_greedy(llama, other, 9)] * 2
    assert stats.finished == 2
    assert stats.samples_finished == 7


def test_everything_may_end_with_the_first_token(llama: Any, prompts_of: Any) -> None:
    """No row is ever decoded: neither a step nor a slot is left over."""
    groups, stats = roll_out(
        llama, "expand", prompts_of([3, 4, 5]), SamplingParams(n=9, max_new_tokens=1), slots=2
    )
    assert all(sample.token_ids.size == 1 for group in groups for sample in group.samples)
    assert {sample.finish_reason for group in groups for sample in group.samples} == {"length"}
    assert stats.decode_steps == 0
    assert stats.live_rows == 0
    assert stats.new_tokens == 27
