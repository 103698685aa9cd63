"""From what a caller wrote to what an engine runs: sampling, seed and identity of every prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rollout_pool.errors import RequestError
from rollout_pool.types import (
    MAX_SEED,
    Prompt,
    ResolvedRequest,
    RolloutGroup,
    RolloutRequest,
    Sample,
    SamplingParams,
)


def failed_group(request: ResolvedRequest, error: str) -> RolloutGroup:
    """The group of a request that cannot be served: no samples, and the reason, which names the request."""
    return RolloutGroup(
        request_id=request.request_id,
        index=request.index,
        prompt_token_ids=np.zeros(0, dtype=np.int64),
        samples=[],
        error=f"{request.label}: {error}",
        metadata=request.metadata,
        sampling=request.sampling,
    )


def resolve_requests(
    prompts: Iterable[Prompt | RolloutRequest],
    sampling: SamplingParams | None,
    *,
    seed: int,
) -> list[ResolvedRequest]:
    """Give every prompt of one call its sampling, seed, identity and index.

    ``seed`` is that of the call and comes last: a request's own seed goes first, then that of its own
    sampling, then that of ``sampling``.
    A single str or mapping instead of a list raises :class:`RequestError`: it is always a mistake.
    """
    if isinstance(prompts, (str, bytes, Mapping, RolloutRequest)):
        raise RequestError(
            f"prompts must be a list of prompts, got a single {type(prompts).__name__}; write [prompt]"
        )
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling must be SamplingParams, got {type(sampling).__name__}")
    try:
        items = list(prompts)
    except TypeError:
        raise RequestError(f"prompts must be a list, got {type(prompts).__name__}") from None
    if items and all(isinstance(item, (int, np.integer)) for item in items):
        raise RequestError("prompts looks like one list of token ids; write [token_ids]")
    default = sampling or SamplingParams()
    return [_resolve(item, index, default, seed) for index, item in enumerate(items)]


def _resolve(item: Any, index: int, default: SamplingParams, call_seed: int) -> ResolvedRequest:
    if isinstance(item, ResolvedRequest):  # by whoever deals calls out to several pools
        return item
    request = item if isinstance(item, RolloutRequest) else RolloutRequest(item)
    fault = _fault(request)
    params = request.sampling if isinstance(request.sampling, SamplingParams) else default
    fault = fault or _resume_fault(request, params.n)
    named = request.request_id is not None
    request_id = request.request_id if request.request_id is not None else index
    seed = next(s for s in (request.seed, params.seed, default.seed, call_seed) if s is not None)
    return ResolvedRequest(
        prompt=request.prompt,
        sampling=params,
        seed=seed,
        identity=f"name:{request_id}" if named else f"index:{index}",
        request_id=request_id,
        index=index,
        sample_offset=request.sample_offset,
        metadata=request.metadata,
        resume=() if fault else _samples(request.resume),
        fault=fault,
    )


def _fault(request: RolloutRequest) -> str | None:
    if request.sampling is not None and not isinstance(request.sampling, SamplingParams):
        return f"sampling must be SamplingParams, got {type(request.sampling).__name__}"
    for name, low in (("seed", 0), ("sample_offset", 0)):
        value = getattr(request, name)
        if value is None and name == "seed":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < MAX_SEED:
            got = value if isinstance(value, (bool, int, float)) else type(value).__name__
            return f"{name} must be an integer from 0 to 2**63 - 1, got {str(got)[:40]}"
    if request.request_id is not None and not isinstance(request.request_id, (str, int)):
        return f"request_id must be a str or an int, got {type(request.request_id).__name__}"
    return None


def _samples(resume: Any) -> tuple[Sample, ...]:
    if resume is None:
        return ()
    return (resume,) if isinstance(resume, Sample) else tuple(resume)


def _resume_fault(request: RolloutRequest, n: int) -> str | None:
    if not isinstance(request.resume, (Sample, list, tuple, type(None))):
        return f"resume must be a Sample or a list of them, got {type(request.resume).__name__}"
    samples = _samples(request.resume)
    wrong = next((one for one in samples if not isinstance(one, Sample)), None)
    if wrong is not None:
        return f"resume must hold Samples, got {type(wrong).__name__}"
    first, last = request.sample_offset, request.sample_offset + n - 1
    indexes = [one.sample_index for one in samples]
    outside = next((index for index in indexes if not first <= index <= last), None)
    if outside is not None:
        return f"resume holds sample {outside}, but n={n} and sample_offset={first} ask for {first} to {last}"
    if len(set(indexes)) < len(indexes):
        return "resume holds two samples with the same sample_index"
    return None


def call_seed(seed: int, call: int) -> int:
    """The seed of call number ``call`` on an engine or a pool with ``seed``, from 0 to 2**63 - 1.

    Hashed rather than added, so that neighbouring seeds and calls share no draws.
    """
    digest = hashlib.blake2b(f"call:{seed}:{call}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % MAX_SEED
