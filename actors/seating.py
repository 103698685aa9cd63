"""Who sits in which slot, and who is over, as far as the host knows.

Rows end on the device. The host takes a look at all of them every few steps, retires those that ended,
and fetches what they have; the device goes on meanwhile. A row that ended before the host knows it
draws on, and nothing of that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from rollout_pool.actors.readback import HostArray, Readback
from rollout_pool.actors.rows import BROKEN, Generated, Look, Rows
from rollout_pool.actors.running import Running, Seat
from rollout_pool.actors.worker import Worker

NEVER = -1


class Seating:
    """The seats of one engine.

    ``on_free`` is told the slots of samples that are over, at once; ``on_sample`` gets each such seat
    with what it generated, when that has arrived, and whether it was aborted.
    """

    def __init__(
        self,
        rows: Rows,
        worker: Worker,
        look_every: int,
        on_free: Callable[[Sequence[int]], None],
        on_sample: Callable[[Seat, Generated, bool], None],
    ) -> None:
        self.seats: dict[int, Seat] = {}
        self.step = 0
        """Decode steps so far."""
        self.num_drawn = 0
        """Tokens that count, as of the last look."""
        self.readback = Readback()
        self._rows, self._worker = rows, worker
        self._look_every = look_every
        self._on_free, self._on_sample = on_free, on_sample

    @property
    def has_rows_to_decode(self) -> bool:
        """False when nobody sits, or all have used up their budgets and only wait to be retired."""
        return any(self.step < seat.last_step for seat in self.seats.values())

    @property
    def longest(self) -> int:
        """The largest column that the next decode step writes, where rows begin in column 0."""
        return max(seat.column(self.step) for seat in self.seats.values())

    def sit(self, seats: Iterable[Seat]) -> None:
        """Samples that were just admitted."""
        self.seats.update({seat.slot: seat for seat in seats})

    def of(self, running: Running) -> list[Seat]:
        """The seats of one group."""
        return [seat for seat in self.seats.values() if seat.running is running]

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Rows moved (source, target)."""
        for before, after in moves:
            seat = self.seats[after] = self.seats.pop(before)
            seat.slot = after
            seat.running.stays.move(seat.sample_index, after)

    def stepped(self) -> None:
        """A decode step was started. Take a look if one is due or somebody is known to end with it."""
        self.step += 1
        is_due = self.step % self._look_every == 0
        if is_due or any(seat.watch or seat.last_step == self.step for seat in self.seats.values()):
            self.look()

    def look(self) -> None:
        """Let the host know, now or some steps later, which rows have ended by this step."""
        self.readback.start(self._rows.look(), self.step, partial(self._see, dict(self.seats)))

    def deliver(self) -> None:
        """Handle what has arrived; what is older than one interval of looks is waited for."""
        self.readback.deliver(self.step - self._look_every)

    def deliver_ready(self) -> None:
        """Handle what has arrived, and wait for nothing."""
        self.readback.deliver(NEVER)

    def wait(self) -> None:
        """Wait once for what is on its way now."""
        self.readback.deliver(self.step)

    def settle(self) -> None:
        """Wait until the host knows all there is to know, and has it."""
        self.look()
        while len(self.readback):
            self.wait()

    def retire(self, seats: Sequence[Seat], aborted: bool = False) -> None:
        """These samples are over: free their slots, and fetch what they have."""
        if not seats:
            return
        slots = [seat.slot for seat in seats]
        width = max(seat.num_drawn(self.step) for seat in seats)
        results = self._rows.results(slots, width)
        self.readback.start(results, self.step, partial(self._store, seats, aborted))
        self._worker.free(slots)
        self._rows.release(slots)
        for seat in seats:
            seat.is_over = True
            seat.running.stays.end(seat.sample_index)
            del self.seats[seat.slot]
        self._on_free(slots)

    def generated_by(self, seats: Sequence[Seat]) -> list[Generated]:
        """What each has drawn so far. Waits for the device."""
        if not seats:
            return []
        width = max(seat.num_drawn(self.step) for seat in seats)
        arrived: list[HostArray] = []
        self.readback.start(
            self._rows.results([seat.slot for seat in seats], width), self.step, arrived.append
        )
        while not arrived:
            self.wait()
        return [Generated.unpack(row) for row in arrived[0]]

    def _see(self, seats: dict[int, Seat], table: HostArray) -> None:
        """Retire the rows that ended, and those whose text now holds a stop string."""
        look = Look.unpack(table)
        self.num_drawn = look.drawn
        over, broken = [], []
        for slot, seat in seats.items():
            if seat.is_over:
                continue  # since that look was taken
            if look.ended[slot] or seat.watch is not None:
                is_stopped = seat.has_stop_string(look.counts[slot], look.last_tokens[slot])
                if is_stopped or look.ended[slot]:
                    over.append(seat)
            if look.ended[slot] == BROKEN:
                broken.append(seat.slot)
        self.retire(over)
        if broken:
            self._worker.clear(broken)

    def _store(self, seats: Sequence[Seat], aborted: bool, results: HostArray) -> None:
        for seat, row in zip(seats, results, strict=True):
            self._on_sample(seat, Generated.unpack(row, seat.stopped_at), aborted)
