"""A trainer that is a Ray actor, as a source of weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollout_pool.actors.weight_packing import DEFAULT_BUCKET_BYTES
from rollout_pool.actors.weight_records import Bucket, Manifest


class WeightSource:
    """Mixed into a trainer's class, so that its handle can be given to ``pool.sync_weights``::

        @ray.remote
        class Trainer(WeightSource):
            def rollout_weights(self):
                return self.engine        # a model, a DeepSpeed engine, a state dict, ...

        ray.get(pool.sync_weights.remote(trainer))

    Of a trainer with several ranks, the handles of all of them are given, the first rank's first.
    """

    def rollout_weights(self) -> Any:
        """What to send: whatever :func:`rollout_pool.weight_sync.ship` takes."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its weights are")

    def weight_buckets(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Iterator[Bucket | Manifest]:
        """The buckets, and at last the manifest; a generator, so that each is sent while the next is made."""
        from rollout_pool.weight_sync.shipment import packed
        from rollout_pool.weight_sync.sources import open_source

        yield from packed(open_source(self.rollout_weights(), bucket_bytes))
