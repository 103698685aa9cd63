"""What a validation rolls out: prompts as token ids, and in which dtype."""

from __future__ import annotations

import random
from typing import Any

from rollout_pool.actors.loading import load_tokenizer
from rollout_pool.actors.prompts import PromptEncoder
from rollout_pool.actors.rank_records import RollPlan
from rollout_pool.config import Dtype
from rollout_pool.errors import ConfigError, RequestError
from rollout_pool.prompt_file import read_prompts
from rollout_pool.requests import resolve_requests
from rollout_pool.run_config import RunConfig
from rollout_pool.types import Prompt, SamplingParams

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at a lower temperature on a mountain because",
    "1, 2, 4, 8, 16,",
    "Once upon a time there was a",
    "A matrix is invertible if and only if",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three primary colours are red,",
)
"""Whatever a language model makes of them: they only have to be ordinary text of different kinds."""
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")


def working_dtype(config: RunConfig) -> Dtype:
    """What ``auto`` stands for: the dtype in the checkpoint's configuration."""
    if config.dtype != "auto":
        return config.dtype
    found = str(_model_config(config).dtype or "float32").removeprefix("torch.")
    for dtype in DTYPES:
        if found == dtype:
            return dtype
    raise ConfigError(f"the checkpoint is in {found}; choose one of {', '.join(DTYPES)} with --dtype")


def make_plan(
    config: RunConfig, prompts: str | None, num_prompts: int, new_tokens: int, num_samples: int
) -> RollPlan:
    """Encode the prompts, so that no rank starts for a bad one.

    Raises :class:`InputFileError` or :class:`RequestError` that names the prompt. Without a file there are
    a few texts, or random ids for a model without a tokenizer.
    """
    vocab_size = _model_config(config).get_text_config(decoder=True).vocab_size
    name = config.tokenizer or config.model
    tokenizer = load_tokenizer(name, trust_remote_code=config.trust_remote_code)
    texts: list[Prompt]
    if prompts is not None:
        texts = [line.request.prompt for line in read_prompts(prompts, config)]
    elif tokenizer is not None and _tells_apart(tokenizer):
        texts = list(TEXTS)
    else:
        draw = random.Random(0)
        texts = [[draw.randrange(vocab_size) for _ in range(length)] for length in range(5, 37, 4)]
    sampling = SamplingParams(max_new_tokens=new_tokens)
    encoder = PromptEncoder(tokenizer, vocab_size, config.engine.max_length)
    encoded = []
    for request in resolve_requests(texts[:num_prompts], sampling, seed=config.seed):
        try:
            encoded.append(tuple(encoder.encode(request).tolist()))
        except RequestError as error:
            raise RequestError(f"prompt {request.index}: {error}") from None
    return RollPlan(tuple(encoded), new_tokens, num_samples, config.seed)


def _tells_apart(tokenizer: Any) -> bool:
    """False for the tokenizer without a vocabulary that some families make where there is no file."""
    return len({tuple(tokenizer(text)["input_ids"]) for text in TEXTS}) == len(TEXTS)


def _model_config(config: RunConfig) -> Any:
    from rollout_pool.actors.loading import load_config

    return load_config(config.model, trust_remote_code=config.trust_remote_code)
