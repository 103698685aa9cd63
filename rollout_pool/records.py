"""A rollout group as one JSON object, and back.

    {"index", "request_id", "prompt", "prompt_token_ids",
     "samples": [{"sample_index", "text", "token_ids", "logprobs", "sampling_logprobs",
                  "finish_reason", "stop_match", "weight_version", "seed"}, ...],
     "error", "metadata", "sampling", "config_hash", "prompt_hash"}

``prompt`` is what the prompts file says, or null when that is token ids. Log-probabilities are the
shortest decimals that read back as the same float32. Nothing in a record depends on when or where
it was made, so equal runs write equal records.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rollout_pool.errors import ConfigError
from rollout_pool.prompt_file import PromptLine
from rollout_pool.types import Logprobs, RolloutGroup, Sample, SamplingParams

Record = dict[str, Any]


def to_record(line: PromptLine, group: RolloutGroup, config_hash: str) -> Record:
    """The record of the group that answers ``line``."""
    prompt = line.request.prompt
    is_ids = not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt)
    return {
        "index": line.index,
        "request_id": line.request.request_id,
        "prompt": None if is_ids else prompt,
        "prompt_token_ids": group.prompt_token_ids.tolist(),
        "samples": [_sample_record(sample) for sample in group.samples],
        "error": group.error,
        "metadata": line.request.metadata,
        "sampling": line.sampling.model_dump(mode="json"),
        "config_hash": config_hash,
        "prompt_hash": line.prompt_hash,
    }


def from_record(record: Record) -> RolloutGroup:
    """The group of a record. Raises KeyError, TypeError or ValueError when it is none."""
    try:
        sampling = SamplingParams(**record["sampling"])
    except ConfigError as error:
        raise ValueError(f"sampling.{error}") from None
    return RolloutGroup(
        request_id=record["request_id"],
        index=record["index"],
        prompt_token_ids=np.asarray(record["prompt_token_ids"], dtype=np.int64),
        samples=[_sample(sample) for sample in record["samples"]],
        error=record["error"],
        metadata=record["metadata"],
        sampling=sampling,
    )


def _sample_record(sample: Sample) -> Record:
    return {
        "sample_index": sample.sample_index,
        "text": sample.text,
        "token_ids": sample.token_ids.tolist(),
        "logprobs": _decimals(sample.logprobs),
        "sampling_logprobs": _decimals(sample.sampling_logprobs),
        "finish_reason": sample.finish_reason,
        "stop_match": sample.stop_match,
        "weight_version": sample.weight_version,
        "seed": sample.seed,
    }


def _sample(record: Record) -> Sample:
    token_ids = np.asarray(record["token_ids"], dtype=np.int64)
    logprobs, sampling_logprobs = _floats(record["logprobs"]), _floats(record["sampling_logprobs"])
    if not len(token_ids) == len(logprobs) == len(sampling_logprobs):
        raise ValueError("token_ids and log-probabilities differ in length")
    return Sample(
        token_ids=token_ids,
        text=record["text"],
        logprobs=logprobs,
        sampling_logprobs=sampling_logprobs,
        finish_reason=record["finish_reason"],
        stop_match=record["stop_match"],
        weight_version=record["weight_version"],
        token_versions=np.full(len(token_ids), record["weight_version"], dtype=np.int64),
        seed=record["seed"],
        sample_index=record["sample_index"],
    )


def _decimals(values: Logprobs) -> list[float | None]:
    # Through text: float(np.float32) has 17 digits. JSON knows neither NaN nor infinity.
    texts = values.astype(np.float32).astype(str).tolist()
    return [float(text) if np.isfinite(value) else None for text, value in zip(texts, values, strict=True)]


def _floats(values: list[float | None]) -> Logprobs:
    return np.asarray([np.nan if value is None else value for value in values], dtype=np.float32)
