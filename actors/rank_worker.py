"""The workers of a tensor-parallel group: the first is told, tells the others, and draws for all.

Every operation of a :class:`~rollout_pool.actors.worker.Worker` is a few numbers. The leader sends them
to the followers, which do the same on their shards of the model and of the cache. Tokens are drawn once,
by the leader, and broadcast; so no rank ever depends on two ranks computing the same bits.

A decode step is one message (its code, the number of rows, the column they write, and what was moved
and freed since the last step) and one broadcast of ``[2, rows]`` numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch

from rollout_pool.actors.rank_group import RankGroup
from rollout_pool.actors.served_model import ServedModel, serve
from rollout_pool.actors.worker import UNSHARED, Draw, Worker
from rollout_pool.config import Dtype, EngineConfig, TensorParallelBackend
from rollout_pool.types import TokenIds

STOP, PREFILL, SEAT, DROP, REFILL, COMMIT, DECODE, MOVE, TRIM, FREE, CLEAR, SLEEP, WAKE = range(13)


class LeadingWorker(Worker):
    """Rank 0's worker: does what a worker does, and has the other ranks do it too."""

    def __init__(self, served: ServedModel, config: EngineConfig, group: RankGroup) -> None:
        super().__init__(served, config)
        self._group = group
        self._unsent: list[int] = []

    def prefill(self, group: int, tokens: Sequence[int] | TokenIds) -> int:
        self._tell(PREFILL, [group, *map(int, tokens)])
        self._send()
        return super().prefill(group, tokens)

    def compute_ahead(self, prompts: Sequence[TokenIds]) -> None:
        """Nothing: ranks compute one prompt at a time."""

    def seat(self, group: int, column: int, slots: Sequence[int], draw: Draw, shared: int = UNSHARED) -> None:
        self._tell(SEAT, [group, column, shared, *slots])
        self._send()
        super().seat(group, column, slots, self._shared(draw), shared)

    def refill(self, group: int, column: int, slots: Sequence[int]) -> None:
        self._tell(REFILL, [group, column, *slots])
        super().refill(group, column, slots)

    def commit(self, version: int) -> None:
        self._tell(COMMIT, [version])
        self._send()
        super().commit(version)

    def drop(self, group: int) -> None:
        self._tell(DROP, [group])
        super().drop(group)

    def decode(self, num_rows: int, longest: int, draw: Draw, kind: tuple[bool, ...] = ()) -> None:
        self._tell(DECODE, [num_rows, longest])
        self._send()
        super().decode(num_rows, longest, self._shared(draw), kind)

    def move(self, longest: int, moves: Sequence[tuple[int, int]]) -> None:
        self._tell(MOVE, [longest, *chain.from_iterable(moves)])
        super().move(longest, moves)

    def trim(self, num_rows: int, columns: int, length: int) -> None:
        self._tell(TRIM, [num_rows, columns, length])
        super().trim(num_rows, columns, length)

    def free(self, slots: Sequence[int]) -> None:
        self._tell(FREE, slots)
        super().free(slots)

    def clear(self, slots: Sequence[int]) -> None:
        self._tell(CLEAR, slots)
        super().clear(slots)

    def sleep(self, weights: bool = False) -> None:
        self._tell(SLEEP, [int(weights)])
        self._send()
        super().sleep(weights)

    def wake(self) -> None:
        self._tell(WAKE, [])
        self._send()
        super().wake()

    def close(self) -> None:
        """Let the followers end."""
        self._tell(STOP, [])
        self._send()
        super().close()

    def _tell(self, code: int, numbers: Sequence[int]) -> None:
        """Queue an operation; one that needs nothing from the others goes with the next that does."""
        self._unsent += (code, len(numbers), *numbers)

    def _send(self) -> None:
        message, self._unsent = self._unsent, []
        self._group.send(message)

    def _shared(self, draw: Draw) -> Draw:
        def draw_for_all(logits: torch.Tensor) -> torch.Tensor:
            drawn = draw(logits)
            self._group.share(drawn)
            return drawn

        return draw_for_all


def follow(
    model: str,
    config: EngineConfig,
    *,
    group: RankGroup,
    dtype: Dtype = "auto",
    backend: TensorParallelBackend = "transformers",
    trust_remote_code: bool = False,
    on_loaded: Callable[[Worker], None] = lambda _: None,
) -> None:
    """Be one of the other ranks: load this rank's shard, then do what rank 0 does, until it stops.

    Takes what rank 0's :class:`~rollout_pool.actors.engine.Engine` takes, and raises what that raises when
    the model cannot be loaded or served; afterwards
    :class:`~rollout_pool.actors.rank_group.RankLostError` when another rank is gone.
    """
    served = serve(
        model,
        config,
        tokenizer=None,
        dtype=dtype,
        device=None,
        trust_remote_code=trust_remote_code,
        group=group,
        backend=backend,
    )
    worker = Worker(served, config)
    on_loaded(worker)
    replay(worker, group)


def replay(worker: Worker, group: RankGroup) -> None:
    """Do on this rank what rank 0 does, until it stops. Raises when rank 0 is gone."""

    def receive(logits: torch.Tensor) -> torch.Tensor:
        drawn = torch.empty(2, logits.shape[0], dtype=torch.int64, device=logits.device)
        group.share(drawn)
        return drawn

    operations: dict[int, Callable[[list[int]], object]] = {
        PREFILL: lambda n: worker.prefill(n[0], n[1:]),
        SEAT: lambda n: worker.seat(n[0], n[1], n[3:], receive, n[2]),
        REFILL: lambda n: worker.refill(n[0], n[1], n[2:]),
        COMMIT: lambda n: worker.commit(n[0]),
        DROP: lambda n: worker.drop(n[0]),
        DECODE: lambda n: worker.decode(n[0], n[1], receive),
        MOVE: lambda n: worker.move(n[0], list(zip(n[1::2], n[2::2], strict=True))),
        TRIM: lambda n: worker.trim(*n),
        FREE: worker.free,
        CLEAR: worker.clear,
        SLEEP: lambda n: worker.sleep(bool(n[0])),
        WAKE: lambda _: worker.wake(),
    }
    with worker.runner.session():
        while True:
            for code, numbers in _operations(group.receive()):
                if code == STOP:
                    return
                operations[code](numbers)


def _operations(message: list[int]) -> Iterator[tuple[int, list[int]]]:
    start = 0
    while start < len(message):
        code, size = message[start : start + 2]
        yield code, message[start + 2 : start + 2 + size]
        start += 2 + size
