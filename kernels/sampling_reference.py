"""Torch reference of sampling: the specification of :func:`sample_tokens`, and the path that CPUs run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from rollout_pool.kernels.race import block_maxima, bounds, first_largest, winners

SAMPLE_CHUNK = 1 << 18
"""Logits handled at once per thread of a CPU, so that the passes over them stay in the core's cache."""
_TOP_P_CANDIDATES = 512


@dataclass(slots=True)
class SamplingRows:
    """What :func:`sample_tokens` needs to know of each row; all tensors are ``[rows]`` unless said.

    ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and ``penalty`` 1 are off. The flags say what no row needs,
    so that the common cases pay nothing for the rare ones.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    penalty: torch.Tensor
    keys: torch.Tensor
    """int32 ``[rows, 2]``: :func:`counter_hash.position_keys`."""
    blocked: torch.Tensor
    """int64 ``[rows, width]``: ids that may not be drawn yet; -1 is no id."""
    seen: torch.Tensor | None = None
    """bool ``[rows, vocab]``: ids in the prompt or drawn before, for the repetition penalty."""
    adjusted: bool = True
    """Some row has a penalty or a blocked id."""
    filtered: bool = True
    """Some row has top-k, top-p or min-p."""
    sampled: bool = True
    """Some row has a temperature above 0."""

    def part(self, start: int, stop: int) -> SamplingRows:
        """The rows from ``start`` to ``stop``."""
        rows = slice(start, stop)
        seen = None if self.seen is None else self.seen[rows]
        return SamplingRows(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.penalty[rows],
            self.keys[rows], self.blocked[rows], seen, self.adjusted, self.filtered, self.sampled,
        )  # fmt: skip


def sample_tokens(
    logits: torch.Tensor, rows: SamplingRows, vocab: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token per row; overwrites ``logits`` (float32 ``[rows, vocab]``).

    Returns tokens (int64), log-probabilities of the plain distribution (log-softmax of logits /
    temperature) and of the distribution drawn from (after penalties and filters), all ``[rows]``.
    A row whose logits are not finite has nan as its log-probability; where penalties and blocked ids leave no
    token to draw, that of the distribution drawn from is not finite.

    Order of operations: Hugging Face's (penalty, blocked ids, temperature, top-k, top-p, min-p).
    The draw is Gumbel-max in its exponential form (see :func:`counter_hash.exponential`), and
    never a token of probability zero. Temperature 0 is the argmax.
    """
    greedy = rows.temperature == 0
    original = logits.clone() if rows.adjusted else logits
    step = max(1, SAMPLE_CHUNK * torch.get_num_threads() // logits.shape[1])
    parts = []
    for start in range(0, logits.shape[0], step):
        chunk = slice(start, start + step)
        part = rows.part(start, start + step)
        temperature = torch.where(greedy[chunk], 1.0, part.temperature)
        plain = _softmax_of(original[chunk], temperature)[:2] if rows.adjusted else None
        if rows.adjusted:
            _adjust_(logits[chunk], part)
        parts.append(_survey(logits[chunk], part, temperature, vocab, plain))
    survey = parts[0] if len(parts) == 1 else _Survey(*map(torch.cat, zip(*parts, strict=True)))
    if rows.sampled:
        tokens = winners(logits, survey.top, survey.bounds, vocab, rows.keys)
    if not rows.sampled or bool(greedy.any()):
        best = first_largest(logits, survey.maxima)
        tokens = torch.where(greedy, best, tokens) if rows.sampled else best
    picked = tokens.unsqueeze(1)
    logprobs = original.gather(1, picked).squeeze(1) - survey.plain_top - survey.plain_norm.log()
    sampling = logits.gather(1, picked).squeeze(1) - survey.top - survey.norm.log()
    return tokens, logprobs, torch.where(greedy, torch.where(sampling.isnan(), sampling, 0.0), sampling)


class _Survey(NamedTuple):
    """What passes over all scores of some rows have found, so that few of them need another look."""

    top: torch.Tensor  # [rows]: the largest score
    norm: torch.Tensor  # [rows]: sum of exp(score - top)
    plain_top: torch.Tensor
    plain_norm: torch.Tensor  # both before penalties, blocked ids and filters
    maxima: torch.Tensor  # [rows, blocks] of the scores
    bounds: torch.Tensor  # [rows, blocks]: see race.bounds; empty when nothing is sampled


def _survey(
    scores: torch.Tensor,
    rows: SamplingRows,
    temperature: torch.Tensor,
    vocab: torch.Tensor,
    plain: tuple[torch.Tensor, torch.Tensor] | None,
) -> _Survey:
    """Divides ``scores`` by the temperature, and makes those that filters rule out minus infinity."""
    top, norm, maxima, weights = _softmax_of(scores, temperature)
    plain_top, plain_norm = (top, norm) if plain is None else plain
    if rows.filtered:
        ruled_out = scores < _threshold(scores, weights, norm, rows).unsqueeze(1)
        scores.masked_fill_(ruled_out, float("-inf"))
        norm = _row_sum(weights.masked_fill_(ruled_out, 0.0))
    bound = bounds(weights, vocab, rows.keys) if rows.sampled else maxima[:, :0]
    return _Survey(top, norm, plain_top, plain_norm, maxima, bound)


def _adjust_(logits: torch.Tensor, rows: SamplingRows) -> None:
    """Repetition penalty and blocked ids, in place."""
    if rows.seen is not None:
        penalty = rows.penalty.unsqueeze(1)
        penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
        torch.where(rows.seen, penalised, logits, out=logits)
    row, column = torch.nonzero(rows.blocked >= 0, as_tuple=True)
    logits[row, rows.blocked[row, column]] = float("-inf")


def _softmax_of(
    scores: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Divides ``scores`` by the temperature, in place.

    Returns their maximum ``[rows]``, the sum of exp(score - maximum) ``[rows]``, the maxima of blocks
    ``[rows, blocks]`` and exp(score - maximum) ``[rows, vocab]``.
    """
    if bool((temperature != 1).any()):
        scores.div_(temperature.unsqueeze(1))
    maxima = block_maxima(scores)
    top = maxima.amax(dim=1)
    weights = (scores - top.unsqueeze(1)).exp_()
    return top, _row_sum(weights), maxima, weights


def _row_sum(weights: torch.Tensor) -> torch.Tensor:
    """Row sums whose bits do not depend on how many rows there are.

    Torch splits the sum of a single row among its threads, and nothing else; so a single row is
    summed as two.
    """
    if weights.shape[0] == 1:
        return weights.expand(2, -1).sum(dim=1)[:1]
    return weights.sum(dim=1)


def _threshold(
    scores: torch.Tensor, weights: torch.Tensor, norm: torch.Tensor, rows: SamplingRows
) -> torch.Tensor:
    """The lowest score that top-k, top-p and min-p leave in each row: ``[rows]``.

    Every one of the three keeps the highest scores, so all of them are thresholds; equal scores
    stand or fall together. No full sort unless top-p reaches past ``_TOP_P_CANDIDATES`` tokens.
    """
    vocab_size = scores.shape[1]
    low = torch.full_like(norm, float("-inf"))
    has_k, has_p = rows.top_k > 0, rows.top_p < 1
    if bool(has_k.any()):
        width = min(vocab_size, int(rows.top_k.max()))
        kth = (
            scores.topk(width, dim=1)
            .values.gather(1, (rows.top_k.clamp(1, width) - 1).unsqueeze(1))
            .squeeze(1)
        )
        low = torch.where(has_k, kth, low)
        norm = torch.where(has_k, _row_sum(torch.where(scores >= low.unsqueeze(1), weights, 0.0)), norm)
    if bool(has_p.any()):
        low = torch.where(has_p, _top_p_threshold(scores, weights, norm, low, rows.top_p), low)
    minimum = scores.amax(dim=1) + rows.min_p.log()  # -inf where min-p is off
    return torch.maximum(low, minimum)


def _top_p_threshold(
    scores: torch.Tensor, weights: torch.Tensor, norm: torch.Tensor, low: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The score of the last token of the smallest top set whose mass reaches ``top_p``."""
    width = min(scores.shape[1], _TOP_P_CANDIDATES)
    while True:
        ordered, ids = scores.topk(width, dim=1)
        mass = weights.gather(1, ids).div_(norm.unsqueeze(1)).cumsum_(dim=1)
        reached = (mass[:, -1] >= top_p) | (ordered[:, -1] < low)
        if width == scores.shape[1] or bool(reached.logical_or_(top_p >= 1).all()):
            break
        width = scores.shape[1]
    count = (mass < top_p.unsqueeze(1)).sum(dim=1, keepdim=True).clamp_(max=width - 1)
    return torch.maximum(ordered.gather(1, count).squeeze(1), low)
