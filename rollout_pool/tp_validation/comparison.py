"""Two runs side by side: differences of numbers, the first tokens that differ, bits that differ by rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollout_pool.actors.rank_records import Share, TopTwo
from rollout_pool.types import RolloutGroup

Numbers = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two arrays; those of several pairs add up to one."""

    largest: float = 0.0
    total: float = 0.0
    count: int = 0

    @classmethod
    def of(cls, got: Numbers, expected: Numbers) -> Difference:
        """Absolute. A number that is nan or infinite on one side only differs by inf."""
        return cls._of(got, expected, np.ones(expected.shape))

    @classmethod
    def relative(cls, got: Numbers, expected: Numbers) -> Difference:
        """Of vectors ``[..., n]``, each element's over its size plus the root mean square of its vector.

        So neither a few huge elements, which hidden states have, nor elements near zero decide alone.
        """
        wide = np.abs(expected.astype(np.float64))
        scale = wide + np.sqrt(np.mean(np.square(wide), axis=-1, keepdims=True))
        return cls._of(got, expected, np.where(scale > 0, scale, 1.0))

    @classmethod
    def _of(cls, got: Numbers, expected: Numbers, scale: Numbers) -> Difference:
        if got.shape != expected.shape:
            return cls(float("inf"), float("inf"), max(got.size, expected.size))
        equal = (got == expected) | (np.isnan(got) & np.isnan(expected))
        with np.errstate(invalid="ignore"):
            difference = np.abs(got.astype(np.float64) - expected) / scale
        difference = np.where(equal, 0.0, np.nan_to_num(difference, nan=np.inf, posinf=np.inf))
        difference[~equal & ~(np.isfinite(got) & np.isfinite(expected))] = np.inf
        largest = float(difference.max()) if difference.size else 0.0
        return cls(largest, float(difference.sum()), difference.size)

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            max(self.largest, other.largest), self.total + other.total, self.count + other.count
        )

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that two runs of one prompt do not share."""

    prompt: int
    sample: int
    position: int
    """Counts the completion's tokens from 0."""
    tokens: tuple[int | None, int | None]
    """Of the run and of the reference; None where one had ended."""
    run: TopTwoAt | None = None
    reference: TopTwoAt | None = None

    @property
    def gap(self) -> float:
        """Of the two largest logits, in the run where it is wider: small means that it was a tie."""
        gaps = [at.gap for at in (self.run, self.reference) if at is not None]
        return max(gaps, default=float("inf"))

    def describe(self) -> str:
        """One line for a person."""
        mine, other = ("no token" if token is None else f"token {token}" for token in self.tokens)
        text = f"prompt {self.prompt}, sample {self.sample}, position {self.position}: {mine}, not {other}"
        for name, at in (("here", self.run), ("on a single rank", self.reference)):
            if at is not None:
                text += f"; {name} {at.describe()}"
        return text


@dataclass(frozen=True, slots=True)
class TopTwoAt:
    """The two largest logits at one token, largest first."""

    token_ids: tuple[int, int]
    logits: tuple[float, float]

    @property
    def gap(self) -> float:
        gap = self.logits[0] - self.logits[1]
        return gap if gap >= 0 else float("inf")  # nan as well

    def describe(self) -> str:
        (first, second), (high, low) = self.token_ids, self.logits
        return f"{high:.6g} for {first} and {low:.6g} for {second}, a gap of {self.gap:.2e}"


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first position where two sequences differ, or where the shorter one ends; None if equal."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def divergences(run: Iterable[RolloutGroup], reference: Iterable[RolloutGroup]) -> list[Divergence]:
    """Where each sample of a run first differs from the reference's; one entry per such sample."""
    found = []
    for got, expected in zip(run, reference, strict=True):
        pairs = zip(got.samples, expected.samples, strict=False)
        for mine, other in pairs:
            left, right = mine.token_ids.tolist(), other.token_ids.tolist()
            position = first_difference(left, right)
            if position is not None:
                tokens = (_at(left, position), _at(right, position))
                found.append(Divergence(got.index, mine.sample_index, position, tokens))
        for number in range(len(got.samples), len(expected.samples)):
            found.append(Divergence(got.index, number, 0, (None, int(expected.samples[number].token_ids[0]))))
    return found


def located(divergence: Divergence, run: TopTwo, reference: TopTwo) -> Divergence:
    """With the logits of both runs at that token: up to there they have seen the same tokens."""
    return Divergence(
        divergence.prompt,
        divergence.sample,
        divergence.position,
        divergence.tokens,
        _top_two_at(run, divergence.position),
        _top_two_at(reference, divergence.position),
    )


def agreement(run: Iterable[RolloutGroup], reference: Iterable[RolloutGroup]) -> tuple[int, int]:
    """How many tokens come before the first difference of their sample, and how many there are in all."""
    same = total = 0
    for got, expected in zip(run, reference, strict=True):
        for number, other in enumerate(expected.samples):
            right = other.token_ids.tolist()
            left = got.samples[number].token_ids.tolist() if number < len(got.samples) else []
            position = first_difference(left, right)
            same += len(right) if position is None else position
            total += len(right)
    return same, total


def logprob_difference(run: Iterable[RolloutGroup], reference: Iterable[RolloutGroup]) -> Difference:
    """Of the tokens that both runs share from their sample's beginning on."""
    found = Difference()
    for got, expected in zip(run, reference, strict=True):
        for mine, other in zip(got.samples, expected.samples, strict=False):
            position = first_difference(mine.token_ids.tolist(), other.token_ids.tolist())
            found += Difference.of(mine.logprobs[:position], other.logprobs[:position])
    return found


def odd_ranks(checksums: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """By name, the ranks whose bits are not those of most ranks (of the lowest rank, when even)."""
    found: dict[str, list[int]] = {}
    for name in checksums[0] if checksums else ():
        values = [one.get(name, "") for one in checksums]
        usual, _ = Counter(values).most_common(1)[0]
        if odd := [rank for rank, value in enumerate(values) if value != usual]:
            found[name] = odd
    return found


def share_faults(shares: Sequence[Sequence[Share]]) -> list[str]:
    """What is wrong with the tensors of all ranks, one line each. ``shares``: per rank."""
    size = len(shares)
    found = [
        f"rank {rank}: {_describe(share)}"
        for rank, own in enumerate(shares)
        for share in own
        if share.num_wrong
    ]
    by_name: dict[str, list[Share]] = {}
    for own in shares:
        for share in own:
            by_name.setdefault(share.name, []).append(share)
    for name, same in by_name.items():
        if len(same) < size:
            found.append(f"{name}: only {len(same)} of {size} ranks have it")
        elif any(share.num_wrong for share in same):
            continue
        elif len(layouts := {share.layout for share in same}) > 1:
            found.append(f"{name}: ranks disagree on how it is split: {', '.join(sorted(layouts))}")
        elif same[0].is_split and sum(share.elements for share in same) != same[0].full_elements:
            found.append(f"{name}: the parts of all ranks do not make up the whole")
    return found


def _describe(share: Share) -> str:
    if not share.full_elements:
        return f"{share.name} is not in the checkpoint"
    if not share.expected:
        return (
            f"{share.name}: {share.elements} elements are no part that this rank could have of the "
            f"checkpoint's {share.full_elements}"
        )
    return (
        f"{share.name} ({share.layout}): {share.num_wrong} of {share.elements} elements are not the "
        f"checkpoint's, by up to {share.largest_error:.2e} "
        f"(checksum {share.checksum}, expected {share.expected})"
    )


def _at(tokens: Sequence[int], position: int) -> int | None:
    return int(tokens[position]) if position < len(tokens) else None


def _top_two_at(top: TopTwo, position: int) -> TopTwoAt | None:
    if position >= len(top.logits):
        return None
    (first, second), (high, low) = top.token_ids[position], top.logits[position]
    return TopTwoAt((int(first), int(second)), (float(high), float(low)))
