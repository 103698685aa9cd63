"""How often the host waits for the device in a step: at most once, and on average less than once.

On a CPU nothing waits, so this counts what would wait on a GPU: reads of tensors, operations whose shape
depends on data, copies out of memory that is not pinned, and waits for transfers that come late. The
torch forms of kernels are left out, as on a GPU the Triton forms stand there. Modelling code counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from itertools import repeat
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from rollout_pool import Engine, EngineConfig, RolloutGroup, RolloutRequest, SamplingParams
from rollout_pool.actors import seating
from rollout_pool.actors.readback import Readback, Transfer
from rollout_pool.actors.tape import depends_on_data
from rollout_pool.kernels import ops

READS = (
    "item", "cpu", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__",
    "__contains__",
)  # fmt: skip
TORCH = str(Path(torch.__file__).parent)


class SyncSpy(TorchDispatchMode):
    """Notes every place that would make the host wait; read :attr:`places` within :meth:`watching`."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self._is_noting = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in READS:
                self._watch(patch, torch.Tensor, name, lambda tensor, *_, **__: not is_host_copy(tensor))
            self._watch(
                patch, torch.Tensor, "to", lambda _, *args, **kwargs: "cpu" in (*args, *kwargs.values())
            )
            for name in ("tensor", "as_tensor"):
                self._watch(patch, torch, name, waits_for_upload)
            self._watch(patch, torch.cuda, "synchronize")
            for owner in (torch.cuda.Event, torch.cuda.Stream):
                self._watch(patch, owner, "synchronize")
            with self:
                yield

    def note(self, what: str, caller: FrameType | None) -> None:
        """``caller``: the frame that made the call, or one of torch's that it led to."""
        while caller is not None and (
            caller.f_code is SyncSpy.__torch_dispatch__.__code__
            or caller.f_code.co_filename.startswith(TORCH)
        ):
            caller = caller.f_back
        path = Path(caller.f_code.co_filename) if caller is not None else Path()
        if path.parent.name != "kernels" and caller is not None:
            self.places.append(f"{what} at {path.name}:{caller.f_lineno}")

    def _watch(
        self,
        patch: pytest.MonkeyPatch,
        owner: Any,
        name: str,
        waits: Callable[..., bool] = lambda *_, **__: True,
    ) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_noting or not waits(*args, **kwargs):
                return original(*args, **kwargs)
            self.note(name, sys._getframe(1))
            self._is_noting = True  # what it is made of is not noted again
            try:
                return original(*args, **kwargs)
            finally:
                self._is_noting = False

        patch.setattr(owner, name, watched)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_noting:
            return func(*args, **kwargs)
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if depends_on_data(func, args):
            self.note(str(func), sys._getframe(1))
        return func(*args, **kwargs)


def waits_for_upload(data: Any, device: Any = None, **_: Any) -> bool:
    """Nothing is copied of an empty list, with which Transformers' caches begin."""
    return device is not None and not (isinstance(data, list) and not data)


def is_host_copy(tensor: Any) -> bool:
    return getattr(tensor, "is_host_copy", False)


class LateDevice:
    """Transfers that arrive in order, each after it was asked for ``polls`` times; until then, garbage."""

    def __init__(self, spy: SyncSpy, polls: Iterator[float]) -> None:
        self.spy, self.polls = spy, polls
        self.num_late = 0
        self._under_way: list[LateEvent] = []

    def transfer(self, tensor: torch.Tensor) -> Transfer:
        transfer = Transfer(tensor)
        transfer._host = torch.full_like(tensor, -77)
        transfer._host.is_host_copy = True  # type: ignore[attr-defined]
        transfer._event = LateEvent(self, next(self.polls), tensor.clone(), transfer._host)  # type: ignore[assignment]
        self._under_way.append(transfer._event)  # type: ignore[arg-type]
        return transfer

    def arrive(self, last: LateEvent) -> None:
        """``last`` and all that was started before it."""
        while last in self._under_way:
            event = self._under_way.pop(0)
            event.host.copy_(event.values)


class LateEvent:
    """The part of a CUDA event that a transfer uses."""

    def __init__(self, device: LateDevice, polls: float, values: torch.Tensor, host: torch.Tensor) -> None:
        self.device, self.polls, self.values, self.host = device, polls, values, host

    def query(self) -> bool:
        if self in self.device._under_way:
            self.polls -= 1
            if self.polls >= 0:
                self.device.num_late += 1
                return False
            self.device.arrive(self)
        return True

    def synchronize(self) -> None:
        self.device.spy.note("wait", sys._getframe(1))
        self.device.arrive(self)


def the_spy_finds(act: Callable[[], Any]) -> list[str]:
    spy = SyncSpy()
    with torch.inference_mode(), spy.watching():
        act()
    return [place.split(" ")[0] for place in spy.places]


X = torch.tensor([1.0, -2.0, 3.0])
ONE = torch.tensor(1)
WAITS: dict[str, Callable[[], Any]] = {
    "item": lambda: X.sum().item(),
    "cpu": lambda: X.cpu(),
    "to": lambda: X.to("cpu"),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "__bool__": lambda: bool((X > 0).any()),
    "__int__": lambda: int(ONE),
    "__float__": lambda: float(ONE),
    "__index__": lambda: range(3)[ONE],
    "__contains__": lambda: 3.0 in X,
    "tensor": lambda: torch.tensor([1, 2], device="cpu"),
    "as_tensor": lambda: torch.as_tensor([1, 2], device="cpu"),
    "aten.nonzero.default": lambda: torch.where(X > 0),
    "aten.index.Tensor": lambda: X[X > 0],
    "aten.masked_select.default": lambda: X.masked_select(X > 0),
    "aten._unique2.default": lambda: X.unique(),
    "aten.equal.default": lambda: torch.equal(X, X),
    "aten._local_scalar_dense.default": lambda: torch.ops.aten.item(ONE),
}
DOES_NOT_WAIT: dict[str, Callable[[], Any]] = {
    "masked fill": lambda: X.clone().index_put_((X > 0,), torch.tensor(0.0)),
    "index": lambda: X[torch.tensor([0, 2])],
    "arithmetic": lambda: (X * 2).clamp(max=1).softmax(0).argmax(),
    "other dtype": lambda: X.to(torch.float64),
    "upload": lambda: ops.upload([1, 2, 3], X.device),
    "kernel": lambda: ops.expand_kv([torch.zeros(2, 1, 3, 4)], [torch.ones(1, 1, 2, 4)], torch.tensor([0, 1])),
}  # fmt: skip


@pytest.mark.parametrize("what", WAITS)
def test_the_spy_notes_what_waits_once(what: str) -> None:
    assert the_spy_finds(WAITS[what]) == [what]


def test_the_spy_notes_waits_for_streams_and_events() -> None:
    def act() -> None:
        for wait in (torch.cuda.synchronize, torch.cuda.Event.synchronize, torch.cuda.Stream.synchronize):
            with suppress(Exception):  # there may be no GPU
                wait(None)  # type: ignore[arg-type]

    assert the_spy_finds(act) == ["synchronize"] * 3


@pytest.mark.parametrize("what", DOES_NOT_WAIT)
def test_the_spy_notes_nothing_else(what: str) -> None:
    assert the_spy_finds(DOES_NOT_WAIT[what]) == []


def test_late_transfers_arrive_in_order_and_hold_garbage_before() -> None:
    spy = SyncSpy()
    device = LateDevice(spy, iter([3, 1, 9, 9]))
    first, second, third, fourth = (device.transfer(torch.tensor([value])) for value in (1, 2, 3, 4))
    assert not second.is_ready()
    assert second.array()[0] == -77
    assert second.is_ready()
    assert (first.array()[0], first.is_ready()) == (1, True)
    assert not third.is_ready()
    fourth.wait()
    assert (third.is_ready(), third.array()[0], fourth.array()[0]) == (True, 3, 4)
    assert [place.split(" ")[0] for place in spy.places] == ["wait"]


LAYERS = ["sliding_attention", "full_attention"]
# family: (configuration class, what differs from the shared settings)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", {"layer_types": LAYERS, "head_dim": 16, "sliding_window": 7}),
    "gpt-oss": (
        "GptOssConfig",
        {"layer_types": LAYERS, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
}  # fmt: skip
SLOTS, VOCAB = 8, 160
OLD_MASKS = "tensor at masking_utils.py"
"""Older Transformers upload a zero for every mask of a prefill with eager attention; newer ones make it there."""
UNTIL_BUDGET = {"temperature": 0.0, "ignore_eos": True}
UNTIL_STOP = {"temperature": 1.0, "stop_token_ids": tuple(range(3, VOCAB, 3))}
# (prompt length, samples, budget, how drawn). Two groups have to be held. The second part of the first of
# them sits in slots 5 and 6, is the last to end, and so moves.
GROUPS = (
    (5, 5, 22, UNTIL_BUDGET),
    (17, 2, 16, UNTIL_BUDGET),
    (1, 3, 16, {**UNTIL_BUDGET, "temperature": 0.8}),
    (9, 3, 5, UNTIL_STOP),
    (12, 2, 4, UNTIL_STOP),
)
POLLS: dict[str, Callable[[], Iterator[float]]] = {
    "one poll late": lambda: repeat(1),
    "up to six polls late": lambda: (number * 5 % 7 for number in range(10**6)),
    "only when waited for": lambda: repeat(float("inf")),
}


LATE = "only when waited for"
CASES = [(family, "ragged", LATE) for family in FAMILIES]
CASES += [("llama", "ragged", lateness) for lateness in POLLS if lateness != LATE]
CASES += [("llama", "aligned", LATE)]


def requests_for(prompts_of: Any) -> list[RolloutRequest]:
    prompts = prompts_of([length for length, *_ in GROUPS])
    return [
        RolloutRequest(
            prompt, SamplingParams(n=n, max_new_tokens=budget, seed=11, **drawn), request_id=str(number)
        )
        for number, (prompt, (_, n, budget, drawn)) in enumerate(zip(prompts, GROUPS, strict=True))
    ]


def tokens_of(groups: list[RolloutGroup]) -> list[Any]:
    return [[sample.token_ids.tolist() for sample in group.samples] for group in groups]


def run_watched(
    engine: Engine, requests: list[RolloutRequest], spy: SyncSpy
) -> tuple[list[Any], list[list[str]]]:
    """Tokens of all groups, and where every step waited."""
    for request in requests:
        engine.submit(request)
    groups: dict[str | int, RolloutGroup] = {}
    waits = []
    while engine.has_work():
        spy.places = []
        with spy.watching():
            finished = engine.step()
        waits.append([place for place in spy.places if not place.startswith(OLD_MASKS)])
        groups.update({group.request_id: group for group in finished})
    return tokens_of([groups[request.request_id] for request in requests]), waits


@pytest.mark.parametrize(("family", "layout", "lateness"), CASES)
def test_a_step_waits_at_most_once_and_on_average_less(
    family: str,
    layout: Any,
    lateness: str,
    build: Any,
    small_config: Any,
    prompts_of: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class_name, changes = FAMILIES[family]
    model = build(getattr(transformers, class_name)(**small_config(num_hidden_layers=2, **changes)))
    requests = requests_for(prompts_of)
    settings = {"num_slots": SLOTS, "max_length": 64, "layout": layout}
    expected = tokens_of(Engine(model, EngineConfig(**settings, readback_every=1)).generate(requests))

    spy = SyncSpy()
    device = LateDevice(spy, POLLS[lateness]())
    monkeypatch.setattr(seating, "Readback", lambda: Readback(device.transfer))
    engine = Engine(model, EngineConfig(**settings, readback_every=4))
    tokens, waits = run_watched(engine, requests, spy)

    assert tokens == expected
    stats = engine.stats()
    assert stats.prefills == len(GROUPS)
    assert stats.rows_moved > 0 or layout == "aligned"
    assert device.num_late > 0
    assert [step for step in waits if len(step) > 1] == []
    assert sum(map(len, waits)) < len(waits)
    assert (sum(map(len, waits)) > 0) == (lateness != "one poll late")
