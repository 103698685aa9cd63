"""Weights that lie otherwise in memory compute the same, and follow new weights, sleep and shortage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from rollout_pool import ConfigError, Engine, EngineConfig, SamplingParams, verify
from rollout_pool.actors import linear_layout
from rollout_pool.actors.linear_layout import is_packable, linears

SAMPLING = SamplingParams(n=2, max_new_tokens=12, temperature=0.0)
SIZES = [5, 9, 3]


@pytest.fixture(scope="module")
def folder(build: Any, small_config: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    build(LlamaConfig(**small_config(tie_word_embeddings=True, attention_bias=True))).save_pretrained(path)
    return str(path)


def engine(folder: str, layout: Any, num_slots: int = 4, **options: Any) -> Engine:
    config = EngineConfig(num_slots=num_slots, max_length=32, linear_layout=layout)
    return Engine(folder, config, **options)


def tokens(groups: list[Any]) -> list[Any]:
    return [[sample.token_ids.tolist() for sample in group.samples] for group in groups]


def products(model: Any, rows: int) -> list[torch.Tensor]:
    """Of every linear module with random rows."""
    generator = torch.Generator().manual_seed(rows)
    with torch.inference_mode():
        return [
            module(torch.randn(rows, 1, module.in_features, generator=generator).to(module.weight.dtype))
            for module in linears(model)
        ]


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_products_are_those_of_the_weights(folder: str, dtype: Any) -> None:
    plain, packed = (engine(folder, layout, dtype=dtype).model for layout in ("native", "packed"))
    if not is_packable(plain):
        pytest.skip(f"this build of PyTorch packs no {dtype} weights")
    limit = 1e-5 if dtype == "float32" else 1e-2
    for rows in (1, 3, 4, 9):
        assert difference(products(packed, rows), products(plain, rows)) < limit


def test_rollouts_agree_with_a_forward_and_take_the_memory_they_say(folder: str, prompts_of: Any) -> None:
    plain, packed = engine(folder, "transposed"), engine(folder, "packed")
    groups = packed.generate(prompts_of(SIZES), SAMPLING)
    assert tokens(groups) == tokens(plain.generate(prompts_of(SIZES), SAMPLING))
    assert verify(groups, plain.model).max_abs_diff < 1e-4
    more = packed.memory_plan.weight_bytes - plain.memory_plan.weight_bytes
    assert more == sum(module.weight.nbytes for module in linears(plain.model))


def test_copies_follow_new_weights_sleep_and_fewer_slots(folder: str, prompts_of: Any) -> None:
    one = engine(folder, "packed")
    before = products(one.model, 4)
    halved = [product * 0.5 for product in before]

    class Halve:
        def commit(self, version: int) -> None:
            with torch.no_grad():
                for module in linears(one.model):
                    module.weight.mul_(0.5)
                    if module.bias is not None:
                        module.bias.mul_(0.5)

    one.batch.worker.weights = Halve()
    one.update_weights(1)
    assert difference(products(one.model, 4), halved) < 1e-5
    one.sleep(weights=True)
    assert not any("forward" in vars(module) for module in linears(one.model))
    one.wake()
    assert all("forward" in vars(module) for module in linears(one.model))
    assert difference(products(one.model, 4), halved) < 1e-5
    # The batch that takes its place when memory runs out has fewer rows.
    expected = tokens(engine(folder, "packed").generate(prompts_of(SIZES), SAMPLING))
    other, refuses = engine(folder, "packed"), [True]

    def run_short(module: Any, arguments: Any, options: dict[str, Any]) -> None:
        if refuses and options["input_ids"].shape[0] > 2:
            refuses.clear()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    other.model.register_forward_pre_hook(run_short, with_kwargs=True)
    assert tokens(other.generate(prompts_of(SIZES), SAMPLING)) == expected
    assert not refuses
    assert other.stats().num_slots == 2
    assert difference(products(other.model, 2), products(engine(folder, "native").model, 2)) < 1e-5


def kind(shape: linear_layout.Shape) -> int:
    """0: of attention; 1: of an MLP; 2: the head."""
    return 2 if shape[2] else int(96 in shape[:2])


@pytest.mark.parametrize(
    ("seconds", "free", "chosen"),
    [
        ([(3.0, 2.0, 1.0)] * 2 + [(3.0, None, 1.0)], 1.0, ["packed", "packed", "packed"]),
        ([(3.0, 2.0, 1.0)] * 2 + [(3.0, None, 1.0)], 1e-7, ["transposed", "transposed", "native"]),
        ([(1.0, 2.0, 1.5)] * 2 + [(1.0, None, 1.5)], 1.0, ["native", "native", "native"]),
        ([(1.9, 2.0, 1.85)] * 2 + [(2.0, None, 1.85)], 1.0, ["transposed", "transposed", "native"]),
        ([(3.0, 2.0, 1.9), (3.0, 2.0, 1.0), (1.0, None, 0.5)], 1.0, ["transposed", "packed", "packed"]),
    ],
)
def test_each_shape_gets_what_is_clearly_faster_and_fits(
    seconds: Any, free: float, chosen: list[str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_layout, "LEAST_BYTES", 0)
    monkeypatch.setattr(linear_layout, "LARGEST_COPY", free)
    plain = engine(folder, "native").model
    measured = linear_layout.layout_seconds(plain, 4)
    assert [("transposed" in times) for times in measured.values()] == [not shape[2] for shape in measured]
    assert all(0 < value < 1 for times in measured.values() for value in times.values())
    names = ("native", "transposed", "packed")

    def given(shape: linear_layout.Shape) -> dict[str, float]:
        times = zip(names, seconds[kind(shape)], strict=True)
        return {name: value for name, value in times if value is not None}

    monkeypatch.setattr(
        linear_layout, "layout_seconds", lambda *_: {shape: given(shape) for shape in measured}
    )
    model = engine(folder, "auto").model
    for shape, modules in linear_layout.by_shape(model).items():
        layout = chosen[kind(shape)]
        for module in modules:
            assert module.weight.is_contiguous() == (layout == "native" or shape[2])
            assert ("forward" in vars(module)) == (layout == "packed")


def test_memory_for_copies_goes_where_it_spares_most(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layout, "LEAST_BYTES", 0)
    model = engine(folder, "native").model
    shapes = linear_layout.by_shape(model)
    best = min(shapes, key=lambda shape: shape[0] * shape[1])
    nbytes = sum(module.weight.nbytes for module in shapes[best])
    free = linear_layout.psutil.virtual_memory().available
    monkeypatch.setattr(linear_layout, "LARGEST_COPY", 1.5 * nbytes / free)
    times = {"native": 3.0, "transposed": 2.0, "packed": 1.0}
    monkeypatch.setattr(linear_layout, "layout_seconds", lambda *_: dict.fromkeys(shapes, times))
    layouts = linear_layout.fastest_layouts(model, 4)
    assert [shape for shape, layout in layouts.items() if layout == "packed"] == [best]


def test_small_models_are_transposed_without_a_measurement(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_layout, "layout_seconds", None)
    assert not next(iter(linears(engine(folder, "auto").model))).weight.is_contiguous()


def test_packing_is_refused_where_it_cannot_hold(folder: str, llama: Any) -> None:
    with pytest.raises(ConfigError, match="'packed' would copy weights that their trainer changes"):
        engine(llama, "packed")
    with pytest.raises(ConfigError, match=r"'packed': weights in torch\.float16.* cannot be packed"):
        engine(folder, "packed", dtype="float16")
    with pytest.raises(ConfigError, match="'packed' is not for deterministic 'strict'"):
        EngineConfig(linear_layout="packed", deterministic="strict")
