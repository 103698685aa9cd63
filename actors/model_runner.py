"""Forward passes: a prompt's prefill, and one decode step for many rows at their own lengths."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from rollout_pool.actors.attention import AttentionSwitch
from rollout_pool.actors.kv_cache import SlotCache
from rollout_pool.actors.prefix import Prefix, repeated, row_of
from rollout_pool.actors.shared_prefixes import SharedStep
from rollout_pool.actors.zero3 import Gather, Partitioned, full_shape, is_partitioned
from rollout_pool.errors import UnsupportedModelError
from rollout_pool.kernels import ops


@contextmanager
def evaluation(modules: Iterable[torch.nn.Module], *, is_partitioned: bool = False) -> Iterator[None]:
    """Evaluation mode without gradients; every module's mode is restored on the way out.

    is_partitioned: parameters get new data meanwhile, which a trainer must be able to differentiate by.
    """
    was_training = [module for module in modules if module.training]
    for module in was_training:
        module.training = False
    try:
        with torch.no_grad() if is_partitioned else torch.inference_mode():
            yield
    finally:
        for module in was_training:
            module.training = True


class ModelRunner:
    """Runs one model. Never trains it, and leaves it as it was: mode, attention, ``use_cache``."""

    def __init__(
        self, model: PreTrainedModel, vocab_size: int | None = None, gather: Gather = "layers"
    ) -> None:
        """vocab_size: of the logits; by default the rows of the head, which a shard holds only in part.

        gather: how parameters that ZeRO-3 has partitioned come together.
        """
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.device: torch.device = next(model.parameters()).device
        self.vocab_size: int = vocab_size or _vocabulary_size(model)
        self.partitioned = Partitioned(model, gather, self.device) if is_partitioned(model) else None
        """What runs the model when ZeRO-3 has partitioned it."""
        self._attention = AttentionSwitch(model)
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self.goes_on = False
        """Whether a prompt may be computed in parts; a trial finds it out."""
        self.longest_together = 0
        """Tokens of the longest prompt that may be computed together with others; a trial finds it out."""
        self.no_sharing: str | None = "it has not been tried"
        """Why rows cannot share their prompt's KV; None: they can. A trial finds it out."""
        self.needs_mask = not self._takes_positions or bool(getattr(self.config, "alibi", False))
        """It derives positions (ALiBi, say) from a mask of tokens; only layout ``aligned`` serves that."""
        self.own_modules: list[torch.nn.Module] = []
        """All there are, where nobody else holds the model; to look for them takes a while in every step."""
        self.num_prefills = 0
        """Prompts that were computed."""

    def session(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients; see :func:`evaluation`."""
        modules = self.own_modules or self.model.modules()
        return evaluation(modules, is_partitioned=self.partitioned is not None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A session that may run forwards; of a ZeRO-3 trainer, on all ranks: see :class:`Partitioned`."""
        with self.session(), nullcontext() if self.partitioned is None else self.partitioned.together():
            yield

    def __call__(self, **arguments: Any) -> Any:
        """The model's own forward; of a partitioned model within :meth:`together`."""
        return self.model(**arguments) if self.partitioned is None else self.partitioned.run(arguments)

    def prefill(self, token_ids: torch.Tensor, after: Prefix | None = None) -> Prefix:
        """Compute a prompt alone and unpadded, as ``generate`` would. token_ids: int64 ``[tokens]``.

        after: its beginning, which is computed already; the cache goes over to the result.
        """
        cache = DynamicCache(config=self.model.config) if after is None else after.cache
        start = 0 if after is None else after.length
        length = token_ids.shape[0]
        positions = torch.arange(start, length, device=self.device).unsqueeze(0)
        logits = self._forward(token_ids[start:].unsqueeze(0), positions, cache)
        self.num_prefills += 1
        return Prefix(cache, logits, length)

    def prefill_together(self, prompts: Sequence[torch.Tensor], after: Prefix | None = None) -> list[Prefix]:
        """Compute several prompts in one forward, as each alone to rounding. Each int64 ``[tokens]``.

        Shorter ones are filled up on the right, where no token of theirs looks. after: what all of them begin
        with, which is computed already.
        """
        start = 0 if after is None else after.length
        lengths = [prompt.shape[0] for prompt in prompts]
        ids = torch.nn.utils.rnn.pad_sequence([prompt[start:] for prompt in prompts], batch_first=True)
        positions = torch.arange(start, start + ids.shape[1], device=self.device).expand(len(prompts), -1)
        cache = (
            DynamicCache(config=self.model.config) if after is None else repeated(after.cache, len(prompts))
        )
        ends = sorted({length - 1 - start for length in lengths})
        logits = self._logits(ids, positions, cache, ops.upload(ends, self.device))
        place = {end: column for column, end in enumerate(ends)} if logits.shape[1] == len(ends) else {}
        self.num_prefills += len(prompts)
        found = []
        for row, length in enumerate(lengths):
            end = length - 1 - start
            last = logits[row : row + 1, place.get(end, end)].float()
            found.append(Prefix(row_of(cache, row, length), last, length))
        return found

    def decode(
        self,
        cache: SlotCache,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        column: int,
        shared: SharedStep | None = None,
    ) -> torch.Tensor:
        """One step of rows 0 to n-1 of ``cache``: each token at its row's position.

        tokens, positions: int64 ``[rows]``; ``column``: as :meth:`SlotCache.begin` takes it. shared: the
        prompts whose KV is not in the slots. Returns float32 logits ``[rows, vocab]`` that the caller may
        overwrite.
        """
        before = None if shared is None else shared.lengths
        cache.begin(positions, column, by_mask=self.needs_mask, before=before)
        if self.needs_mask:
            return self._forward(tokens.unsqueeze(1), positions.unsqueeze(1), cache, cache.token_mask())
        with self._attention.rows(shared):
            return self._forward(tokens.unsqueeze(1), positions.unsqueeze(1), cache)

    def teacher_forced(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits of every position in one plain forward without a cache: float32 ``[tokens, vocab]``."""
        positions = torch.arange(token_ids.shape[0], device=self.device).unsqueeze(0)
        arguments = {"position_ids": positions} if self._takes_positions else {}
        out = self(input_ids=token_ids.unsqueeze(0), use_cache=False, **arguments)
        logits: torch.Tensor = out.logits[0].float()
        return logits

    def _forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache,
        token_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of the last column: float32 ``[rows, vocab]``."""
        return self._logits(input_ids, positions, cache, 1, token_mask)[:, -1, :].float()

    def _logits(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache,
        keep: int | torch.Tensor,
        token_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits ``[rows, columns, vocab]``, of the last ``keep`` columns, or those it names, if it can."""
        arguments: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
        if self._takes_positions:
            arguments["position_ids"] = positions
        if token_mask is not None:
            arguments["attention_mask"] = token_mask
        if self._keeps_logits:
            arguments["logits_to_keep"] = keep
        logits: torch.Tensor = self(input_ids=input_ids, **arguments).logits
        return logits


def _vocabulary_size(model: PreTrainedModel) -> int:
    output = model.get_output_embeddings()
    if output is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no language-model head")
    return full_shape(output.weight)[0]
