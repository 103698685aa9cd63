"""The text of single tokens, to lay their log-probabilities over the text of a sample."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any


class Pieces:
    """What each token id of one tokenizer stands for. Raises ValueError when it cannot be read.

    folder: one that holds a ``tokenizer.json``, or a model's name in the hub's cache.
    """

    def __init__(self, folder: str) -> None:
        from tokenizers import Tokenizer

        path = _find(folder)
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # it raises Exception itself
            raise ValueError(f"{path}: {error}") from None
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        anchor = self._tokenizer.encode("a", add_special_tokens=False).ids
        self._anchor = anchor[-1:]

    def of(self, token_ids: Iterable[int]) -> list[str]:
        """One string per id, with the space before a word. Parts of a character are U+FFFD."""
        lead = self._decode(self._anchor)
        found = []
        for token_id in token_ids:
            text = self._decode([*self._anchor, token_id])
            is_apart = text.startswith(lead)
            found.append(text.removeprefix(lead) if is_apart else self._decode([token_id]))
        return found

    def special(self, token_ids: Iterable[int]) -> list[int]:
        """The places of those that are no part of a sample's text, such as the one that ends it."""
        return [place for place, token_id in enumerate(token_ids) if token_id in self._special]

    def _decode(self, token_ids: list[int]) -> str:
        text: Any = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return str(text)


def _find(folder: str) -> Path:
    """Where its ``tokenizer.json`` is."""
    if (path := Path(folder) / "tokenizer.json").is_file():
        return path
    if not Path(folder).exists():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(folder, "tokenizer.json")
        except HFValidationError:
            found = None
        if isinstance(found, str):
            return Path(found)
    raise ValueError(f"there is no tokenizer.json in {folder}")
