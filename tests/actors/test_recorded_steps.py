"""The engine with its decode steps recorded: on a CPU as a tape of operations, replayed without Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollout_pool import Engine, EngineConfig, RolloutRequest, SamplingParams
from rollout_pool.actors import assembly
from rollout_pool.actors.tape import TapeRecorder, one_operation
from rollout_pool.kernels import ops

LENGTHS = (1, 5, 17, 3, 30, 9)
BUDGETS = (24, 20, 20, 16, 8, 8)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "gemma3": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 7, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16},
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 4, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "mlp_only_layers": [0, 1, 2, 3],
        },
    ),
}  # fmt: skip
SAMPLINGS = {
    "greedy": SamplingParams(n=2, temperature=0, max_new_tokens=20),
    "sampled": SamplingParams(n=3, max_new_tokens=20, seed=5),
    "penalised": SamplingParams(n=2, max_new_tokens=20, repetition_penalty=1.3, temperature=0.8, seed=5),
}


def tokens(groups: list[Any]) -> list[Any]:
    return [[(s.token_ids.tolist(), s.finish_reason, s.seed) for s in group.samples] for group in groups]


def largest_difference(groups: list[Any], others: list[Any]) -> float:
    """Of the log-probabilities of equal samples."""
    pairs = [
        pair
        for one, two in zip(groups, others, strict=True)
        for pair in zip(one.samples, two.samples, strict=True)
    ]
    return max(float(np.abs(one.logprobs - two.logprobs).max()) for one, two in pairs)


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """``taped(model, config)``: an engine whose steps go on a tape."""

    def make(model: Any, config: EngineConfig) -> Engine:
        with monkeypatch.context() as patch:
            patch.setattr(assembly, "recorder_for", lambda *_: TapeRecorder())
            return Engine(model, config)

    monkeypatch.setattr(ops, "sample_tokens", one_operation(ops.sample_tokens))
    return make


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_steps_give_the_tokens_of_eager_ones(
    family: str, sampling: str, build: Any, small_config: Any, prompts_of: Any, poison: Any, taped: Any
) -> None:
    name, changes = FAMILIES[family]
    model = build(getattr(transformers, name)(**small_config(**changes)))
    requests = [
        RolloutRequest(prompt, SAMPLINGS[sampling].model_copy(update={"max_new_tokens": budget}))
        for prompt, budget in zip(prompts_of(LENGTHS), BUDGETS, strict=True)
    ]
    config = EngineConfig(num_slots=5, max_length=64)
    expected = poison(Engine(model, config)).generate(requests)

    engine = poison(taped(model, config))
    groups = engine.generate(requests)

    assert tokens(groups) == tokens(expected)
    assert largest_difference(groups, expected) < 1e-4
    graphs, stats = engine.batch.worker.graphs, engine.stats()
    assert not graphs.is_eager
    assert graphs.num_replays > 3 * graphs.num_recordings
    assert stats.rows_moved > 0


def test_steps_in_which_prompts_are_shared_are_not_replayed(
    llama: Any, prompts_of: Any, poison: Any, taped: Any
) -> None:
    """Rows that share their prompt and, before and after, rows that do not."""
    config = EngineConfig(num_slots=4, max_length=64, max_new_tokens=24)
    short, long = prompts_of([5, 30])
    requests = [
        RolloutRequest(prompt, SamplingParams(n=n, max_new_tokens=new, seed=3, ignore_eos=True))
        for prompt, n, new in ((short, 1, 19), (long, 2, 8), (short, 3, 12))
    ]
    strict = config.model_copy(update={"deterministic": "strict"})  # shares where it must
    expected = poison(Engine(llama, strict)).generate(requests)
    engine = poison(taped(llama, strict))
    assert tokens(engine.generate(requests)) == tokens(expected)
    graphs, stats = engine.batch.worker.graphs, engine.stats()
    assert stats.shared_groups == 1
    assert 0 < graphs.num_replays < stats.decode_steps
    assert not graphs.is_eager


def test_every_batch_size_is_recorded_before_the_first_prompt_and_none_later(
    llama: Any, prompts_of: Any, taped: Any
) -> None:
    engine = taped(llama, EngineConfig(num_slots=20, max_length=48))
    graphs = engine.batch.worker.graphs
    assert graphs.num_recordings == len(engine.batch.scheduler.buckets)
    engine.generate(prompts_of([4, 9, 2, 12, 7]), SamplingParams(n=6, max_new_tokens=16))
    assert graphs.num_recordings == len(engine.batch.scheduler.buckets)
    assert graphs.num_replays == engine.stats().decode_steps


def test_strict_engines_record_the_one_batch_size_that_they_run(
    llama: Any, prompts_of: Any, taped: Any
) -> None:
    engine = taped(llama, EngineConfig(num_slots=20, max_length=48, deterministic="strict"))
    engine.generate(prompts_of([4, 9]), SamplingParams(n=2, max_new_tokens=6))
    assert engine.batch.worker.graphs.num_recordings == 1
    assert engine.batch.worker.graphs.num_replays == engine.stats().decode_steps


def test_steps_are_recorded_again_when_weights_move_and_only_then(
    build: Any, small_config: Any, prompts_of: Any, taped: Any
) -> None:
    model = build(transformers.LlamaConfig(**small_config()))
    config = EngineConfig(num_slots=4, max_length=48)
    sampling = SamplingParams(n=2, max_new_tokens=12, seed=3)
    engine = taped(model, config)
    first = engine.generate(prompts_of([5, 8]), sampling)
    made = engine.batch.worker.graphs.num_recordings

    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(-1.0)  # in place: the recordings see it
    changed = engine.generate(prompts_of([5, 8]), sampling)
    assert tokens(changed) == tokens(Engine(model, config).generate(prompts_of([5, 8]), sampling))
    assert tokens(changed) != tokens(first)
    assert engine.batch.worker.graphs.num_recordings == made

    head.weight = torch.nn.Parameter(head.weight.detach().clone().mul_(-1.0))  # elsewhere
    assert tokens(engine.generate(prompts_of([5, 8]), sampling)) == tokens(first)
    assert engine.batch.worker.graphs.num_recordings > made


def test_requests_that_need_another_kind_of_draw_get_recordings_of_their_own(
    llama: Any, prompts_of: Any, taped: Any
) -> None:
    config = EngineConfig(num_slots=4, max_length=48)
    waves = [
        SamplingParams(n=2, max_new_tokens=10, seed=1),
        SamplingParams(n=2, max_new_tokens=10, seed=1, top_k=5),
        SamplingParams(n=2, max_new_tokens=10, seed=1, min_new_tokens=6, repetition_penalty=1.5),
        SamplingParams(n=2, max_new_tokens=10, seed=1),
    ]
    engine, eager = taped(llama, config), Engine(llama, config)
    for sampling in waves:
        prompts = prompts_of([6, 3, 11])
        assert tokens(engine.generate(prompts, sampling)) == tokens(eager.generate(prompts, sampling))


def test_layout_aligned_and_groups_of_ranks_run_eagerly() -> None:
    cuda = torch.device("cuda")
    assert assembly.recorder_for(EngineConfig(layout="aligned"), cuda, None) is None
    assert assembly.recorder_for(EngineConfig(cuda_graphs="off"), cuda, None) is None
    assert assembly.recorder_for(EngineConfig(), torch.device("cpu"), None) is None
