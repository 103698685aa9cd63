"""Who takes part: under which name, made by what, in which environment, with which numbers of rows."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from speed.work import Peer, Work

DEEPSPEED_PYTHON = Path(__file__).resolve().parents[2] / ".venv-deepspeed" / "bin" / "python"


@dataclass(frozen=True)
class Entry:
    """One way to roll out."""

    title: str
    maker: str
    """``module:function`` in this folder, a :data:`Peer`."""
    tries: tuple[int, ...] = (1,)
    """Rows to try in the first round: the work's most, divided by these."""
    most: int | None = None
    """Of more rows it is known to be slower, so they are not tried."""
    needs_deepspeed: bool = False
    is_ours: bool = False
    uses_ray: bool = False
    """It is started anew for every round: the processes of a cluster are never quite idle."""

    def rows(self, work: Work) -> list[int]:
        """The numbers of rows to try."""
        top = min(work.max_rows, work.num_samples, self.most or work.max_rows)
        return list(dict.fromkeys(max(1, top // part) for part in self.tries))

    def load(self) -> Peer:
        """The function that makes it; imports what it needs."""
        module, _, name = self.maker.partition(":")
        return cast(Peer, getattr(importlib.import_module(f"speed.{module}"), name))


PEERS = {
    "engine": Entry("ours: one engine", "our_peers:engine", is_ours=True),
    "generate": Entry("Transformers `generate`", "hf_peers:generate", tries=(1, 2)),
    "generate_batch": Entry(
        "Transformers `generate_batch`", "hf_peers:generate_batch", tries=(1, 2), most=64
    ),
    "pool": Entry("ours: a pool of one actor", "our_peers:pool_of_one", is_ours=True, uses_ray=True),
    "pool of two": Entry(
        "ours: a pool of two actors, half the threads each",
        "our_peers:pool_of_two",
        is_ours=True,
        uses_ray=True,
    ),
    "split engines": Entry(
        "ours, split beforehand among processes",
        "split_peers:split_engines",
        is_ours=True,
        uses_ray=True,
    ),
    "split generate": Entry(
        "Ray, `generate` per core, split beforehand", "split_peers:split_generate", uses_ray=True
    ),
    "deepspeed": Entry("DeepSpeed, default", "deepspeed_peers:default", tries=(1, 2), needs_deepspeed=True),
    "deepspeed shared prefill": Entry(
        "DeepSpeed, shared prefill", "deepspeed_peers:shared_prefill", needs_deepspeed=True
    ),
    "deepspeed continuous": Entry(
        "DeepSpeed, continuous", "deepspeed_peers:continuous", tries=(1, 2), needs_deepspeed=True
    ),
    "deepspeed aligned": Entry(
        "DeepSpeed, continuous, aligned and trimmed",
        "deepspeed_peers:aligned",
        tries=(1, 2),
        needs_deepspeed=True,
    ),
}
OURS = "engine"
OUR_WAYS = {OURS: "one engine", "pool of two": "a pool of two"}
"""What others are compared with, and how it is called above a column."""
