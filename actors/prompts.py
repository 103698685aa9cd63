"""From any form of prompt to token ids, with a reason when it cannot be done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollout_pool.errors import RequestError, one_line
from rollout_pool.types import ResolvedRequest, TokenIds

QUOTED = 120
"""Characters of what a tokenizer or a chat template says, which may hold a piece of the prompt."""


class PromptEncoder:
    """Encodes prompts for one model: its tokenizer, its vocabulary, the engine's row length.

    slot_length: tokens that a slot holds, by default ``max_length``. prompt_tokens: of shared prompts, which
    are not in slots.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        vocab_size: int,
        max_length: int,
        slot_length: int | None = None,
        prompt_tokens: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_length = max_length
        self._slot_length = max_length if slot_length is None else slot_length
        self._prompt_tokens = prompt_tokens

    def encode(self, request: ResolvedRequest) -> TokenIds:
        """Token ids of the prompt: int64 ``[tokens]``. Raises :class:`RequestError` with the reason."""
        if request.fault is not None:
            raise RequestError(request.fault)
        ids = self._token_ids(request.prompt)
        sampling = request.sampling
        if ids.size == 0:
            raise RequestError("the prompt is empty; it needs at least one token")
        bad = ids[(ids < 0) | (ids >= self.vocab_size)]
        if bad.size:
            raise RequestError(self._outside(int(bad[0]), is_own=_is_token_ids(request.prompt)))
        need = ids.size + sampling.max_new_tokens
        if need > self.max_length:
            raise RequestError(
                f"prompt of {ids.size} tokens + max_new_tokens {sampling.max_new_tokens} = {need} exceeds "
                f"engine.max_length {self.max_length}; raise engine.max_length or lower max_new_tokens"
            )
        self._refuse_what_no_slot_holds(ids.size, sampling.max_new_tokens)
        for sample in request.resume:
            foreign = sample.token_ids[(sample.token_ids < 0) | (sample.token_ids >= self.vocab_size)]
            if foreign.size:
                raise RequestError(
                    f"resume: token id {int(foreign[0])} of sample {sample.sample_index} is outside the "
                    f"vocabulary (0 to {self.vocab_size - 1})"
                )
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and none was loaded; use stop_token_ids")
        outside = [i for i in sampling.stop_token_ids if not 0 <= i < self.vocab_size]
        if outside:
            raise RequestError(
                f"stop_token_ids: {outside[0]} is outside the vocabulary (0 to {self.vocab_size - 1})"
            )
        return ids

    def _refuse_what_no_slot_holds(self, prompt: int, new: int) -> None:
        if new > self._slot_length:
            raise RequestError(
                f"max_new_tokens {new} exceeds engine.max_new_tokens {self._slot_length}, what a slot holds; "
                "raise engine.max_new_tokens or lower max_new_tokens"
            )
        most = self._prompt_tokens
        if prompt + new > self._slot_length and most is not None and prompt > most:
            raise RequestError(
                f"prompt of {prompt} tokens exceeds engine.prompt_tokens {most}; raise that or shorten it"
            )

    def _outside(self, token_id: int, *, is_own: bool) -> str:
        outside = f"is outside the vocabulary (0 to {self.vocab_size - 1})"
        if is_own:
            return f"token id {token_id} in the prompt {outside}"
        return (
            f"token id {token_id}, which the tokenizer makes of the prompt, {outside} of the model; "
            "set tokenizer to the model's own"
        )

    def _token_ids(self, prompt: Any) -> TokenIds:
        if isinstance(prompt, str):
            return self._text(prompt, self._need_tokenizer("a text prompt"))
        if isinstance(prompt, np.ndarray):
            if prompt.ndim != 1 or (prompt.size and not np.issubdtype(prompt.dtype, np.integer)):
                raise RequestError(
                    f"a token-id array must be one-dimensional integers, got {prompt.dtype} {prompt.shape}"
                )
            return prompt.astype(np.int64)
        if isinstance(prompt, (list, tuple)):
            if not prompt:
                return np.zeros(0, dtype=np.int64)
            if all(isinstance(item, Mapping) for item in prompt):
                return self._chat(prompt)
            return self._ids(prompt)
        hint = "; pass its tolist()" if hasattr(prompt, "tolist") else ""
        raise RequestError(
            "a prompt must be a str, a list of token ids or a list of messages, "
            f"got {type(prompt).__name__}{hint}"
        )

    def _chat(self, messages: Any) -> TokenIds:
        tokenizer = self._need_tokenizer("a list of messages")
        for number, message in enumerate(messages):
            missing = [key for key in ("role", "content") if key not in message]
            if missing:
                raise RequestError(
                    f"message {number} of the prompt has no {missing[0]!r}; each has a role and a content"
                )
            if not isinstance(message["role"], str):
                raise RequestError(f"role of message {number} must be a str, got {_type(message['role'])}")
            content, is_call = message["content"], len(message) > 2  # a call of a tool may come without
            if not (isinstance(content, (str, list)) or (content is None and is_call)):
                raise RequestError(
                    f"content of message {number} must be a str or a list of parts, got {_type(content)}"
                )
        if getattr(tokenizer, "chat_template", None) is None:
            raise RequestError("the tokenizer has no chat template; pass the prompt as text or token ids")
        try:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:
            raise RequestError(
                f"the chat template rejected the messages: {one_line(error, QUOTED)}; change them as it says"
            ) from error
        return self._text(text, tokenizer, add_special_tokens=False)

    def _text(self, text: str, tokenizer: Any, **options: bool) -> TokenIds:
        try:
            ids = tokenizer(text, **options)["input_ids"]
        except Exception as error:  # a lone surrogate, say
            raise RequestError(
                f"the tokenizer rejected the text ({one_line(error, QUOTED)}); it must be valid Unicode"
            ) from error
        return self._ids(ids)

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, and none was loaded; set tokenizer, or pass token ids"
            )
        return self.tokenizer

    @staticmethod
    def _ids(values: Any) -> TokenIds:
        for position, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise RequestError(
                    f"item {position} of the prompt is a {_type(value)}, expected an integer token id"
                )
        try:
            return np.asarray(values, dtype=np.int64)
        except OverflowError:
            raise RequestError(
                "a token id of the prompt does not fit 64 bits; expected one of the model"
            ) from None


def _is_token_ids(prompt: Any) -> bool:
    """As opposed to what a tokenizer makes ids of."""
    return not isinstance(prompt, str) and not any(isinstance(item, Mapping) for item in prompt)


def _type(value: Any) -> str:
    """Errors name the type of what is wrong, and do not quote a prompt."""
    return type(value).__name__
