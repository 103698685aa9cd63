"""What the pool asks of the ranks of one actor in the course of a sync."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ray.exceptions import RayError, RayTaskError

from rollout_pool.actors.weight_records import Manifest, WeightReceipt
from rollout_pool.errors import WeightSyncError

if TYPE_CHECKING:
    from rollout_pool.actors.tensor_parallel import RankActors
    from rollout_pool.recovery import Member

Kv = Literal["recompute", "keep"]

ANSWER_TIMEOUT_S = 10.0
"""For an actor to show that a call that failed was not its fault."""


@dataclass(frozen=True, slots=True)
class Update:
    """A version that was decided, kept in Ray's object store for actors that are started later."""

    version: int
    manifest: Manifest
    buckets: tuple[Any, ...] | None
    """None: they went from the trainer's memory into the actors', who have the only copies."""


async def install(ranks: RankActors, update: Update, attempt: int) -> None:
    version, handles = update.version, ranks.handles
    assert update.buckets is not None
    for bucket in update.buckets:
        await asyncio.gather(*(rank.stage_weights.remote(version, bucket, attempt) for rank in handles))
    await asyncio.gather(*(rank.check_weights.remote(version, update.manifest, attempt) for rank in handles))
    await write(ranks, update, "recompute")


async def write(ranks: RankActors, update: Update, kv: Kv) -> list[WeightReceipt]:
    """Rank 0 makes all ranks write, in one step of its engine. Every rank must have what was sent."""
    leader, *followers = ranks.handles
    receipts = await asyncio.gather(
        leader.commit_weights.remote(update.version, kv),
        *(follower.weight_receipt.remote(update.version) for follower in followers),
    )
    for rank, receipt in enumerate(receipts):
        if (receipt.version, receipt.checksum) != (update.version, update.manifest.checksum):
            raise WeightSyncError(f"rank {rank} has version {receipt.version}, {receipt.checksum}")
    return [dataclasses.replace(receipt, rank=rank) for rank, receipt in enumerate(receipts)]


async def lives(member: Member) -> bool:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await member.ranks.progress()
    except (RayError, TimeoutError):
        return False
    return True


def reason(error: BaseException) -> str:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return " ".join(str(cause).split())[:300] or type(cause).__name__
