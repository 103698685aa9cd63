"""Which sample comes out depends on seed, identity and sample number, and on nothing else."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollout_pool import Engine, EngineConfig, RolloutGroup, RolloutRequest, SamplingParams
from rollout_pool.actors.strict import products_are_strict

SAMPLING = SamplingParams(n=2, max_new_tokens=14, temperature=1.0, ignore_eos=True)


def tokens_of(groups: list[RolloutGroup]) -> list[list[list[int]]]:
    return [[sample.token_ids.tolist() for sample in group.samples] for group in groups]


def bits_of(groups: list[RolloutGroup]) -> list[list[tuple[bytes, bytes, bytes]]]:
    return [
        [(s.token_ids.tobytes(), s.logprobs.tobytes(), s.sampling_logprobs.tobytes()) for s in group.samples]
        for group in groups
    ]


@pytest.fixture
def engine_of(llama: Any) -> Any:
    def make(seed: int = 0, **changes: Any) -> Engine:
        return Engine(llama, EngineConfig(**{"num_slots": 4, "max_length": 64, **changes}), seed=seed)

    return make


def named(prompts: list[list[int]], **changes: Any) -> list[RolloutRequest]:
    return [
        RolloutRequest(prompt, request_id=f"p{number}", **changes) for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("num_slots", [1, 3, 16])
def test_named_requests_give_the_same_samples_for_any_slots_and_order(
    num_slots: int, engine_of: Any, prompts_of: Any
) -> None:
    requests = named(prompts_of([4, 9, 1, 7, 5]), seed=11)
    expected = dict(
        zip(
            (r.request_id for r in requests), tokens_of(engine_of().generate(requests, SAMPLING)), strict=True
        )
    )
    random.Random(num_slots).shuffle(requests)
    groups = engine_of(num_slots=num_slots, seed=99).generate(requests, SAMPLING)
    assert [group.request_id for group in groups] == [request.request_id for request in requests]
    assert dict(zip((g.request_id for g in groups), tokens_of(groups), strict=True)) == expected
    assert len({str(value) for value in expected.values()}) == 5


def test_company_does_not_change_a_sample(engine_of: Any, prompts_of: Any) -> None:
    requests = named(prompts_of([4, 9, 3]), seed=11)
    (alone,) = engine_of().generate([requests[1]], SAMPLING)
    others = [
        RolloutRequest(r.prompt, SamplingParams(n=3, max_new_tokens=40, top_p=0.7), seed=1) for r in requests
    ]
    groups = engine_of().generate([others[0], requests[1], others[2]], SAMPLING)
    assert tokens_of([groups[1]]) == tokens_of([alone])


def test_four_samples_are_two_and_two(engine_of: Any, prompts_of: Any) -> None:
    (prompt,) = prompts_of([6])
    four, two = replace_n(SAMPLING, 4), replace_n(SAMPLING, 2)
    request = RolloutRequest(prompt, seed=4, request_id="x")
    (whole,) = engine_of().generate([request], four)
    halves = engine_of().generate([request, replace(request, sample_offset=2)], two)
    assert [sample for half in tokens_of(halves) for sample in half] == tokens_of([whole])[0]
    assert [sample.sample_index for half in halves for sample in half.samples] == [0, 1, 2, 3]


def replace_n(sampling: SamplingParams, n: int) -> SamplingParams:
    return sampling.model_copy(update={"n": n})


def test_equal_prompts_in_one_call_are_different_groups(engine_of: Any, prompts_of: Any) -> None:
    (prompt,) = prompts_of([6])
    groups = engine_of().generate([prompt] * 5, replace_n(SAMPLING, 3))
    flat = [tuple(sample) for group in tokens_of(groups) for sample in group]
    assert len(set(flat)) == 15


def test_a_call_with_a_seed_is_repeated_exactly(engine_of: Any, prompts_of: Any) -> None:
    prompts = prompts_of([6, 2, 8])
    engine = engine_of()
    seeded = SAMPLING.model_copy(update={"seed": 123})
    first = engine.generate(prompts, seeded)
    engine.generate(prompts[:1], SAMPLING)
    second = engine.generate(prompts, seeded)
    assert bits_of(first) == bits_of(second)
    assert tokens_of(engine_of(seed=5).generate(prompts, seeded)) == tokens_of(first)
    assert {sample.seed for group in first for sample in group.samples} == {123}


def test_calls_without_a_seed_differ_and_an_engine_repeats_its_history(
    engine_of: Any, prompts_of: Any
) -> None:
    prompts = prompts_of([6, 2])
    one, other, third = engine_of(seed=1), engine_of(seed=1), engine_of(seed=2)
    calls = [tokens_of(one.generate(prompts, SAMPLING)) for _ in range(3)]
    assert calls[0] != calls[1] != calls[2] != calls[0]
    assert [tokens_of(other.generate(prompts, SAMPLING)) for _ in range(3)] == calls
    assert tokens_of(third.generate(prompts, SAMPLING)) not in calls


def test_the_requests_own_seed_goes_before_that_of_its_sampling(engine_of: Any, prompts_of: Any) -> None:
    (prompt,) = prompts_of([6])
    seeded = SAMPLING.model_copy(update={"seed": 7})
    groups = engine_of().generate(
        [
            RolloutRequest(prompt, request_id="x", seed=9),
            RolloutRequest(prompt, request_id="x", sampling=seeded, seed=9),
            RolloutRequest(prompt, request_id="x", sampling=seeded),
        ],
        SAMPLING,
    )
    own, both, sampling = tokens_of(groups)
    assert own == both != sampling
    assert [group.samples[0].seed for group in groups] == [9, 9, 7]


def test_an_unseeded_request_does_not_unseed_the_others(engine_of: Any, prompts_of: Any) -> None:
    prompts = prompts_of([6, 2, 8])
    seeded = named(prompts, seed=3)
    expected = tokens_of(engine_of(seed=1).generate(seeded, SAMPLING))
    mixed = [seeded[0], RolloutRequest(prompts[1]), seeded[2]]
    got = tokens_of(engine_of(seed=2).generate(mixed, SAMPLING))
    assert (got[0], got[2]) == (expected[0], expected[2])
    assert got[1] != expected[1]


def test_neighbouring_seeds_and_samples_share_nothing(engine_of: Any, prompts_of: Any) -> None:
    """With seeds s and s + 1, sample i of one is not sample i + 1 of the other."""
    (prompt,) = prompts_of([6])
    requests = [RolloutRequest(prompt, request_id="x", seed=seed) for seed in range(4)]
    groups = engine_of(num_slots=16).generate(requests, replace_n(SAMPLING, 4))
    flat = [tuple(sample) for group in tokens_of(groups) for sample in group]
    assert len(set(flat)) == 16


def test_no_global_generator_is_read_or_moved(engine_of: Any, prompts_of: Any) -> None:
    prompts = prompts_of([6, 2])
    seeded = SAMPLING.model_copy(update={"seed": 5})
    torch.manual_seed(1)
    expected = tokens_of(engine_of().generate(prompts, seeded))
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert tokens_of(engine_of().generate(prompts, seeded)) == expected
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())


# strict: the same bits


def strict(model: Any, prompts: Any, sampling: SamplingParams) -> Any:
    config = EngineConfig(num_slots=8, max_length=64, deterministic="strict")
    return bits_of(Engine(model, config).generate(prompts, sampling))


@pytest.mark.filterwarnings("ignore:deterministic='strict'.*:RuntimeWarning")
@pytest.mark.parametrize("family", ["LlamaConfig", "Gemma2Config", "GPT2Config"])
def test_strict_samples_have_the_same_bits_in_any_order_and_company(
    family: str, build: Any, small_config: Any, prompts_of: Any
) -> None:
    import transformers

    model = build(getattr(transformers, family)(**small_config(head_dim=16, sliding_window=7)))
    requests = named(prompts_of([4, 9, 1, 30, 5, 5]), seed=11)
    together = strict(model, requests, SAMPLING)
    assert strict(model, requests[::-1], SAMPLING)[::-1] == together
    assert [strict(model, [request], SAMPLING)[0] for request in requests] == together
    two = [replace(request, sample_offset=offset) for request in requests for offset in (0, 2)]
    halves = strict(model, two, SAMPLING)
    whole = strict(model, requests, replace_n(SAMPLING, 4))
    assert [a + b for a, b in zip(halves[::2], halves[1::2], strict=True)] == whole


def test_strict_mode_warns_exactly_when_this_process_cannot_keep_its_promise(llama: Any) -> None:
    torch.randn(64, 64) @ torch.randn(64, 64)  # MKL reads its setting at its first product
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Engine(llama, EngineConfig(num_slots=2, max_length=16, deterministic="strict"))
    warned = any("set MKL_CBWR" in str(warning.message) for warning in caught)
    assert warned != products_are_strict()


@pytest.mark.slow
def test_strict_mixtures_of_experts_have_the_same_bits_when_products_are_strict(tmp_path: Any) -> None:
    """In a process of its own, in which the setting stands before the first product."""
    script = tmp_path / "strict_experts.py"
    script.write_text(STRICT_EXPERTS)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "MKL_CBWR": "AUTO,STRICT"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] in ("equal", "not-strict-here"), done.stdout
    assert ("set MKL_CBWR" in done.stderr) == (done.stdout.split()[-1] == "not-strict-here")


STRICT_EXPERTS = """
import torch
from transformers import MixtralConfig, MixtralForCausalLM
from rollout_pool import Engine, EngineConfig, RolloutRequest, SamplingParams
from rollout_pool.actors.strict import products_are_strict

torch.manual_seed(0)
config = MixtralConfig(vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                       num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, initializer_range=0.2)
engine = Engine(MixtralForCausalLM(config), EngineConfig(num_slots=8, max_length=64, deterministic="strict"))
requests = [RolloutRequest([3 + i] * (i + 1), request_id=str(i), seed=5) for i in range(6)]
sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
def bits(groups):
    return [(g.samples[0].token_ids.tobytes(), g.samples[0].logprobs.tobytes()) for g in groups]
together = bits(engine.generate(requests, sampling))
equal = bits(engine.generate(requests[::-1], sampling))[::-1] == together
equal &= [bits(engine.generate([request], sampling))[0] for request in requests] == together
print(("equal" if equal else "different") if products_are_strict() else "not-strict-here")
"""
