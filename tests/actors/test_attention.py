"""The mask and the attention function that a model meets while it decodes rows of different lengths."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from rollout_pool import Engine, EngineConfig, RolloutRequest, SamplingParams, UnsupportedModelError
from rollout_pool.actors.attention import NAME, AttentionSwitch, row_attention, row_mask
from rollout_pool.actors.kv_cache import STRICT_VIEW_STEP
from rollout_pool.kernels import ops

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case", ["plain", "softcap", "sinks", "wider values", "shared", "shared, softcap", "window"]
)
def test_cells_that_follow_out_of_sight_change_no_bit_where_they_are_whole_blocks(
    case: str, dtype: torch.dtype
) -> None:
    """What strict mode reads of the cache depends on the longest row; a library splits long sums."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rows, slot, value_dim = 4, 1200, 48 if case == "wider values" else 32
    query, keys, values = random(rows, 6, 1, 32), random(rows, 2, slot, 32), random(rows, 2, slot, value_dim)
    options: dict[str, Any] = {"scaling": 32**-0.5, "softcap": 3.0 if "softcap" in case else None}
    if case == "sinks":
        options["sinks"] = random(6)
    if "shared" in case:
        options["prior"] = random(1, rows, 6, 32), random(1, rows, 6).float()
    for length in (5, 300, 430, 512, 700, 1030):
        column = torch.arange(slot)
        seen = (column < length) & (column >= (length - 100 if case == "window" else 0))
        views = [view for view in (512, 1024, slot) if view >= length]
        found = [
            ops.decode_attention(
                query, keys[:, :, :view], values[:, :, :view],
                visible=seen[:view].expand(rows, 1, 1, -1), **options,
            )
            for view in views
        ]  # fmt: skip
        assert all(torch.equal(one, found[0]) for one in found[1:]), length
    assert STRICT_VIEW_STEP == 512


@pytest.mark.filterwarnings("ignore:deterministic='strict'.*:RuntimeWarning")
def test_strict_samples_do_not_depend_on_longer_ones(build: Any, small_config: Any) -> None:
    """A sample of 470 tokens, alone and next to one that is past 1,000 all the while."""
    model = build(LlamaConfig(**small_config(max_position_embeddings=1200)))
    config = EngineConfig(num_slots=2, max_length=1150, deterministic="strict", prefix="expand")
    short, long = ([7 + i % 90 for i in range(size)] for size in (20, 1000))
    mine = RolloutRequest(short, SamplingParams(max_new_tokens=450, ignore_eos=True, seed=1), request_id="a")
    other = RolloutRequest(long, SamplingParams(n=1, max_new_tokens=140, ignore_eos=True), request_id="b")
    many = [dataclasses.replace(other, request_id=f"b{number}") for number in range(4)]
    (alone,) = Engine(model, config).generate([mine])
    beside = Engine(model, config).generate([mine, *many])[0]
    for one, same in zip(beside.samples, alone.samples, strict=True):
        assert one.token_ids.tolist() == same.token_ids.tolist()
        assert one.logprobs.tobytes() == same.logprobs.tobytes()


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
