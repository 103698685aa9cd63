"""What every peer is given, and what it says of a round. Needs nothing but Python.

So it can be read in any environment: DeepSpeed's peers run in one of their own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Work:
    """Prompts and how they are to be sampled: the same for all peers."""

    name: str
    model: str
    """A folder in Hugging Face format."""
    prompts: list[list[int]]
    n: int
    max_new: int
    """Tokens that a sample may have; what ends it earlier is ``eos``."""
    max_rows: int
    """Samples that a peer may compute at once, in all its processes together."""
    temperature: float = 1.0
    eos: list[int] = dataclasses.field(default_factory=list)
    """Ids that end a sample; none: every sample has ``max_new`` tokens."""
    own_code: bool = False
    """The model's folder brings code of its own."""
    threads: int = 1
    dtype: str = "float32"
    """Of weights and KV, as torch calls it."""

    @property
    def num_samples(self) -> int:
        return len(self.prompts) * self.n

    @property
    def max_length(self) -> int:
        """Of the longest row: its prompt and its new tokens."""
        return max(map(len, self.prompts)) + self.max_new

    def count(self, token_ids: Iterable[int]) -> int:
        """Tokens of one sample up to the one that ended it; what stands after it is padding."""
        number = 0
        for token in token_ids:
            number += 1
            if token in self.eos:
                break
        return min(number, self.max_new)

    def part(self, prompts: Sequence[Sequence[int]], **changes: object) -> Work:
        """The same with other prompts."""
        return dataclasses.replace(self, prompts=[list(prompt) for prompt in prompts], **changes)  # type: ignore[arg-type]

    def warm_up(self) -> Work:
        """A little of it: what is done once is done before the first round."""
        shortest = sorted(self.prompts, key=len)[:2]
        return self.part(shortest, n=min(2, self.n), max_new=min(4, self.max_new))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Work:
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Done:
    """What a peer made in one round."""

    samples: int
    tokens: int
    first_group_s: float
    """From the start of the round until all samples of some prompt were there."""
    sum_of_rates: float | None = None
    """Tokens per second of each of its processes for as long as that one worked, added up."""


Peer = Callable[[Work, int], Callable[[Work], Done]]
"""Makes a peer ready for a work at so many rows at once; the result runs rounds of that work."""


class Unavailable(Exception):
    """This peer cannot do this work here; the message says why."""


def left_padded(prompts: Sequence[Sequence[int]], pad: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids and mask of a batch whose prompts end in one column."""
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    return ids, [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
