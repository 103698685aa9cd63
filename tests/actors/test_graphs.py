"""Recorded steps against the same steps run eagerly; without a GPU they are recorded on a tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from rollout_pool.actors.graphs import CudaRecorder, EagerRecorder, GraphedStep, Recorded
from rollout_pool.actors.model_tensors import ModelTensors
from rollout_pool.actors.tape import TapeRecorder

SLOTS, LENGTH, VOCAB, WIDTH = 4, 64, 50, 16
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RECORDERS = [
    pytest.param(lambda: EagerRecorder(), "cpu", id="eager"),
    pytest.param(lambda: TapeRecorder(), "cpu", id="tape"),
    pytest.param(lambda: CudaRecorder(torch.device("cuda")), "cuda", id="cuda", marks=on_gpu),
]


class Decoder(torch.nn.Module):
    """One attention layer with a slot cache, greedy, and all that it knows of a step in tensors."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def weights(*shape: int) -> torch.nn.Parameter:
            values = torch.randn(*shape, generator=generator) * 1.5
            return torch.nn.Parameter(values.to(device), requires_grad=False)

        self.embedding, self.head = weights(VOCAB, WIDTH), weights(VOCAB, WIDTH)
        self.places = weights(LENGTH, WIDTH)
        self.mixer = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False, device=device)
        self.mixer.weight = weights(3 * WIDTH, WIDTH)
        zeros = {"dtype": torch.int64, "device": device}
        self.cache = [torch.zeros(SLOTS, LENGTH, WIDTH, device=device) for _ in range(2)]
        self.position = torch.zeros(SLOTS, **zeros)
        self.last = torch.arange(5, 5 + SLOTS, device=device)
        self.tokens = torch.zeros(SLOTS, LENGTH, **zeros)

    def state(self) -> list[torch.Tensor]:
        return [self.position, self.last, self.tokens]

    def step(self, rows: int) -> Callable[[], torch.Tensor]:
        """The step of the first rows; it returns the tokens drawn, ``[rows]``."""

        def run() -> torch.Tensor:
            position, device = self.position[:rows], self.position.device
            hidden = functional.embedding(self.last[:rows], self.embedding) + self.places[position]
            query, key, value = self.mixer(hidden).split(WIDTH, dim=1)
            cells = torch.arange(rows, device=device) * LENGTH + position
            for cache, new in zip(self.cache, (key, value), strict=True):
                cache.view(-1, WIDTH).index_copy_(0, cells, new)
            visible = torch.arange(LENGTH, device=device) <= position.unsqueeze(1)
            keys, values = (cache[:rows].unsqueeze(1) for cache in self.cache)
            mixed = functional.scaled_dot_product_attention(
                query[:, None, None], keys, values, attn_mask=visible[:, None, None]
            )
            drawn = ((mixed.reshape(rows, WIDTH) + hidden) @ self.head.t()).argmax(dim=1)
            self.tokens.view(-1).index_copy_(0, cells, drawn)
            self.last[:rows] = drawn
            position += 1
            return drawn

        return run

    def graphed(self, recorder: Any) -> GraphedStep:
        tensors = ModelTensors(self)
        return GraphedStep(recorder, lambda: [*tensors(), *self.cache], self.state)


def eager_tokens(
    rows_of_steps: list[int],
    change: Callable[[Decoder, int], None] | None = None,
    device: str = "cpu",
) -> list[Any]:
    decoder = Decoder(device)
    for number, rows in enumerate(rows_of_steps):
        if change is not None:
            change(decoder, number)
        decoder.step(rows)()
    return decoder.tokens.tolist()


def run_graphed(
    decoder: Decoder,
    graphed: GraphedStep,
    rows_of_steps: list[int],
    change: Callable[[Decoder, int], None] | None = None,
) -> list[Any]:
    for number, rows in enumerate(rows_of_steps):
        if change is not None:
            change(decoder, number)
        graphed((rows,), decoder.step(rows))
    return decoder.tokens.tolist()


@pytest.mark.parametrize("is_inference", [True, False])
@pytest.mark.parametrize(("recorder", "device"), RECORDERS)
def test_replays_equal_eager_steps(recorder: Any, device: str, is_inference: bool) -> None:
    with torch.inference_mode(is_inference):
        decoder = Decoder(device)
        graphed = decoder.graphed(recorder())
        tokens = run_graphed(decoder, graphed, [SLOTS] * 50)
        assert tokens == eager_tokens([SLOTS] * 50, device=device)
    assert len({token for row in tokens for token in row[:50]}) > 20, (
        "the decoder repeats itself: a weak test"
    )
    assert (graphed.num_recordings, graphed.num_replays) == (1, 49)


@pytest.mark.parametrize(("recorder", "device"), RECORDERS)
def test_batch_sizes_take_turns(recorder: Any, device: str) -> None:
    decoder = Decoder(device)
    graphed = decoder.graphed(recorder())
    rows = [4, 2, 4, 1, 2, 2, 4, 3, 1, 4, 3, 2] * 3
    assert run_graphed(decoder, graphed, rows) == eager_tokens(rows, device=device)
    assert (graphed.num_recordings, graphed.num_replays) == (4, len(rows) - 4)


def test_results_are_valid_until_the_next_call() -> None:
    decoder = Decoder()
    graphed = decoder.graphed(TapeRecorder())
    first = graphed((2,), decoder.step(2))
    kept = first.clone()
    graphed((4,), decoder.step(4))
    assert (first != kept).all()


def test_a_view_of_what_was_replaced_goes_wrong_unless_the_step_is_told() -> None:
    def replace_cache(decoder: Decoder, number: int) -> None:
        if number == 10:
            decoder.cache = [cache.clone() for cache in decoder.cache]

    expected = eager_tokens([SLOTS] * 20)
    decoder = Decoder()
    told = decoder.graphed(TapeRecorder())
    assert run_graphed(decoder, told, [SLOTS] * 20, replace_cache) == expected
    assert told.num_recordings == 2

    def spoil_old_cache(decoder: Decoder, number: int) -> None:
        old = decoder.cache
        replace_cache(decoder, number)
        if old is not decoder.cache:
            for cache in old:  # as whoever gets the memory next would
                cache.fill_(0.5)

    decoder = Decoder()
    untold = GraphedStep(TapeRecorder(), list, decoder.state)
    assert run_graphed(decoder, untold, [SLOTS] * 20, spoil_old_cache) != expected


WEIGHT_CHANGES: dict[str, tuple[Callable[[Decoder], None], bool]] = {
    "written in place": (lambda decoder: decoder.head.mul_(-1), False),
    "other data": (lambda decoder: setattr(decoder.head, "data", -decoder.head.data), True),
    "other parameter": (
        lambda decoder: setattr(decoder, "head", torch.nn.Parameter(-decoder.head, requires_grad=False)),
        True,
    ),
    "other module": (lambda decoder: setattr(decoder, "mixer", negated(decoder.mixer)), True),
}


def negated(linear: torch.nn.Linear) -> torch.nn.Linear:
    other = torch.nn.Linear(linear.in_features, linear.out_features, bias=False)
    other.weight = torch.nn.Parameter(-linear.weight, requires_grad=False)
    return other


@pytest.mark.parametrize("change", WEIGHT_CHANGES)
def test_moved_weights_are_recorded_again_and_weights_changed_in_place_are_not(change: str) -> None:
    apply, moves = WEIGHT_CHANGES[change]

    def at_step_ten(decoder: Decoder, number: int) -> None:
        if number == 10:
            apply(decoder)

    decoder = Decoder()
    graphed = decoder.graphed(TapeRecorder())
    tokens = run_graphed(decoder, graphed, [SLOTS] * 20, at_step_ten)
    assert tokens == eager_tokens([SLOTS] * 20, at_step_ten)
    assert tokens != eager_tokens([SLOTS] * 20)
    assert graphed.num_recordings == 1 + moves


def test_a_state_that_grew_is_recorded_again() -> None:
    def widen(decoder: Decoder, number: int) -> None:
        if number == 10:
            decoder.tokens = functional.pad(decoder.tokens, (0, 0, 0, 1))

    decoder = Decoder()
    graphed = decoder.graphed(TapeRecorder())
    assert run_graphed(decoder, graphed, [SLOTS] * 20, widen)[:SLOTS] == eager_tokens([SLOTS] * 20)
    assert graphed.num_recordings == 2


def test_invalidated_recordings_are_made_again() -> None:
    decoder = Decoder()
    recorder = Spy()
    graphed = decoder.graphed(recorder)
    run_graphed(decoder, graphed, [4, 2, 4])
    graphed.invalidate()
    assert recorder.num_clears == 1
    run_graphed(decoder, graphed, [4])
    assert (recorder.num_records, graphed.num_recordings, graphed.num_replays) == (3, 3, 1)


class Spy(EagerRecorder):
    """Counts; before it records, it runs a step ``extra`` more times; it refuses after ``limit`` records."""

    def __init__(self, extra: int = 0, limit: int | None = None) -> None:
        self.extra, self.limit = extra, limit
        self.num_records = self.num_clears = 0

    def record(self, step: Any) -> Recorded[Any]:
        self.num_records += 1
        for _ in range(self.extra):
            step()
        result = step()
        if self.limit is not None and self.num_records > self.limit:
            return Recorded(result, None, "there is no room")
        return Recorded(result, step)

    def clear(self) -> None:
        self.num_clears += 1


@pytest.mark.parametrize("recorder", [lambda: Spy(extra=2), TapeRecorder], ids=["two warm-ups", "tape"])
def test_preparing_leaves_the_state_untouched(recorder: Any) -> None:
    decoder = Decoder()
    graphed = decoder.graphed(recorder())
    before = [tensor.clone() for tensor in decoder.state()]
    addresses = [tensor.data_ptr() for tensor in decoder.state()]
    with torch.inference_mode():
        graphed.prepare({(rows,): decoder.step(rows) for rows in (1, 2, 4)})
    assert all(torch.equal(a, b) for a, b in zip(before, decoder.state(), strict=True))
    assert addresses == [tensor.data_ptr() for tensor in decoder.state()]
    rows = [4, 2, 4, 1] * 5
    assert run_graphed(decoder, graphed, rows) == eager_tokens(rows)
    assert (graphed.num_recordings, graphed.num_replays) == (3, len(rows))


def test_preparing_restores_the_state_when_a_step_fails() -> None:
    def fail() -> None:
        decoder.step(4)()
        raise MemoryError("no room")

    decoder = Decoder()
    graphed = decoder.graphed(TapeRecorder())
    with pytest.raises(MemoryError, match="no room"):
        graphed.prepare({(4,): fail})
    assert decoder.position.tolist() == [0] * SLOTS
    assert run_graphed(decoder, graphed, [4] * 5) == eager_tokens([4] * 5)


def test_the_largest_batch_is_recorded_first() -> None:
    ran: list[int] = []
    graphed = GraphedStep(EagerRecorder(), list, list)
    graphed.prepare({(rows, "greedy"): lambda rows=rows: ran.append(rows) for rows in (2, 16, 1, 8)})
    assert ran == [16, 8, 2, 1]


def test_a_step_that_cannot_be_recorded_runs_eagerly_with_one_warning() -> None:
    rows = [4, 2, 1, 4, 2, 1, 3, 2]
    decoder, recorder = Decoder(), Spy(limit=1)
    graphed = decoder.graphed(recorder)
    with pytest.warns(RuntimeWarning, match="run eagerly: there is no room") as caught:
        assert run_graphed(decoder, graphed, rows) == eager_tokens(rows)
    assert len(caught) == 1
    assert graphed.is_eager
    # What was recorded before is still replayed (the two other steps of 4 rows); nothing else is tried.
    assert (recorder.num_records, graphed.num_recordings, graphed.num_replays) == (2, 1, 1)


def test_an_error_of_a_step_is_the_callers_and_records_nothing() -> None:
    def fail() -> None:
        raise ValueError("broken")

    graphed = GraphedStep(TapeRecorder(), list, list)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            graphed((1,), fail)
    assert not graphed.is_eager
    assert graphed.num_recordings == 0


@pytest.mark.parametrize("rows", [pytest.param((1, 2, 4), marks=on_gpu)])
def test_cuda_recordings_are_prepared_dropped_and_made_again(rows: tuple[int, ...]) -> None:
    decoder = Decoder("cuda")
    graphed = decoder.graphed(CudaRecorder(torch.device("cuda")))
    steps = {(number,): decoder.step(number) for number in rows}
    graphed.prepare(steps)
    assert decoder.position.tolist() == [0] * SLOTS
    run = [4, 2, 4, 1] * 4
    first = run_graphed(decoder, graphed, run)
    graphed.invalidate()
    second = run_graphed(decoder, graphed, run)
    assert first == eager_tokens(run, device="cuda")
    assert second == eager_tokens(run * 2, device="cuda")
    assert graphed.num_recordings == 2 * len(rows)
