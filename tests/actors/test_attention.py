"""The mask and the attention function that a model meets while it decodes rows of different lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from rollout_pool import UnsupportedModelError
from rollout_pool.actors.attention import NAME, AttentionSwitch, row_attention, row_mask

POSITIONS = torch.tensor([0, 3, 7, 9])


@pytest.mark.parametrize("window", [None, 1, 4])
def test_each_row_sees_the_cells_up_to_its_own_position(window: int | None) -> None:
    rule = sliding_window_causal_mask_function(window) if window else causal_mask_function
    mask = row_mask(4, 1, 10, POSITIONS, rule)
    assert mask.shape == (4, 1, 1, 10)
    for row, position in enumerate(POSITIONS.tolist()):
        first = 0 if window is None else max(0, position - window + 1)
        seen = mask[row, 0, 0].nonzero().flatten().tolist()
        assert seen == list(range(first, position + 1))


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
def test_cells_out_of_sight_do_not_count(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(4, 4, 1, 8, generator=generator)
    keys, values = (torch.randn(4, 2, 10, 8, generator=generator) for _ in range(2))
    mask = row_mask(4, 1, 10, POSITIONS, causal_mask_function)
    clean, _ = row_attention(torch.nn.Identity(), query, keys, values, mask, **options)
    assert clean.shape == (4, 1, 4, 8)
    for row, position in enumerate(POSITIONS.tolist()):
        keys[row, :, position + 1 :] = 1e4
        values[row, :, position + 1 :] = -1e4
    poisoned, _ = row_attention(torch.nn.Identity(), query, keys, values, mask, **options)
    torch.testing.assert_close(poisoned, clean, atol=1e-6, rtol=1e-6)


def test_scaling_is_the_models_or_one_over_the_root_of_the_head() -> None:
    query, keys, values = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)
    mask = torch.ones(1, 1, 1, 3, dtype=torch.bool)
    default, _ = row_attention(torch.nn.Identity(), query, keys, values, mask)
    same, _ = row_attention(torch.nn.Identity(), query, keys, values, mask, scaling=0.25)
    other, _ = row_attention(torch.nn.Identity(), query, keys, values, mask, scaling=0.5)
    torch.testing.assert_close(default, same)
    assert not torch.allclose(default, other)


def test_a_position_bias_is_refused() -> None:
    """Attention that adds to its scores what this function knows nothing of."""
    tensor, mask = torch.randn(1, 2, 1, 16), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with pytest.raises(UnsupportedModelError, match=r"Identity .*position bias"):
        row_attention(torch.nn.Identity(), tensor, tensor, tensor, mask, position_bias=torch.zeros(1))


def test_a_model_is_switched_for_a_while_only(build: Any, small_config: Any) -> None:
    model = build(LlamaConfig(**small_config()))
    switch = AttentionSwitch(model)
    before = model.config._attn_implementation
    with switch.rows():
        assert model.config._attn_implementation == NAME
        assert model.model.layers[0].self_attn.config._attn_implementation == NAME
    assert model.config._attn_implementation == before
    with pytest.raises(KeyError), switch.rows():
        raise KeyError
    assert model.config._attn_implementation == before
    assert AttentionInterface()[NAME] is row_attention
    assert AttentionMaskInterface()[NAME] is row_mask
