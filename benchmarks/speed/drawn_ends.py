"""A Llama whose samples end at one of two lengths. Loaded by Transformers as a model's own code."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM


class DrawnEndsForCausalLM(LlamaForCausalLM):
    """Nine rows of ten draw EOS in column ``short``, the others in column ``long``, and none elsewhere.

    Which row goes on is read off one of its logits, coarsely: as good as random from row to row, the same for
    the same tokens whatever the last bits are, and no state that a cache would have to carry.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_forward_hook(self._end, with_kwargs=True)

    def _end(self, _: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        logits, ends = out.logits, self.config.drawn_ends
        length = positions[:, -logits.shape[1] :] + 2  # of the row with the token that is drawn from here
        goes_on = (logits[..., 0].float() * 64).floor().long() * 7919 // 13 % 10 == 0
        is_end = ((length == ends["short"]) & ~goes_on) | (length >= ends["long"])
        logits[..., ends["eos"]] = torch.where(is_end, 1e4, -1e4).to(logits.dtype)
        return out
