"""Decode steps that are recorded once per batch size and replayed: CUDA graphs, behind a small interface.

A replay runs the device's work of a step and none of its Python. So a step reads and writes tensors that
stay where they are (the weights, the slot cache, the state of the rows) and advances positions and
counters itself, on the device: a number that Python holds would be the recording's for ever.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

T = TypeVar("T")

StepKey = tuple[int, *tuple[Hashable, ...]]
"""What tells recordings apart: the number of rows first, then whatever else changes a step's work."""


@dataclass(frozen=True)
class Recorded(Generic[T]):
    """What became of a step that was run and recorded."""

    result: T
    """Of the run that came with the recording."""
    replay: Callable[[], T] | None
    """Runs the step once more; it returns the same tensors every time. None: it can't be recorded."""
    fault: str = ""
    """Why it can't be recorded."""


class Recorder(Protocol):
    """How steps are recorded: as CUDA graphs, not at all, or as a list of operations."""

    def record(self, step: Callable[[], T]) -> Recorded[T]:
        """Run ``step``, whose effects happen exactly once, and record it. An error of the run is raised."""

    def clear(self) -> None:
        """All recordings have been dropped."""


class EagerRecorder:
    """Records nothing: a replay is a call of the step that was given first."""

    def record(self, step: Callable[[], T]) -> Recorded[T]:
        return Recorded(step(), step)

    def clear(self) -> None:
        """Nothing is held."""


class CudaRecorder:
    """Records steps as CUDA graphs whose memory is one pool.

    The run that comes with a recording is the warm-up that a capture needs: it compiles kernels and
    fills caches, on the stream of the capture, because a table or a workspace may be kept per stream. It
    is also the step that was asked for. A capture computes nothing, so no state has to be put back.

    As all graphs share a pool, the tensors that a replay returns are valid until the next replay on the
    same stream; copies made on that stream keep them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], T]) -> Recorded[T]:
        with torch.cuda.device(self._device):
            self._stream.wait_stream(caller := torch.cuda.current_stream())
            # This context also restores the stream after a failed capture, which torch's own (2.13) does not.
            with torch.cuda.stream(self._stream):
                result, fault = run_and_find_waits(step)
                caller.wait_stream(self._stream)
                if fault:  # a capture would fail there
                    return Recorded(result, None, fault)
                return self._capture(step, result)

    def clear(self) -> None:
        """The next graphs get a pool of their own: one that has lost all its graphs is not used again."""
        self._pool = torch.cuda.graph_pool_handle()

    def _capture(self, step: Callable[[], T], result: T) -> Recorded[T]:
        graph = torch.cuda.CUDAGraph()
        fault: Exception | None = None
        try:
            # "thread_local": what other threads do (a trainer, NCCL's watchdog) does not end the capture.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                try:
                    outputs = step()
                except Exception as error:
                    fault = error  # the end of the capture raises another error that hides this one
                    raise
        except Exception as error:  # the step ran a moment ago: it can't bear the capture
            self._end_allocation()
            reason = fault or error
            return Recorded(result, None, f"{type(reason).__name__}: {reason}".splitlines()[0])

        def replay() -> T:
            graph.replay()
            return outputs

        return Recorded(result, replay)

    def _end_allocation(self) -> None:
        """Before 2.12, torch leaves its allocator capturing when a capture fails; later this raises."""
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)


def run_and_find_waits(step: Callable[[], T]) -> tuple[T, str]:
    """The result of ``step``, and the place where it first waited for the GPU, if it did."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            result = step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    for warning in caught:
        if "ynchroniz" not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return result, f"{waits[0].filename}:{waits[0].lineno} waits for the GPU" if waits else ""


class GraphedStep:
    """Runs steps by replaying recordings, one per key; makes a recording when a key is new.

    Args:
        recorder: how steps are recorded.
        weights: the tensors that steps read or write where they are, and that need no saving: KV,
            recurrent states, those of :class:`rollout_pool.actors.model_tensors.ModelTensors`.
        state: the rest of what steps change: positions, counters, tokens.

    When one of these tensors is another than before, or lies elsewhere, all recordings are dropped. After
    a step that can't be recorded, nothing more is: with one warning, what has no recording runs eagerly.
    """

    def __init__(
        self,
        recorder: Recorder,
        weights: Callable[[], Iterable[torch.Tensor]],
        state: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        self._recorder, self._weights, self._state = recorder, weights, state
        self._recordings: dict[StepKey, Callable[[], Any]] = {}
        self._places: object = None
        self.is_eager = False
        """A step could not be recorded; no more recordings are made."""
        self.num_recordings = 0
        self.num_replays = 0

    def __call__(self, key: StepKey, step: Callable[[], T]) -> T:
        """Run the step of ``key`` once; ``step`` does so eagerly, and is called to record it.

        The tensors returned are valid until the next call.
        """
        if self.is_eager and not self._recordings:
            return step()
        places = self._find_places()
        if places != self._places:
            self.invalidate()
            self._places = places
        replay: Callable[[], T] | None = self._recordings.get(key)
        if replay is not None:
            self.num_replays += 1
            return replay()
        return step() if self.is_eager else self._record(key, step)

    def prepare(self, steps: Mapping[StepKey, Callable[[], Any]]) -> None:
        """Record every step, the largest batch first, whose memory then serves the smaller ones too.

        The steps run, but the state is afterwards what it was. No row may be live: what steps write
        elsewhere (KV, recurrent states) stays.
        """
        with kept(self._state()):
            for key, step in sorted(steps.items(), key=lambda item: item[0][0], reverse=True):
                self(key, step)

    def invalidate(self) -> None:
        """Drop all recordings."""
        if self._recordings:
            self._recordings.clear()
            self._recorder.clear()

    def _record(self, key: StepKey, step: Callable[[], T]) -> T:
        recorded = self._recorder.record(step)
        if recorded.replay is not None:
            self._recordings[key] = recorded.replay
            self.num_recordings += 1
        else:
            self.is_eager = True
            warnings.warn(
                f"decode steps are not recorded as CUDA graphs, and run eagerly: {recorded.fault}",
                RuntimeWarning,
                stacklevel=3,
            )
        return recorded.result

    def _find_places(self) -> object:
        """Where all tensors lie. Every step compares it: under 0.1 ms for 300 weights."""
        state = [(tensor.data_ptr(), tensor.shape) for tensor in self._state()]
        return list(map(torch.Tensor.data_ptr, self._weights())), state


@contextmanager
def kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """What ``tensors`` hold now, they hold again on the way out, in place."""
    with torch.inference_mode():
        saved = [(tensor, tensor.clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.inference_mode():
            for tensor, value in saved:
                tensor.copy_(value)
