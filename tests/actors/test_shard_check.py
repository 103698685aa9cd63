"""A rank's tensors beside the checkpoint's: what is the right part is found, and what is not is counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_pool.actors.checkpoint import Checkpoint
from rollout_pool.actors.checksums import checksum
from rollout_pool.actors.shard_check import check_shares, compare
from rollout_pool.errors import ConfigError


@st.composite
def split_tensors(draw: Callable[..., Any]) -> tuple[torch.Tensor, torch.Tensor, int, int, int, int]:
    """(full, the part of a rank, rank, size, dimension, blocks): the part is cut here, index by index."""
    size, blocks = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] *= size * blocks
    rank = draw(st.integers(0, size - 1))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    full = torch.randn(shape, generator=generator).to(dtype)
    width = shape[dim] // (size * blocks)
    columns = [
        block * size * width + rank * width + column for block in range(blocks) for column in range(width)
    ]
    return full, full.index_select(dim, torch.tensor(columns)), rank, size, dim, blocks


@given(split_tensors())
@settings(max_examples=80, deadline=None)
def test_the_part_of_a_rank_is_found_and_has_no_wrong_element(case: Any) -> None:
    full, part, rank, size, dim, blocks = case
    share = compare("w", part, full, rank, size)
    assert share.num_wrong == 0
    assert share.is_split
    assert share.layout.startswith(f"split in dimension {dim}")
    assert ("blocks" in share.layout) == (blocks > 1)
    assert share.checksum == share.expected == checksum(part)
    assert (share.elements, share.full_elements) == (part.numel(), full.numel())


@given(split_tensors(), st.data())
@settings(max_examples=60, deadline=None)
def test_every_changed_element_counts(case: Any, data: Any) -> None:
    full, part, rank, size, *_ = case
    changed = part.clone().flatten()
    index = data.draw(st.integers(0, changed.numel() - 1))
    changed[index] = 1000.0
    share = compare("w", changed.reshape(part.shape), full, rank, size)
    assert share.num_wrong == 1
    assert share.largest_error > 900
    assert share.checksum != share.expected


@given(split_tensors())
@settings(max_examples=40, deadline=None)
def test_the_part_of_another_rank_is_wrong(case: Any) -> None:
    full, part, rank, size, *_ = case
    assert compare("w", part, full, (rank + 1) % size, size).num_wrong > 0


def test_a_replicated_tensor_is_equal_and_a_sign_of_zero_counts() -> None:
    full = torch.tensor([0.0, 1.0, float("nan")])
    assert compare("norm", full.clone(), full, 1, 2).layout == "replicated"
    assert compare("norm", full.clone(), full, 1, 2).num_wrong == 0
    assert compare("norm", torch.tensor([-0.0, 1.0, float("nan")]), full, 1, 2).num_wrong == 1


def test_a_shape_that_no_split_gives_is_unknown() -> None:
    share = compare("w", torch.ones(3, 4), torch.ones(8, 4), 0, 2)
    assert (share.layout, share.num_wrong, share.expected) == ("unknown", 12, "")


def test_the_order_of_a_weight_in_memory_does_not_matter() -> None:
    full = torch.randn(6, 4)
    assert compare("w", full.t().contiguous().t(), full, 0, 1).num_wrong == 0
    assert checksum(full.t().contiguous().t()) == checksum(full)


MODELS = ["llama", "tied", "moe", "gpt2"]


@pytest.fixture(scope="module", params=MODELS)
def saved(
    request: pytest.FixtureRequest, build: Any, small_config: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """A model and its checkpoint in several files; a mixture of experts is stored one expert at a time."""
    from transformers import GPT2Config, LlamaConfig, Qwen3MoeConfig

    configs = {
        "llama": lambda: LlamaConfig(**small_config()),
        "tied": lambda: LlamaConfig(**small_config(tie_word_embeddings=True)),
        "moe": lambda: Qwen3MoeConfig(
            **small_config(), num_experts=12, num_experts_per_tok=2, moe_intermediate_size=16
        ),
        "gpt2": lambda: GPT2Config(vocab_size=160, n_embd=64, n_layer=2, n_head=4),
    }
    model = build(configs[request.param]())
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model, folder


def test_a_whole_model_equals_its_checkpoint(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    shares = check_shares(model, Checkpoint(str(folder)), 0, 1)
    assert sorted(share.name for share in shares) == sorted(name for name, _ in model.named_parameters())
    assert {(share.layout, share.num_wrong) for share in shares} == {("replicated", 0)}
    assert sum(share.elements for share in shares) == sum(p.numel() for p in model.parameters())


def test_a_cast_model_is_compared_in_its_own_dtype(saved: tuple[Any, Path]) -> None:
    import copy

    model, folder = saved
    shares = check_shares(copy.deepcopy(model).to(torch.bfloat16), Checkpoint(str(folder)), 0, 1)
    assert {share.num_wrong for share in shares} == {0}


def test_one_changed_weight_is_named(saved: tuple[Any, Path]) -> None:
    import copy

    model, folder = saved
    changed = copy.deepcopy(model)
    name, parameter = list(changed.named_parameters())[-3]
    with torch.no_grad():
        parameter.flatten()[0] += 1
    wrong = [share for share in check_shares(changed, Checkpoint(str(folder)), 0, 1) if share.num_wrong]
    assert [(share.name, share.num_wrong) for share in wrong] == [(name, 1)]


def test_an_untied_head_is_compared_with_the_embedding_it_was_tied_to(
    build: Any, small_config: Any, tmp_path: Path
) -> None:
    from transformers import LlamaConfig

    model = build(LlamaConfig(**small_config(tie_word_embeddings=True)))
    model.save_pretrained(tmp_path)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    shares = {share.name: share for share in check_shares(model, Checkpoint(str(tmp_path)), 0, 1)}
    assert shares["lm_head.weight"].num_wrong == 0
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    shares = {share.name: share for share in check_shares(model, Checkpoint(str(tmp_path)), 0, 1)}
    assert shares["lm_head.weight"].num_wrong == 1


def test_a_parameter_that_the_checkpoint_lacks_is_reported(
    build: Any, small_config: Any, tmp_path: Path
) -> None:
    from transformers import LlamaConfig

    model = build(LlamaConfig(**small_config()))
    model.save_pretrained(tmp_path)
    model.model.extra = torch.nn.Parameter(torch.ones(3))
    wrong = [share for share in check_shares(model, Checkpoint(str(tmp_path)), 0, 1) if share.num_wrong]
    assert [(share.name, share.full_elements) for share in wrong] == [("model.extra", 0)]


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        Checkpoint(str(tmp_path))
