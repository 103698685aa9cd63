"""New weights while samples are running: who drew which token, and on what KV."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import DynamicCache

from rollout_pool import Engine, EngineConfig, RequestError, RolloutRequest, Sample, SamplingParams
from rollout_pool.actors.weight_records import Bucket, Manifest
from rollout_pool.actors.weights import ModelWeights
from rollout_pool.weight_sync.shipment import packed
from rollout_pool.weight_sync.sources import open_source

GREEDY = SamplingParams(n=2, temperature=0, max_new_tokens=20, ignore_eos=True, seed=1)
SAMPLED = SamplingParams(n=3, max_new_tokens=20, ignore_eos=True, seed=1)
STEPS = 8


@pytest.fixture(scope="module")
def models(build: Any, small_config: Any) -> tuple[Any, Any]:
    """The old weights and the new ones: near enough that both draw lively text, and different text."""
    old, other = (build(transformers.LlamaConfig(**small_config()), seed=seed) for seed in (1, 2))
    new = copy.deepcopy(old)
    with torch.no_grad():
        for mine, theirs in zip(new.parameters(), other.parameters(), strict=True):
            mine.mul_(0.7).add_(theirs, alpha=0.5)
    return old, new


def stage(engine: Engine, model: Any, version: int) -> None:
    """What a pool does before it lets an engine write new weights."""
    worker = engine.batch.worker
    worker.weights = worker.weights or ModelWeights(engine.model)
    weights: Any = worker.weights
    for item in packed(open_source(model.state_dict(), 100_000)):
        if isinstance(item, Bucket):
            weights.stage(version, item)
        else:
            assert isinstance(item, Manifest)
            weights.check(version, item)


def run(
    old: Any, new: Any, requests: list[RolloutRequest], kv: Any, **config: Any
) -> tuple[list[Any], Engine]:
    """Groups of an engine whose weights change after some steps."""
    engine = Engine(copy.deepcopy(old), EngineConfig(**{"num_slots": 5, "max_length": 48, **config}))
    groups: dict[Any, Any] = {}
    for request in requests:
        engine.submit(request, lambda group: groups.update({group.request_id: group}))
    for _ in range(STEPS):
        engine.step()
    stage(engine, new, 1)
    engine.update_weights(1, kv)
    while engine.has_work():
        engine.step()
    return [groups[request.request_id] for request in requests], engine


def named(prompts: list[list[int]], sampling: SamplingParams) -> list[RolloutRequest]:
    return [RolloutRequest(prompt, sampling, request_id=f"r{n}") for n, prompt in enumerate(prompts)]


def cut(sample: Sample, size: int) -> Sample:
    names = ("token_ids", "logprobs", "sampling_logprobs", "token_versions")
    parts = {name: getattr(sample, name)[:size] for name in names}
    return dataclasses.replace(sample, finish_reason="aborted", stop_match=None, **parts)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"layout": "aligned"},
        {"readback_every": 3},
        {"num_slots": 4},
        {"num_slots": 4, "prefix": "shared", "max_new_tokens": 20, "prompt_tokens": 16},
    ],
    ids=str,
)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_with_kv_recomputed_a_sample_goes_on_as_the_new_weights_would_have_it(
    sampling: SamplingParams, config: Any, models: Any, prompts_of: Any
) -> None:
    old, new = models
    requests = named(prompts_of([5, 11, 3]), sampling)
    groups, engine = run(old, new, requests, "recompute", **config)
    before = Engine(old, EngineConfig(num_slots=5, max_length=48)).generate(requests)
    fresh = Engine(new, EngineConfig(num_slots=5, max_length=48))
    seen = set()
    for group, whole in zip(groups, before, strict=True):
        for sample, other in zip(group.samples, whole.samples, strict=True):
            size = int((sample.token_versions == 0).sum())
            seen.add(size)
            assert sample.token_versions.tolist() == [0] * size + [1] * (20 - size)
            assert sample.weight_version == 1
            assert sample.token_ids[:size].tolist() == other.token_ids[:size].tolist()
            request = RolloutRequest(
                group.prompt_token_ids, sampling, request_id=group.request_id, resume=[cut(sample, size)]
            )
            (again,) = fresh.generate([request])
            expected = next(one for one in again.samples if one.sample_index == sample.sample_index)
            assert sample.token_ids.tolist() == expected.token_ids.tolist()
            np.testing.assert_allclose(sample.logprobs, expected.logprobs, atol=1e-4)
    # Those that sat from the start drew one token with the prompt and one in each step since.
    assert STEPS + 1 in seen
    assert engine.weight_version == engine.stats().weight_version == 1


def test_with_kv_kept_new_weights_go_on_over_what_old_ones_made(models: Any, prompts_of: Any) -> None:
    old, new = models
    prompts = prompts_of([5, 11])
    groups, _ = run(old, new, named(prompts, GREEDY), "keep")
    recomputed, _ = run(old, new, named(prompts, GREEDY), "recompute")
    for group, prompt in zip(groups, prompts, strict=True):
        tokens = group.samples[0].token_ids.tolist()
        size = STEPS + 1
        assert group.samples[0].token_versions.tolist() == [0] * size + [1] * (20 - size)
        cache = DynamicCache(config=old.config)
        with torch.no_grad():
            old(input_ids=torch.tensor([prompt + tokens[: size - 1]]), past_key_values=cache, use_cache=True)
            expected = tokens[:size]
            while len(expected) < 20:
                out = new(input_ids=torch.tensor([expected[-1:]]), past_key_values=cache, use_cache=True)
                expected.append(int(out.logits[0, -1].argmax()))
        assert tokens == expected
    kept, made_anew = (
        [group.samples[0].token_ids.tolist() for group in some] for some in (groups, recomputed)
    )
    assert kept != made_anew


def test_samples_that_start_later_are_all_of_the_new_version(models: Any, prompts_of: Any) -> None:
    old, new = models
    requests = named(
        prompts_of([5, 6, 7]), SAMPLED
    )  # nine samples for two slots: most wait, one prompt is held
    groups, _ = run(old, new, requests, "recompute", num_slots=2)
    expected = Engine(new, EngineConfig(num_slots=5, max_length=48)).generate(requests)
    later = [
        (sample.token_ids.tolist(), other.token_ids.tolist())
        for group, whole in zip(groups, expected, strict=True)
        for sample, other in zip(group.samples, whole.samples, strict=True)
        if sample.token_versions[0] == 1
    ]
    assert len(later) == 7
    assert all(mine == theirs for mine, theirs in later)


def test_versions_only_go_up(models: Any) -> None:
    old, new = models
    engine = Engine(copy.deepcopy(old), EngineConfig(num_slots=2, max_length=48))
    stage(engine, new, 3)
    engine.update_weights(3)
    with pytest.raises(RequestError, match="version 3 is not above the present one, 3"):
        engine.update_weights(3)
    assert engine.generate([[3, 4, 5]], GREEDY)[0].samples[0].token_versions.tolist() == [3] * 20
