"""From what was measured to a verdict on each check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rollout_pool.tp_validation.comparison import (
    Difference,
    Divergence,
    agreement,
    divergences,
    located,
    logprob_difference,
    odd_ranks,
    share_faults,
)
from rollout_pool.tp_validation.measured import Measured, Outcome
from rollout_pool.tp_validation.tolerances import Tolerances
from rollout_pool.types import RolloutGroup
from rollout_pool.verification import Verification


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of one size in one dtype."""

    size: int
    dtype: str
    check: str
    figure: str
    tolerance: str
    """Empty when the figure is for information."""
    passed: bool
    details: tuple[str, ...] = ()
    values: dict[str, float] | None = None


Make = Callable[..., Finding]


def findings(outcome: Outcome, reference: Outcome | None, limits: Tolerances) -> list[Finding]:
    """All findings on ``outcome``; those that need the single rank fail where ``reference`` has nothing."""
    measured = outcome.measured
    if measured is None:
        return [_unmeasured(outcome)]

    def make(
        check: str,
        figure: str,
        tolerance: str,
        passed: bool,
        details: Sequence[str] = (),
        **values: float,
    ) -> Finding:
        return Finding(outcome.size, outcome.dtype, check, figure, tolerance, passed, tuple(details), values)

    found = [_parameters(make, measured)]
    if outcome.size > 1:
        found.append(_same_bits(make, measured))
        single = reference.measured if reference is not None else None
        if single is None:
            found.append(make("single rank", "not measured, so nothing to compare with", "measured", False))
        else:
            found += _states(make, measured, single, limits)
            found.append(_greedy(make, measured, single, limits))
            found.append(_samples(make, measured, single))
    found.append(_complete(make, measured))
    found.append(_prefill(make, measured, limits))
    if outcome.rescored is not None:
        found.append(_logprobs(make, outcome.rescored, limits))
    return found


def _unmeasured(outcome: Outcome) -> Finding:
    what = "refused" if outcome.refused is not None else "failed"
    reason = outcome.refused or outcome.failed or "no reason is known"
    return Finding(outcome.size, outcome.dtype, what, reason, "ranks that load and answer", False)


def _parameters(make: Make, measured: Measured) -> Finding:
    faults = share_faults(measured.shares)
    own = measured.shares[0]
    num_split = sum(share.is_split for share in own)
    held = [sum(share.elements for share in shares) for shares in measured.shares]
    whole = sum(share.full_elements for share in own)
    per_rank = f"{min(held):,}" if min(held) == max(held) else f"{min(held):,} to {max(held):,}"
    figure = (
        f"{len(own)} tensors, {num_split} split; {per_rank} of {whole:,} elements per rank"
        if not faults
        else f"faults in {len(own)} tensors of {len(measured.shares)} ranks: {len(faults)}"
    )
    return make("parameters", figure, "equal bits", not faults, faults, wrong=len(faults))


def _same_bits(make: Make, measured: Measured) -> Finding:
    faults = [f"{name}: {_ranks(odd)}" for name, odd in _odd([one.checksums for one in measured.all_reduce])]
    names = len(measured.all_reduce[0].checksums)
    for index, (checked, _) in enumerate(measured.prompts):
        names += len(checked[0].checksums)
        odd_ones = _odd([one.checksums for one in checked])
        faults += [f"prompt {index}, {name}: {_ranks(odd)}" for name, odd in odd_ones]
    figure = f"{len(faults)} of {names} tensors differ between ranks"
    return make("same bits on ranks", figure, "0", not faults, faults, differing=len(faults))


def _odd(checksums: list[dict[str, str]]) -> Iterator[tuple[str, list[int]]]:
    yield from odd_ranks(checksums).items()


def _ranks(odd: list[int]) -> str:
    return f"other bits on rank {', '.join(map(str, odd))}"


def _states(make: Make, measured: Measured, single: Measured, limits: Tolerances) -> list[Finding]:
    found: dict[str, tuple[Difference, Difference]] = {}
    for (_, mine), (_, other) in zip(measured.prompts, single.prompts, strict=True):
        got, expected = mine(), other()
        pairs = {name: (state, expected.hidden[name]) for name, state in got.hidden.items()}
        for name, pair in {**pairs, "logits": (got.logits, expected.logits)}.items():
            relative, absolute = found.get(name, (Difference(), Difference()))
            found[name] = relative + Difference.relative(*pair), absolute + Difference.of(*pair)
    return [_state(make, name, *both, limits) for name, both in found.items()]


def _state(make: Make, name: str, relative: Difference, absolute: Difference, limits: Tolerances) -> Finding:
    high, mean = relative.largest, relative.mean
    return make(
        name,
        f"relative max {high:.1e}, mean {mean:.1e}; absolute max {absolute.largest:.1e}",
        f"max {limits.states_max:g}, mean {limits.states_mean:g}",
        high <= limits.states_max and mean <= limits.states_mean,
        max=high,
        mean=mean,
        absolute_max=absolute.largest,
        absolute_mean=absolute.mean,
    )


def _greedy(make: Make, measured: Measured, single: Measured, limits: Tolerances) -> Finding:
    same, total = agreement(measured.rolled.greedy, single.rolled.greedy)
    found = [
        _locate(one, measured, single) for one in divergences(measured.rolled.greedy, single.rolled.greedy)
    ]
    gap = max((one.gap for one in found), default=0.0)
    figure = f"{same} of {total} tokens equal"
    if found:
        figure += (
            f", parting in {len(found)} of {len(measured.rolled.greedy)} prompts at a gap of up to {gap:.1e}"
        )
    details = [one.describe() for one in found]
    tolerance = f"gap {limits.greedy_gap:g}"
    return make(
        "greedy tokens",
        figure,
        tolerance,
        gap <= limits.greedy_gap,
        details,
        equal=same,
        total=total,
        gap=gap,
    )


def _locate(divergence: Divergence, measured: Measured, single: Measured) -> Divergence:
    index = divergence.prompt
    if index not in measured.top_two or index not in single.top_two:
        return divergence
    return located(divergence, measured.top_two[index], single.top_two[index])


def _samples(make: Make, measured: Measured, single: Measured) -> Finding:
    same, total = agreement(measured.rolled.shared, single.rolled.shared)
    figure = f"{same} of {total} tokens equal to the single rank's"
    return make("sampled tokens", figure, "", True, equal=same, total=total)


def _complete(make: Make, measured: Measured) -> Finding:
    rolled = measured.rolled
    groups = {"greedy": rolled.greedy, "shared prefill": rolled.shared, "separate prefill": rolled.apart}
    faults = [f"{name}: {fault}" for name, some in groups.items() for fault in _errors(some)]
    rate = rolled.new_tokens / max(rolled.seconds, 1e-9)
    figure = f"{rate:.0f} tokens/s" if not faults else f"{len(faults)} groups failed"
    return make("rollouts", figure, "no failed group", not faults, faults, tokens_per_second=rate)


def _errors(groups: list[RolloutGroup]) -> Iterator[str]:
    for group in groups:
        if group.error is not None:
            yield group.error


def _prefill(make: Make, measured: Measured, limits: Tolerances) -> Finding:
    shared, apart = measured.rolled.shared, measured.rolled.apart
    same, total = agreement(apart, shared)
    difference = logprob_difference(apart, shared)
    computed = [sum(group.timing.prefill_tokens for group in groups) for groups in (shared, apart)]
    passed = same == total and difference.largest <= limits.prefill_logprobs
    return make(
        "shared prefill",
        f"{same} of {total} tokens equal, logprobs max {difference.largest:.1e}; "
        f"{computed[0]} and {computed[1]} prompt tokens computed",
        f"all equal, max {limits.prefill_logprobs:g}",
        passed,
        [one.describe() for one in divergences(apart, shared)],
        equal=same,
        total=total,
        max=difference.largest,
        shared_tokens=computed[0],
        separate_tokens=computed[1],
    )


def _logprobs(make: Make, rescored: Verification, limits: Tolerances) -> Finding:
    high, mean = rescored.max_abs_diff, rescored.mean_abs_diff
    passed = high <= limits.logprobs_max and mean <= limits.logprobs_mean
    details = [] if passed else [rescored.describe()]
    return make(
        "logprobs",
        f"max {high:.1e}, mean {mean:.1e} over {rescored.num_tokens} tokens",
        f"max {limits.logprobs_max:g}, mean {limits.logprobs_mean:g}",
        passed,
        details,
        max=high,
        mean=mean,
        tokens=rescored.num_tokens,
    )
