"""Layout aligned: the samples of layout ragged, through a buffer that is never longer than the longest row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rollout_pool import (
    ConfigError,
    Engine,
    EngineConfig,
    PoolConfig,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    verify,
)

LENGTHS = (3, 17, 8, 1, 12, 25, 6, 2)
NEW = 18
LONGEST = max(LENGTHS) + NEW


def tokens_of(groups: list[RolloutGroup]) -> list[list[list[int]]]:
    return [[sample.token_ids.tolist() for sample in group.samples] for group in groups]


@pytest.fixture(scope="module")
def gemma3(build: Any, small_config: Any) -> Any:
    """Two kinds of layers, one of which keeps its last cells only."""
    config = transformers.Gemma3TextConfig(
        **small_config(num_hidden_layers=7, head_dim=16, sliding_window=7, query_pre_attn_scalar=16)
    )
    return build(config)


@pytest.fixture(scope="session")
def watched() -> Callable[[Engine], Engine]:
    """The engine, with every access to its cache checked against the bounds of its rows."""

    def watch(engine: Engine) -> Engine:
        cache = engine.cache
        begin, expand, trim, move = cache.begin, cache.expand, cache.trim, cache.move

        def checked_begin(positions: Any, column: int, *args: Any, **more: Any) -> None:
            assert 0 <= column < cache.length
            assert 0 <= int(positions.min()) <= int(positions.max()) <= column, (
                "no row starts before column 0"
            )
            begin(positions, column, *args, **more)

        def checked_expand(prefix: Any, slots: Any, length: int, column: int = 0, skip: int = 0) -> None:
            assert 0 <= column <= cache.length - (length - skip)
            expand(prefix, slots, length, column, skip)

        def checked_trim(num_rows: int, columns: int, length: int) -> None:
            assert 0 < columns < length <= cache.length
            trim(num_rows, columns, length)

        def checked_move(source: Any, target: Any, length: int) -> None:
            assert length <= cache.length
            move(source, target, length)

        cache.begin, cache.expand, cache.trim, cache.move = (  # type: ignore[method-assign]
            checked_begin, checked_expand, checked_trim, checked_move,
        )  # fmt: skip
        return engine

    return watch


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-p": {"top_p": 0.8},
    "filters": {"top_k": 12, "min_p": 0.02, "temperature": 1.3},
    "penalty": {"repetition_penalty": 1.6, "min_new_tokens": 5},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model_name", ["llama", "gemma3"])
def test_sampled_tokens_are_those_of_ragged(
    model_name: str, shape: str, request: pytest.FixtureRequest, prompts_of: Any, poison: Any, watched: Any
) -> None:
    model = request.getfixturevalue(model_name)
    sampling = SamplingParams(
        **{"n": 4, "max_new_tokens": NEW, "temperature": 1.0, "seed": 11, **SHAPES[shape]}
    )
    groups = {}
    for layout in ("ragged", "aligned"):
        config = EngineConfig(num_slots=6, max_length=LONGEST, layout=layout)
        engine = watched(poison(Engine(model, config)))
        groups[layout] = engine.generate(prompts_of(LENGTHS), sampling)
        assert (engine.stats().trims > 0) == (layout == "aligned")
    assert tokens_of(groups["aligned"]) == tokens_of(groups["ragged"])
    pairs = zip(groups["aligned"], groups["ragged"], strict=True)
    for one, other in ((a, b) for g, h in pairs for a, b in zip(g.samples, h.samples, strict=True)):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        np.testing.assert_allclose(one.sampling_logprobs, other.sampling_logprobs, atol=1e-4)
    assert verify(groups["aligned"], model).max_abs_diff < 1e-3


# Shrinking would run the engine a thousand times.
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
@given(data=st.data())
def test_a_long_run_stays_exact_in_a_buffer_of_the_longest_row(
    data: st.DataObject, llama: Any, prompts_of: Any, poison: Any, watched: Any
) -> None:
    """Dozens of groups of any shape, some of which end early: none is lost, and all equal ragged's."""
    kinds = data.draw(
        st.lists(
            st.tuples(st.integers(1, 24), st.integers(1, 4), st.integers(1, 20)), min_size=24, max_size=48
        )
    )
    prompts = prompts_of([length for length, _, _ in kinds], seed=data.draw(st.integers(0, 99)))
    stop_ids = tuple(data.draw(st.sets(st.integers(3, 159), max_size=6)))
    requests = [
        RolloutRequest(
            prompt, SamplingParams(n=n, max_new_tokens=new, seed=5, stop_token_ids=stop_ids, ignore_eos=True)
        )
        for prompt, (_, n, new) in zip(prompts, kinds, strict=True)
    ]
    num_slots = data.draw(st.integers(1, 9))
    longest = max(2, *(length + new for length, _, new in kinds))
    ragged = Engine(llama, EngineConfig(num_slots=24, max_length=64)).generate(requests)
    engine = watched(
        poison(
            Engine(
                llama,
                EngineConfig(
                    num_slots=num_slots,
                    max_length=longest,
                    layout="aligned",
                    readback_every=data.draw(st.sampled_from([1, 1, 4])),
                ),
            )
        )
    )
    groups = engine.generate(requests)
    assert tokens_of(groups) == tokens_of(ragged)
    assert [len(group.samples) for group in groups] == [n for _, n, _ in kinds]
    assert all(group.error is None for group in groups)
    assert not engine.has_work()
    stats = engine.stats()
    assert (stats.live_rows, stats.finished) == (0, len(kinds))
    assert stats.trims > 0 or num_slots == 1


def test_a_request_aborted_in_the_middle_leaves_the_others_as_they_were(
    llama: Any, prompts_of: Any, poison: Any, watched: Any
) -> None:
    sampling = SamplingParams(n=2, max_new_tokens=NEW, seed=3, ignore_eos=True)
    requests = [RolloutRequest(p, sampling, request_id=f"r{i}") for i, p in enumerate(prompts_of(LENGTHS))]
    whole = Engine(llama, EngineConfig(num_slots=16, max_length=LONGEST)).generate(requests)
    expected = {group.request_id: group for group in whole}
    engine = watched(poison(Engine(llama, EngineConfig(num_slots=5, max_length=LONGEST, layout="aligned"))))
    groups: dict[Any, RolloutGroup] = {}
    for one in requests:
        engine.submit(one)
    for step in range(200):
        groups.update({group.request_id: group for group in engine.step()})
        if step == 5:  # the longest prompt: it alone keeps column 0, and it is half done
            assert engine.abort("r5") == 1
        if step == 9:  # one of those that wait
            assert engine.abort("r3") == 1
        if not engine.has_work():
            break
    assert groups.keys() == expected.keys()
    for name, group in groups.items():
        pairs = list(zip(group.samples, expected[name].samples, strict=name not in ("r3", "r5")))
        for sample, other in pairs:
            tokens = sample.token_ids.tolist()
            assert tokens == other.token_ids[: len(tokens)].tolist()
            assert sample.finish_reason == ("aborted" if name in ("r3", "r5") else "length")
            assert len(tokens) == NEW or name in ("r3", "r5")
    assert 0 < groups["r5"].samples[0].token_ids.size < NEW
    assert engine.stats().trims > 0


CONFIGS: dict[str, dict[str, Any]] = {
    "one-slot": {"num_slots": 1},
    "held-group": {"num_slots": 3},
    "prefix-off": {"num_slots": 4, "prefix": "off"},
    "no-compaction": {"num_slots": 16, "compact": False},
    "look-every-5": {"num_slots": 4, "readback_every": 5},
    "look-every-5-one-slot": {"num_slots": 1, "readback_every": 5},
    "roomy": {"num_slots": 4, "max_length": 96},
}


@pytest.mark.parametrize("config", CONFIGS)
def test_every_setting_gives_the_same_samples(
    config: str, llama: Any, prompts_of: Any, poison: Any, watched: Any
) -> None:
    """Seven samples a group, and stop ids that end many of them early."""
    prompts = prompts_of(LENGTHS[:5])
    sampling = SamplingParams(n=7, max_new_tokens=NEW, seed=2, stop_token_ids=tuple(range(3, 15)))
    expected = Engine(llama, EngineConfig(num_slots=8, max_length=64)).generate(prompts, sampling)
    sizes = {sample.token_ids.size for group in expected for sample in group.samples}
    assert len(sizes) > 5, "many lengths"
    changes = {"max_length": max(LENGTHS[:5]) + NEW, "readback_every": 1, **CONFIGS[config]}
    engine = watched(poison(Engine(llama, EngineConfig(layout="aligned", **changes))))
    groups = engine.generate(prompts, sampling)
    assert tokens_of(groups) == tokens_of(expected)
    assert engine.stats().prefills == (35 if config == "prefix-off" else 5)


def test_memory_is_that_of_the_longest_row(llama: Any) -> None:
    ragged, aligned = (
        Engine(llama, EngineConfig(num_slots=5, max_length=LONGEST, layout=layout)).stats().kv_bytes
        for layout in ("ragged", "aligned")
    )
    assert ragged == aligned
    head_dim, kv_heads, layers = 16, 2, 3
    assert aligned == 5 * LONGEST * head_dim * kv_heads * layers * 2 * 4


def test_what_trims_move_is_counted_in_bytes(llama: Any, prompts_of: Any) -> None:
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    requests = [
        RolloutRequest(prompt, greedy.model_copy(update={"max_new_tokens": new}))
        for prompt, new in zip(prompts_of([20, 5, 4]), (12, 6, 12), strict=True)
    ]
    # In one slot every row starts over in column 0: nothing is ever moved.
    alone = Engine(llama, EngineConfig(num_slots=1, max_length=32, layout="aligned"))
    alone.generate(requests)
    assert (alone.stats().trims, alone.stats().trimmed_bytes) == (0, 0)
    # In two, the last row starts in column 21 while the first still runs. When the buffer is full, it is
    # alone and has 11 cells.
    two = Engine(llama, EngineConfig(num_slots=2, max_length=32, layout="aligned"))
    two.generate(requests)
    per_token = two.stats().kv_bytes // (2 * 32)
    assert (two.stats().trims, two.stats().trimmed_bytes) == (1, 11 * per_token)


def test_a_long_prompt_is_not_starved_by_short_ones_that_keep_coming(
    llama: Any, prompts_of: Any, hf_greedy: Any
) -> None:
    short, long = prompts_of([4, 50])
    greedy = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    engine = Engine(llama, EngineConfig(num_slots=3, max_length=64, layout="aligned"))

    def submit_short(number: int) -> None:
        engine.submit(RolloutRequest(short, greedy.model_copy(update={"max_new_tokens": 4 + number % 3})))

    for number in range(6):
        submit_short(number)
    engine.step()
    engine.submit(RolloutRequest(long, greedy, request_id="long"))
    served = []
    for number in range(200):
        for group in engine.step():
            served.append(group)
            submit_short(number)
        if any(group.request_id == "long" for group in served):
            break
    (group,) = (group for group in served if group.request_id == "long")
    assert group.samples[0].token_ids.tolist() == hf_greedy(llama, long, 6)
    assert len(served) > 3, "others went first as long as that was fair"


def test_strict_is_refused_with_the_key() -> None:
    with pytest.raises(ConfigError, match=r"^deterministic: 'strict' needs layout 'ragged'"):
        EngineConfig(layout="aligned", deterministic="strict")
    with pytest.raises(ConfigError, match=r"^engine\.deterministic: 'strict' needs layout 'ragged'"):
        PoolConfig(model="m", engine={"layout": "aligned", "deterministic": "strict"})
