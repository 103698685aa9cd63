"""A prompt's KV kept once for all its samples: the tokens of copies, in a fraction of their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_pool import (
    ConfigError,
    Engine,
    EngineConfig,
    RolloutRequest,
    SamplingParams,
    UnsupportedModelError,
    verify,
)

NEW = 14
SIZES = (9, 40, 1, 23)
COPIES = EngineConfig(num_slots=6, max_length=64, prefix="expand")
SHARED = EngineConfig(num_slots=6, max_length=64, prefix="shared", max_new_tokens=NEW, prompt_tokens=80)


def tokens(groups: list[Any]) -> list[list[list[int]]]:
    return [[sample.token_ids.tolist() for sample in group.samples] for group in groups]


def requests_of(prompts: list[list[int]], counts: Any, budgets: Any, **sampling: Any) -> list[RolloutRequest]:
    return [
        RolloutRequest(
            prompt, SamplingParams(n=n, max_new_tokens=new, seed=4, **sampling), request_id=f"r{index}"
        )
        for index, (prompt, n, new) in enumerate(zip(prompts, counts, budgets, strict=True))
    ]


@pytest.fixture(scope="module")
def quartet(llama: Any, prompts_of: Any) -> Any:
    return llama, prompts_of(SIZES)


@settings(max_examples=30, deadline=None)
@given(
    counts=st.tuples(*[st.integers(1, 5)] * 4),
    budgets=st.tuples(*[st.integers(1, NEW)] * 4),
    slots=st.integers(1, 7),
    prompt_tokens=st.integers(40, 90),
    mode=st.sampled_from(["shared", "auto"]),
    readback=st.sampled_from([1, 3]),
    cut=st.integers(0, 20),
)
def test_however_rows_come_and_go_tokens_are_those_of_copies(
    counts: Any,
    budgets: Any,
    slots: int,
    prompt_tokens: int,
    mode: Any,
    readback: int,
    cut: int,
    quartet: Any,
) -> None:
    """Held groups, refilled slots, moves, prompts that wait; all aborted after some steps, and resumed."""
    model, prompts = quartet
    requests = requests_of(prompts, counts, budgets)
    expected = Engine(model, COPIES).generate(requests)
    changes = {
        "prefix": mode,
        "num_slots": slots,
        "prompt_tokens": prompt_tokens,
        "readback_every": readback,
    }
    engine = Engine(model, SHARED.model_copy(update=changes))
    found: dict[Any, Any] = {}
    for request in requests:
        engine.submit(request, lambda group: found.update({group.request_id: group}))
    for _ in range(cut):
        engine.step()
        assert engine.batch.worker.prefixes.num_bytes <= prompt_tokens * engine.memory_plan.bytes_per_token
    for request in requests:
        engine.abort(request.request_id)
    while engine.has_work():
        engine.step()
    assert engine.stats().shared_kv_bytes == 0
    resumed = [
        RolloutRequest(
            one.prompt, one.sampling, request_id=one.request_id, resume=found[one.request_id].samples
        )
        for one in requests
    ]
    groups = engine.generate(resumed)
    assert tokens(groups) == tokens(expected)
    for group, other in zip(groups, expected, strict=True):
        for sample, twin in zip(group.samples, other.samples, strict=True):
            np.testing.assert_allclose(sample.logprobs, twin.logprobs, atol=1e-4)
    assert engine.stats().live_rows == 0
    assert engine.stats().shared_kv_bytes == 0


@pytest.fixture(scope="module")
def softcapped(build: Any, small_config: Any) -> Any:
    import transformers

    own = {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16}
    return build(transformers.Gemma2Config(**small_config(**own)))


def test_strict_samples_have_the_same_bits_whatever_their_siblings_do(
    softcapped: Any, prompts_of: Any
) -> None:
    """Alone, among more siblings, beside other groups, with siblings that end at once: equal bits.

    With a soft-cap scores are plain matrix products, whose bits show it when their shapes change.
    """
    config = SHARED.model_copy(update={"deterministic": "strict", "num_slots": 8})
    prompts = prompts_of(SIZES)
    stop = {
        int(sample.token_ids[2])
        for group in Engine(softcapped, config).generate(requests_of(prompts[:2], (5, 5), (NEW, NEW)))
        for sample in group.samples[1:]
    }
    variants = {
        "alone": requests_of(prompts[:1], (1,), (NEW,)),
        "siblings": requests_of(prompts[:1], (5,), (NEW,)),
        "others": requests_of(prompts, (3, 2, 4, 2), (NEW, NEW, 3, 9)),
        "ending": requests_of(prompts, (5, 4, 1, 1), (NEW, 5, 5, 5), stop_token_ids=tuple(sorted(stop))),
    }
    firsts = {
        name: Engine(softcapped, config).generate(requests)[0].samples[0]
        for name, requests in variants.items()
    }
    alone = firsts["alone"]
    for sample in firsts.values():
        size = sample.token_ids.size
        assert sample.token_ids.tolist() == alone.token_ids.tolist()[:size]
        assert sample.logprobs.tobytes() == alone.logprobs[:size].tobytes()

    copies = EngineConfig(num_slots=8, max_length=64, prefix="expand", deterministic="strict")
    requests = variants["others"]
    assert tokens(Engine(softcapped, config).generate(requests)) == tokens(
        Engine(softcapped, copies).generate(requests)
    )


def test_a_group_of_sixteen_holds_its_prompt_once(llama: Any, prompts_of: Any) -> None:
    prompt, new, n = prompts_of([200])[0], 12, 16
    sampling = SamplingParams(n=n, max_new_tokens=new, seed=1, ignore_eos=True)
    config = EngineConfig(num_slots=n, max_length=212, prefix="shared", max_new_tokens=new, prompt_tokens=200)
    engine = Engine(llama, config)
    engine.submit(RolloutRequest(prompt, sampling, request_id=0))
    engine.step()
    stats, plan = engine.stats(), engine.memory_plan
    copies = Engine(llama, EngineConfig(num_slots=n, max_length=212, prefix="expand"))
    assert stats.shared_kv_bytes == 200 * plan.bytes_per_token
    assert stats.kv_bytes == n * new * plan.bytes_per_token
    prompt_part = copies.stats().kv_bytes - n * new * plan.bytes_per_token
    assert prompt_part / stats.shared_kv_bytes == n
    held = stats.kv_bytes + stats.shared_kv_bytes
    assert plan.kv_bytes == held + plan.prefix_bytes + 212 * plan.bytes_per_token  # one prompt that waits
    assert f"{n} slots x {new} tokens and 200 of shared prompts" in plan.describe()
    while engine.has_work():
        engine.step()


def test_equal_prompts_and_recent_ones_are_one_in_memory(llama: Any, prompts_of: Any) -> None:
    prompt = prompts_of([30])[0]
    engine = Engine(llama, SHARED)
    requests = requests_of([prompt, prompt], (2, 3), (NEW, NEW), ignore_eos=True)
    for request in requests:
        engine.submit(request)
    engine.step()
    stats = engine.stats()
    assert (stats.shared_groups, stats.prefills) == (2, 1)
    assert stats.shared_kv_bytes == 30 * engine.memory_plan.bytes_per_token
    (recent,) = engine.batch.worker.recent._stored.values()
    assert engine.batch.worker.prefixes[0] is recent.prefix
    while engine.has_work():
        engine.step()
    engine.sleep()
    engine.wake()
    assert tokens(engine.generate(requests)) == tokens(Engine(llama, COPIES).generate(requests))


def test_auto_shares_where_it_pays_and_where_it_must(llama: Any, prompts_of: Any) -> None:
    long, short = prompts_of([200, 5])
    config = EngineConfig(num_slots=16, max_length=212)
    engine = Engine(llama, config)
    requests = requests_of([long, short], (8, 8), (12, 12))
    groups = engine.generate(requests)
    assert engine.stats().shared_groups == 1  # rows of both kinds were in the same steps
    copies = Engine(llama, config.model_copy(update={"prefix": "expand"}))
    assert tokens(groups) == tokens(copies.generate(requests))
    assert verify(groups, llama).max_abs_diff < 1e-3

    strict = Engine(llama, config.model_copy(update={"deterministic": "strict"}))
    strict.generate(requests)
    assert strict.stats().shared_groups == 0
    must = Engine(llama, EngineConfig(num_slots=4, max_length=212, max_new_tokens=20, deterministic="strict"))
    must.generate(requests_of([long, short], (1, 1), (12, 12)))
    assert must.stats().shared_groups == 1
    assert must.stats().kv_bytes == 4 * 20 * must.memory_plan.bytes_per_token


def test_what_no_slot_holds_is_an_error_of_its_group(llama: Any, prompts_of: Any) -> None:
    engine = Engine(llama, SHARED.model_copy(update={"prompt_tokens": 30}))
    groups = engine.generate(
        requests_of(prompts_of((5, 35, 20)), (2, 2, 2), (NEW + 1, NEW, NEW)), SamplingParams()
    )
    assert "max_new_tokens 15 exceeds engine.max_new_tokens 14" in groups[0].error
    assert "prompt of 35 tokens exceeds engine.prompt_tokens 30" in groups[1].error
    assert groups[2].error is None


def test_configurations_that_cannot_share_are_refused(build: Any, small_config: Any) -> None:
    import transformers

    with pytest.raises(ConfigError, match="needs layout 'ragged'"):
        EngineConfig(prefix="shared", layout="aligned")
    with pytest.raises(ConfigError, match="max_new_tokens: needs prefix 'auto' or 'shared'"):
        EngineConfig(prefix="expand", max_new_tokens=5)
    latent = {
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    }  # fmt: skip
    model = build(transformers.DeepseekV3Config(**small_config(**latent)))
    with pytest.raises(UnsupportedModelError, match=r"cannot share prompts: .* set engine.prefix to 'auto'"):
        Engine(model, SHARED)
    engine = Engine(model, SHARED.model_copy(update={"prefix": "auto"}))
    assert engine.memory_plan.slot_length == 64  # as if every slot had to hold its prompt, as it does
    group = engine.generate([[5, 6, 7]], SamplingParams(n=3, max_new_tokens=4))[0]
    assert group.error is None
    assert engine.stats().shared_groups == 0
