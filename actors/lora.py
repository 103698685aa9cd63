"""LoRA adapters merged into the weights that serve; only the adapters are sent.

A merge is always base + adapters, with the base as it was before any merge: ``W += new - old`` would
round at every sync. So the base of every weight that an adapter touches is kept, in host memory and in the
weight's own dtype, from the first merge until the next full update.

Source: LoRA (Hu et al., 2021), W = W0 + scaling * B A.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from rollout_pool.actors.checksums import checksum
from rollout_pool.actors.weight_places import Part, Place, write
from rollout_pool.actors.weight_records import LoraRecord


class LoraBases:
    """The weights under the adapters."""

    def __init__(self) -> None:
        self._bases: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        return sum(base.nbytes for base in self._bases.values())

    def get(self, place: Place) -> torch.Tensor:
        """What is in a place, without adapters."""
        return self._bases.get(place.name, place.tensor)

    def forget(self) -> None:
        """All weights are about to be replaced."""
        self._bases.clear()

    def merge(
        self,
        loras: Sequence[LoraRecord],
        factors: Mapping[str, torch.Tensor],
        parts: Mapping[str, Part],
        places: Mapping[str, Place],
    ) -> dict[str, str]:
        """Make every weight base + adapters, or base, or the value in ``parts``; in place.

        factors: A and B by their names. parts: weights that were trained as a whole, by place. Returns
        the checksums of the places that were written.
        """
        by_alias = {alias: place for place in places.values() for alias in place.aliases}
        targets: dict[str, list[LoraRecord]] = {}
        for lora in loras:
            targets.setdefault(by_alias[lora.target].name, []).append(lora)
        for name in (*targets, *parts):
            if name not in self._bases:
                self._bases[name] = places[name].tensor.to("cpu", copy=True)
        sums = {}
        for name, base in self._bases.items():
            place, part = places[name], parts.get(name)
            if part is None:
                merged = _merged(place, base, targets.get(name, ()), factors)
                part = Part(merged, checksum(merged))
            sums[name] = write(place, part)
        return sums

    @staticmethod
    def faults(
        lora: LoraRecord, factors: Mapping[str, torch.Tensor], places: Mapping[str, list[Place]]
    ) -> Iterator[str]:
        """What keeps an adapter from being merged."""
        found = places.get(lora.target, [])
        if not found:
            yield f"{lora.target} has an adapter, but is not a weight of this model"
            return
        place = found[0]
        if len(place.aliases) > 1:
            yield f"{lora.target} has an adapter, but is tied: {', '.join(sorted(place.aliases))}"
        a, b = factors.get(lora.a), factors.get(lora.b)
        if a is None or b is None:
            return  # lost or damaged, which has been said
        for name, factor in ((lora.a, a), (lora.b, b)):
            if not factor.is_floating_point():
                yield f"{name} is {str(factor.dtype).removeprefix('torch.')}, not a float"
            elif not bool(torch.isfinite(factor).all()):
                yield f"{name} holds NaN or infinity"
        shape = place.full_shape[::-1] if lora.is_transposed else place.full_shape
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or (b.shape[0], a.shape[1]) != shape:
            yield f"{lora.a} {list(a.shape)} and {lora.b} {list(b.shape)} do not make {list(shape)}"


def _merged(
    place: Place, base: torch.Tensor, loras: Sequence[LoraRecord], factors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """In the weight's dtype, rounded once; sums are float32, or float64 for float64 weights."""
    weight = place.tensor
    value = base.to(weight.device)
    if not loras:
        return value
    high = torch.promote_types(weight.dtype, torch.float32)
    total = value.to(high)
    for lora in loras:
        a, b = (factors[name].to(weight.device, high) for name in (lora.a, lora.b))
        delta = (b @ a) * lora.scaling
        total = total + place.part(delta.t() if lora.is_transposed else delta)
    return total.to(weight.dtype)
