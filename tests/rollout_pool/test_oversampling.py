"""Drawing until enough groups pass, on one engine: the pool's form is tested with the pool."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from rollout_pool import (
    ConfigError,
    Engine,
    EngineConfig,
    RequestError,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
)
from rollout_pool.oversampling import oversample, stream_prompts

SAMPLING = SamplingParams(n=2, max_new_tokens=8, ignore_eos=True, seed=3)


@pytest.fixture(scope="module")
def engine(tiny_model_dir: str) -> Engine:
    return Engine(tiny_model_dir, EngineConfig(num_slots=4, max_length=64))


def endless(read: list[int]) -> Iterator[list[int]]:
    for number in count():
        read.append(number)
        yield [5 + number % 100]


def tokens(group: RolloutGroup) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in group.samples]


def test_a_stream_of_prompts_is_read_as_there_is_room_and_depends_on_nothing_else(engine: Engine) -> None:
    read: list[int] = []
    stream = stream_prompts(engine, endless(read), SAMPLING, in_flight=3)
    groups = [next(stream) for _ in range(10)]
    assert len(read) <= 10 + 3
    stream.close()
    engine.step()
    assert not engine.has_work()
    prompts = [RolloutRequest([5 + number], request_id=number) for number in range(13)]
    whole = engine.generate(prompts, SAMPLING)
    assert sorted(group.index for group in groups) == sorted({group.index for group in groups})
    for group in groups:
        assert (group.request_id, tokens(group)) == (group.index, tokens(whole[group.index]))
    assert len(list(stream_prompts(engine, prompts[:5], SAMPLING, in_flight=2))) == 5


def test_it_draws_until_enough_pass_and_the_surplus_can_be_gone_on_with(engine: Engine) -> None:
    read: list[int] = []
    tested: list[RolloutGroup] = []

    def accept(group: RolloutGroup) -> bool:
        tested.append(group)
        return group.index % 3 == 0

    prompts = (
        RolloutRequest(prompt, SAMPLING.model_copy(update={"max_new_tokens": 6 + prompt[0] % 5}))
        for prompt in endless(read)
    )
    done = oversample(engine, prompts, take=4, accept=accept, in_flight=5, rest="partial")
    assert done.is_complete
    assert [group.index % 3 for group in done.kept] == [0] * 4
    assert done.num_dropped == len(tested) - 4
    assert len(tested) + len(done.cut) == len(read)
    assert not engine.has_work()
    begun = [group for group in done.cut if group.samples]
    assert begun
    rest = [
        RolloutRequest(
            group.prompt_token_ids, group.sampling, request_id=group.request_id, resume=group.samples
        )
        for group in begun
    ]
    whole = [RolloutRequest([5 + group.index], group.sampling, request_id=group.index) for group in begun]
    resumed = engine.generate(rest, SAMPLING)
    assert [tokens(group) for group in resumed] == [tokens(g) for g in engine.generate(whole, SAMPLING)]


def test_prompts_that_run_out_leave_what_passed_and_failed_groups_are_not_tested(engine: Engine) -> None:
    prompts: list[Any] = [[1], "", [2], [3], [999]]
    done = oversample(engine, prompts, SAMPLING, take=3, accept=lambda group: group.index > 0)
    assert not done.is_complete
    assert ([g.index for g in done.kept], done.num_dropped) == ([2, 3], 1)
    assert sorted(group.index for group in done.failed) == [1, 4]
    with pytest.raises(
        RequestError, match="3 groups in a row failed, the last one: request '2': the prompt is"
    ):
        oversample(engine, ("" for _ in count()), SAMPLING, take=3, accept=bool, in_flight=3)


def test_what_the_test_raises_cancels_what_is_in_flight(engine: Engine) -> None:
    def accept(group: RolloutGroup) -> bool:
        raise ZeroDivisionError("no reward")

    with pytest.raises(ZeroDivisionError, match="no reward"):
        oversample(engine, endless([]), SAMPLING, take=2, accept=accept)
    engine.step()
    assert not engine.has_work()


def test_wrong_arguments_are_named(engine: Engine) -> None:
    def draw(source: Any = engine, prompts: Any = ([1],), **arguments: Any) -> Any:
        return oversample(source, prompts, SAMPLING, **{"take": 1, "accept": bool, **arguments})

    for arguments, message in [
        ({"take": 0}, "take must be an integer of at least 1, got 0"),
        ({"in_flight": 1.5}, "in_flight must be an integer of at least 1, got 1.5"),
        ({"accept": "all"}, "accept must be callable, got str"),
        ({"rest": "drop"}, "rest must be one of cancel, partial, got 'drop'"),
        ({"prompts": "one"}, "prompts must be an iterable of prompts, got a single str"),
        ({"prompts": 5}, "prompts must be an iterable of prompts, got a single int"),
    ]:
        with pytest.raises(RequestError, match=message):
            draw(**arguments)
    with pytest.raises(ConfigError, match="from an Engine or from the handle of a pool, got list"):
        draw(source=[])
    with pytest.raises(ConfigError, match="max_staleness is for pools"):
        draw(max_staleness=1)
