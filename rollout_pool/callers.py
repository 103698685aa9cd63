"""Who calls a pool, and whether they are still there.

Ray does not tell an actor that the caller of a method has died, nor that a stream was dropped. So every call
brings a sign of life: the reference of another call, which lasts as long as the first. Its owner is the
caller's process, and whoever waits for a reference is told by Ray when its owner dies (after 2 s with Ray
2.60, after a minute with 2.50). Of a dropped stream a finalizer in the caller's process tells.

All of it happens when a method is called, by Ray's invocation decorators: a handle is used as any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import ray
from ray.exceptions import RayError

from rollout_pool.background import TaskSet
from rollout_pool.call_order import CallOrder

Method = TypeVar("Method", bound=Callable[..., Any])
Invocation = Callable[[Any, dict[str, Any]], Any]

STREAM_AHEAD = 4
"""Groups of a stream that are on their way to a caller who has not asked for them yet."""
HAS_BACK_PRESSURE = tuple(map(int, ray.__version__.split(".")[:2])) >= (2, 60)
"""Whether Ray lets a stream of an asynchronous actor wait until its caller takes what there is."""


@dataclass(frozen=True, slots=True)
class Caller:
    """What comes with every call. ``note``: this is no call, but news of the one with this name."""

    process: str
    call: str
    life: tuple[Any, ...] = ()
    """The sign of life, within something so that Ray does not wait for it."""
    number: int | None = None
    """Among what this process asks of the pool; see :mod:`rollout_pool.call_order`."""
    note: Literal["lives", "left"] | None = None


def by_caller(method: Method) -> Method:
    """A method of a Ray actor that is told its caller, as keyword ``caller``."""
    method.__ray_invocation_decorator__ = _announced  # type: ignore[attr-defined]
    return method


def stream_by_caller(method: Method) -> Method:
    """The same for one that yields; it also waits for a caller who is slow, where Ray can."""
    if HAS_BACK_PRESSURE:
        method = ray.method(_generator_backpressure_num_objects=STREAM_AHEAD)(method)
    return by_caller(method)


def named_by_caller(method: Method) -> Method:
    """A method that is told its caller and answers at once."""
    method.__ray_invocation_decorator__ = _named  # type: ignore[attr-defined]
    return method


# In the caller's process

_numbers = Counter[Any]()
_numbers_lock = threading.Lock()


def _next_number(invocation: Any, arguments: Any, named: Any) -> int | None:
    """Of a call that is about to be made, counted for each pool. None where there is no order to keep: Ray
    holds back a call with an argument that is yet to be computed, and nothing should wait for that."""
    values = [*(arguments or ()), *(named or {}).values()]
    if any(isinstance(value, ray.ObjectRef) for value in values):
        return None
    try:  # Ray's invocation is a function in a method of the handle's method
        cells = dict(zip(invocation.__code__.co_freevars, invocation.__closure__, strict=True))
        pool = cells["self"].cell_contents._actor._actor_id
    except (AttributeError, KeyError, TypeError):
        return None
    with _numbers_lock:
        _numbers[pool] += 1
        return _numbers[pool]


def _named(invocation: Invocation) -> Invocation:
    def invoke(arguments: Any, named: dict[str, Any]) -> Any:
        number = _next_number(invocation, arguments, named)
        caller = Caller(ray.get_runtime_context().get_worker_id(), uuid.uuid4().hex, number=number)
        return invocation(arguments, {**(named or {}), "caller": caller})

    return invoke


def _announced(invocation: Invocation) -> Invocation:
    def invoke(arguments: Any, named: dict[str, Any]) -> Any:
        process, call = ray.get_runtime_context().get_worker_id(), uuid.uuid4().hex
        life = invocation(((),), {"caller": Caller(process, call, note="lives")})
        sign = life.completed() if isinstance(life, ray.ObjectRefGenerator) else life
        number = _next_number(invocation, arguments, named)
        result = invocation(arguments, {**(named or {}), "caller": Caller(process, call, (sign,), number)})
        if isinstance(result, ray.ObjectRefGenerator):
            news = (invocation, Caller(process, call, note="left"))
            weakref.finalize(result, _Farewells.put, news).atexit = False
        return result

    return invoke


class _Farewells:
    """Tells pools of streams that were dropped, from a thread: a finalizer may run anywhere, also where
    Ray must not be called."""

    _queue: queue.SimpleQueue[tuple[Invocation, Caller]] = queue.SimpleQueue()
    _thread: threading.Thread | None = None

    @classmethod
    def put(cls, news: tuple[Invocation, Caller]) -> None:
        cls._queue.put(news)
        if cls._thread is None:
            cls._thread = threading.Thread(target=cls._tell, name="rollout-pool-farewells", daemon=True)
            cls._thread.start()

    @classmethod
    def _tell(cls) -> None:
        while True:
            invocation, caller = cls._queue.get()
            with contextlib.suppress(Exception):  # Ray, or the pool, has ended: so has the stream
                invocation(((),), {"caller": caller})
            del invocation  # it holds the pool


# In the pool


class Callers:
    """Those whose calls a pool is answering. No call may be taken for over while its caller waits."""

    def __init__(self, tasks: TaskSet) -> None:
        self._tasks = tasks
        self._order = CallOrder()
        self._ends: dict[str, asyncio.Event] = {}
        self._leave: dict[str, Callable[[], None]] = {}

    async def hear(self, caller: Caller) -> None:
        """Take a note. That a caller lives takes as long as the call."""
        if caller.note == "left":
            self._left(caller)
        else:
            await self._ends.setdefault(caller.call, asyncio.Event()).wait()

    async def in_turn(self, caller: Caller | None) -> None:
        """Wait until what the caller's process asked for before has come."""
        if caller is not None:
            await self._order.wait(caller.process, caller.number)

    def attend(self, caller: Caller, leave: Callable[[], None]) -> None:
        """``leave`` is called when the caller is gone before :meth:`over`."""
        self._leave[caller.call] = leave
        self._tasks.start(self._watch(caller))

    def over(self, caller: Caller) -> None:
        """The call is answered."""
        self._leave.pop(caller.call, None)
        if (end := self._ends.pop(caller.call, None)) is not None:
            end.set()

    async def _watch(self, caller: Caller) -> None:
        try:
            await caller.life[0]
        except RayError:
            self._left(caller)

    def _left(self, caller: Caller) -> None:
        if (leave := self._leave.pop(caller.call, None)) is not None:
            leave()
