"""What ends a sample: token ids, and strings found in the text as it grows, across token boundaries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollout_pool.types import SamplingParams


class Endings:
    """What ends a sample of one model: its EOS ids, and what the sampling parameters add."""

    def __init__(self, tokenizer: Any | None, eos_token_ids: Iterable[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._eos = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {str(token): int(index) for index, token in added.items() if token.special}

    def ids(self, params: SamplingParams) -> dict[int, str | int]:
        """Every token that ends a sample, and what ``stop_match`` then says.

        A stop string that is a special token never shows in the text, so its id ends the sample.
        """
        found: dict[int, str | int] = {} if params.ignore_eos else {token: token for token in self._eos}
        found.update({token: token for token in params.stop_token_ids})
        found.update({self._special[text]: text for text in params.stop if text in self._special})
        # A tokenizer may know more tokens than the model's head has rows; those are never drawn.
        return {token: match for token, match in found.items() if 0 <= token < self._vocab_size}

    def watch(self, params: SamplingParams) -> StopWatch | None:
        """What looks for the other stop strings in one sample's text; None without any."""
        strings = tuple(text for text in params.stop if text not in self._special)
        return StopWatch(self._tokenizer, strings, params.min_new_tokens) if strings else None


class StopWatch:
    """Follows one sample's text and says when a stop string appears in it.

    Decoding is incremental: only the last tokens are decoded again, with enough before them that
    the tokenizer joins words and bytes as it does in the whole text. Text that ends inside a
    multi-byte character waits for its rest.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], min_new_tokens: int = 0) -> None:
        """No string counts that is complete before the sample has ``min_new_tokens``."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._min_new = min_new_tokens
        self._tokens: list[int] = []
        self._context = 0  # first token that is decoded again
        self._read = 0  # tokens whose text is settled
        self.text = ""
        self.match: str | None = None

    @property
    def num_pushed(self) -> int:
        return len(self._tokens)

    def push(self, token: int) -> bool:
        """Add a token; True when a stop string is now in the text. The earliest match counts."""
        self._tokens.append(token)
        settled = self._decode(self._tokens[self._context : self._read])
        window = self._decode(self._tokens[self._context :])
        if window.endswith("\N{REPLACEMENT CHARACTER}") or len(window) <= len(settled):
            return False
        before = len(self.text)
        self.text += window[len(settled) :]
        self._context, self._read = self._read, len(self._tokens)
        if len(self._tokens) < self._min_new:
            return False
        found = [
            (at, text)
            for text in self._stop
            if (at := self.text.find(text, max(0, before - len(text) + 1))) >= 0
        ]
        if not found:
            return False
        at, self.match = min(found, key=lambda hit: (hit[0], -len(hit[1])))
        self.text = self.text[:at]
        return True

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
