"""Prompts whose KV is kept once for all rows that go on from them, and what those rows do in a step.

A row's slot then holds only what it drew itself: column 0 is the position after its prompt. Attention to the
prompt is computed for all rows of a group together, and added to that over the row's own cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

import torch

from rollout_pool.actors.prefix import Prefix
from rollout_pool.errors import UnsupportedModelError
from rollout_pool.kernels import ops

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A model's rule: whether (batch, head, query position, key position) is seen."""


class SharedStep:
    """What the layers need to know of shared prompts, while nobody sits down or gets up.

    lengths: int64 ``[rows]``, of every row's prompt; 0 where it shares none. layers: by the address of a slot
    layer's keys, the keys and the values of that layer in every prompt. apart: see
    :func:`rollout_pool.kernels.prefix_reference.prefix_attention`.
    """

    def __init__(
        self,
        groups: ops.PrefixRows,
        lengths: torch.Tensor,
        longest: int,
        layers: Mapping[int, tuple[list[torch.Tensor], list[torch.Tensor]]],
        apart: bool,
    ) -> None:
        self.groups = groups
        self.lengths = lengths
        self._longest = longest
        self._layers = layers
        self._apart = apart
        self._seen: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}

    def begin(self) -> None:
        """A step starts: masks of the one before are of no use."""
        self._seen.clear()

    def see(
        self,
        mask_function: MaskFunction,
        rows: torch.Tensor,
        query_position: torch.Tensor,
        mask: torch.Tensor,
    ) -> None:
        """Find out how much of its prompt each row sees under the rule that ``mask`` came of.

        rows, query_position: int64 ``[rows, 1, 1, 1]``. What is seen must be the prompt's end, as it is under
        causal, sliding and chunked rules.
        """
        head = torch.zeros_like(rows[:1])
        lengths = self.lengths.view(-1, 1, 1, 1)
        seen: torch.Tensor | None = None
        # On a GPU the question would stop the device; there the kernel gets the numbers.
        if not rows.is_cpu or not self._all_see_the_first(mask_function, rows, head, query_position, lengths):
            positions = torch.arange(self._longest, device=rows.device).view(1, 1, 1, -1)
            visible = mask_function(rows, head, query_position, positions) & (positions < lengths)
            seen = visible.expand(rows.shape[0], 1, 1, -1).sum(dim=-1).flatten()
        self._seen[mask.data_ptr()] = seen, mask  # kept, so that no other mask gets its address

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        mask: torch.Tensor,
        scaling: float,
        softcap: float | None,
    ) -> ops.Prior:
        """Attention of all rows to their prompts, in the layer whose slots' keys are ``keys``."""
        layer, seen = self._layers.get(keys.data_ptr()), self._seen.get(mask.data_ptr())
        if layer is None or seen is None:
            what, source = ("keys", "cache gave it") if layer is None else ("a mask", "rules made")
            raise UnsupportedModelError(f"it attends with other {what} than its {source}")
        return ops.prefix_attention(
            query, *layer, self.groups, scaling=scaling, softcap=softcap, seen=seen[0], apart=self._apart
        )

    def _all_see_the_first(
        self,
        mask_function: MaskFunction,
        rows: torch.Tensor,
        head: torch.Tensor,
        query_position: torch.Tensor,
        lengths: torch.Tensor,
    ) -> bool:
        """Whether every row sees the first cell of its prompt, and so all of it."""
        first = mask_function(rows, head, query_position, torch.zeros_like(head))
        return bool((first | (lengths == 0)).all())


class SharedPrefixes:
    """The prompts that a worker holds: for samples that wait for a slot, and for rows that share them."""

    def __init__(self, num_slots: int, device: torch.device, apart: bool) -> None:
        self.lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """Tokens of each slot's row that are in a shared prompt."""
        self._apart = apart
        self._prefixes: dict[int, Prefix] = {}
        self._waiting: set[int] = set()
        self._owners: dict[int, int] = {}  # by slot
        self._step: SharedStep | None = None

    def __getitem__(self, number: int) -> Prefix:
        return self._prefixes[number]

    @property
    def is_any(self) -> bool:
        """Whether some row shares a prompt."""
        return bool(self._owners)

    @property
    def num_bytes(self) -> int:
        """KV of the prompts that rows share now; a prompt that two groups have in common counts once."""
        prefixes = {id(prefix): prefix for prefix in map(self.__getitem__, self._owners.values())}
        return sum(prefix.kv_bytes for prefix in prefixes.values())

    def hold(self, number: int, prefix: Prefix) -> None:
        """Keep a prompt under a number, until it is dropped. Rows that share that number's go over to it."""
        self._prefixes[number] = prefix
        self._waiting.add(number)
        self._step = None

    def drop(self, number: int) -> None:
        """Nobody waits for this prompt any more; rows that share it still have it."""
        self._waiting.discard(number)
        self._forget_unused([number])

    def seat(self, number: int, slots: Sequence[int], at: torch.Tensor) -> None:
        """Rows in ``slots`` share this prompt from now on; ``at`` are the same slots on the device."""
        self._owners.update(dict.fromkeys(slots, number))
        self.lengths[at] = self._prefixes[number].length
        self._step = None

    def length_at(self, slot: int) -> int:
        """Tokens of this slot's row that are in a shared prompt."""
        return self._prefixes[self._owners[slot]].length if slot in self._owners else 0

    def move(self, moves: Iterable[tuple[int, int]]) -> None:
        """Rows moved (source, target), none of which is both; their lengths are moved by the worker."""
        for source, target in moves:
            if source in self._owners:
                self._owners[target] = self._owners.pop(source)
        self._step = None

    def free(self, slots: Iterable[int]) -> None:
        """These slots hold nobody any more."""
        numbers = {self._owners.pop(slot) for slot in slots if slot in self._owners}
        self._forget_unused(numbers)
        self._step = None

    def clear(self) -> None:
        """Forget all prompts."""
        self._prefixes.clear()
        self._waiting.clear()
        self._owners.clear()
        self._step = None

    def step(self, num_rows: int, addresses: Callable[[], Mapping[int, int]]) -> SharedStep | None:
        """What the first ``num_rows`` rows, all that live among them, share in a step; None: nothing.

        addresses: gives those of the keys of each attention layer's slots, by the layer's index.
        """
        if not self._owners:
            return None
        if self._step is None or self._step.lengths.shape[0] != num_rows:
            self._step = self._make_step(num_rows, addresses())
        self._step.begin()
        return self._step

    def _make_step(self, num_rows: int, addresses: Mapping[int, int]) -> SharedStep:
        members: dict[int, list[int]] = {}
        for slot in sorted(self._owners):
            members.setdefault(self._owners[slot], []).append(slot)
        prefixes = [self._prefixes[number] for number in members]
        slots = [slot for group in members.values() for slot in group]
        starts = accumulate(map(len, members.values()), initial=0)
        groups = ops.PrefixRows(ops.upload(slots, self.lengths.device), tuple(starts), tuple(slots))
        layers = {
            address: ([p.layer(index).keys for p in prefixes], [p.layer(index).values for p in prefixes])
            for index, address in addresses.items()
        }
        longest = max(prefix.length for prefix in prefixes)
        return SharedStep(groups, self.lengths[:num_rows], longest, layers, self._apart)

    def _forget_unused(self, numbers: Iterable[int]) -> None:
        used = self._waiting.union(self._owners.values())
        for number in numbers:
            if number not in used:
                self._prefixes.pop(number, None)
