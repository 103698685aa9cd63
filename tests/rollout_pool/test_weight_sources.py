"""What a trainer holds, as buckets: which tensors, under which names, and how much at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rollout_pool import ConfigError, WeightSyncError
from rollout_pool.actors.weight_records import Bucket, Manifest
from rollout_pool.actors.weights import ModelWeights
from rollout_pool.weight_sync.shipment import packed
from rollout_pool.weight_sync.sources import open_source

CONFIG = LlamaConfig(
    vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.3,
)  # fmt: skip
LIMIT = 20_000


@pytest.fixture
def trainer() -> LlamaForCausalLM:
    return LlamaForCausalLM(CONFIG)


@pytest.fixture
def rollout() -> LlamaForCausalLM:
    return LlamaForCausalLM(CONFIG)


def install(
    model: torch.nn.Module | ModelWeights, source: Any, version: int = 1
) -> tuple[list[Bucket], Manifest]:
    """Everything of a source into a model; returns what was sent."""
    weights = model if isinstance(model, ModelWeights) else ModelWeights(model)
    buckets: list[Bucket] = []
    for item in packed(open_source(source, LIMIT)):
        if isinstance(item, Manifest):
            manifest = item
        else:
            weights.stage(version, item)
            buckets.append(item)
    weights.check(version, manifest)
    weights.commit(version)
    return buckets, manifest


def assert_same(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    values = dict(expected.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name].to(parameter.dtype)), name


def in_memory(kind: str, trainer: LlamaForCausalLM) -> Any:
    if kind == "state dict":
        return trainer.state_dict()
    if kind == "iterator":
        return ((name, parameter) for name, parameter in trainer.named_parameters())
    if kind == "compiled module":
        return torch.compile(trainer)
    return trainer


@pytest.mark.parametrize("kind", ["state dict", "iterator", "module", "compiled module"])
def test_weights_in_memory_arrive_in_bounded_buckets(
    kind: str, trainer: LlamaForCausalLM, rollout: LlamaForCausalLM
) -> None:
    buckets, manifest = install(rollout, in_memory(kind, trainer))
    assert_same(rollout, trainer)
    sizes = [sum(record.nbytes for record in bucket.records) for bucket in buckets]
    assert len(sizes) > 3
    assert max(sizes) <= LIMIT
    assert sum(sizes) == manifest.nbytes == sum(p.nbytes for p in trainer.parameters())


def test_tensor_above_the_bound_travels_alone() -> None:
    source = [("a", torch.zeros(10)), ("large", torch.zeros(LIMIT)), ("b", torch.zeros(10))]
    groups = [[name for name, _ in group] for group in open_source(source, LIMIT).groups]
    assert groups == [["a"], ["large"], ["b"]]


def test_tensors_are_asked_for_one_bucket_at_a_time() -> None:
    made: list[int] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(10):
            made.append(number)
            yield f"w{number}", torch.zeros(LIMIT // 8)  # two fill a bucket

    stream = packed(open_source(tensors(), LIMIT))
    next(stream)
    assert len(made) == 3  # the third is what did not fit


@pytest.mark.parametrize("shards", ["one file", "several files"])
def test_checkpoint_folder_arrives_under_the_models_names(
    shards: str, trainer: LlamaForCausalLM, rollout: LlamaForCausalLM, tmp_path: Path
) -> None:
    trainer.save_pretrained(tmp_path, max_shard_size="30KB" if shards == "several files" else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards == "several files")
    install(rollout, tmp_path)
    assert_same(rollout, trainer)


def test_safetensors_file_arrives_under_its_own_names(
    trainer: LlamaForCausalLM, rollout: LlamaForCausalLM, tmp_path: Path
) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({name: p.detach() for name, p in trainer.named_parameters()}, path)
    install(rollout, str(path))
    assert_same(rollout, trainer)


def test_checkpoint_whose_names_and_layout_are_of_another_time_is_converted(tmp_path: Path) -> None:
    """Mixtral's files hold every expert by itself; its module holds them stacked."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, initializer_range=0.3,
    )  # fmt: skip
    trainer, rollout = MixtralForCausalLM(config), MixtralForCausalLM(config)
    trainer.save_pretrained(tmp_path)
    index = tmp_path / "model.safetensors"
    assert index.is_file()
    install(rollout, tmp_path)
    assert_same(rollout, trainer)
    assert_same(rollout, AutoModelForCausalLM.from_pretrained(tmp_path))


@pytest.mark.parametrize("fault", ["nothing there", "no config", "cut short", "part missing"])
def test_checkpoint_that_cannot_be_read_is_named(
    fault: str, trainer: LlamaForCausalLM, rollout: LlamaForCausalLM, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    if fault != "nothing there":
        trainer.save_pretrained(folder, max_shard_size="30KB")
    if fault == "no config":
        (folder / "config.json").unlink()
    elif fault == "cut short":
        part = sorted(folder.glob("*.safetensors"))[0]
        part.write_bytes(part.read_bytes()[:-50])
    elif fault == "part missing":
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        lost = sorted(set(content["weight_map"].values()))[1]
        (folder / lost).unlink()
    before = {name: p.detach().clone() for name, p in rollout.named_parameters()}
    with pytest.raises(ConfigError, match=str(folder)):
        install(rollout, folder)
    assert all(torch.equal(p, before[name]) for name, p in rollout.named_parameters())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (7, "cannot read weights from int"),
        ({"w": [1.0]}, "w: weights are tensors, got list"),
        ({"w": torch.empty(3, device="meta")}, "w has no data"),
    ],
)
def test_what_is_no_source_is_refused(source: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        list(packed(open_source(source)))


# LoRA, with the real PEFT


def with_lora(model: torch.nn.Module, seed: int, **changes: Any) -> Any:
    """Adapters that do something: PEFT starts B at zero."""
    peft = pytest.importorskip("peft")
    settings = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"], **changes}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**settings))
    redraw(wrapped, seed)
    return wrapped


def redraw(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 23).unsqueeze(0)).logits


def pair(**changes: Any) -> tuple[Any, LlamaForCausalLM]:
    """A trainer with adapters and a rollout model with the same base."""
    base, rollout = LlamaForCausalLM(CONFIG), LlamaForCausalLM(CONFIG)
    rollout.load_state_dict(base.state_dict())
    return with_lora(base, 0, **changes), rollout


def test_only_adapters_travel_and_the_merged_model_is_the_trainers() -> None:
    trainer, rollout = pair()
    before = logits(rollout)
    buckets, manifest = install(rollout, trainer)
    sent = [record for bucket in buckets for record in bucket.records]
    assert all("lora" in record.name for record in sent)
    assert manifest.nbytes == sum(p.nbytes for p in trainer.parameters() if p.requires_grad)
    assert manifest.nbytes < sum(p.nbytes for p in rollout.parameters()) / 4
    torch.testing.assert_close(logits(rollout), logits(trainer), atol=1e-4, rtol=0)
    assert (logits(rollout) - before).abs().max() > 0.1


def test_hundredth_merge_is_bit_for_bit_the_first() -> None:
    trainer, rollout = pair()
    weights = ModelWeights(rollout)
    for version in range(1, 100):
        redraw(trainer, version)
        install(weights, trainer, version)
    fresh = LlamaForCausalLM(CONFIG)
    fresh.load_state_dict(
        {name.replace("base_model.model.", "").replace(".base_layer", ""): value
         for name, value in trainer.state_dict().items() if "lora_" not in name}
    )  # fmt: skip
    install(fresh, trainer)
    assert_same(rollout, fresh)


def test_weights_that_lose_their_adapter_get_their_base_back() -> None:
    trainer, rollout = pair()
    other, _ = pair(target_modules=["v_proj"])
    weights = ModelWeights(rollout)
    base = {name: p.detach().clone() for name, p in rollout.named_parameters()}
    install(weights, trainer, 1)
    install(weights, other, 2)
    changed = {name for name, p in rollout.named_parameters() if not torch.equal(p, base[name])}
    assert changed == {f"model.layers.{layer}.self_attn.v_proj.weight" for layer in (0, 1)}


def test_full_update_ends_what_adapters_were_merged_into() -> None:
    trainer, rollout = pair()
    full = LlamaForCausalLM(CONFIG)
    weights = ModelWeights(rollout)
    install(weights, trainer, 1)
    install(weights, full, 2)
    assert_same(rollout, full)
    install(weights, trainer, 3)
    expected = LlamaForCausalLM(CONFIG)
    expected.load_state_dict(full.state_dict())
    install(expected, trainer)
    assert_same(rollout, expected)


def test_several_adapters_weights_trained_whole_and_rank_stabilised_scaling() -> None:
    trainer, rollout = pair(modules_to_save=["lm_head"], use_rslora=True)
    import peft

    trainer.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    trainer.base_model.set_adapter(["default", "second"])
    redraw(trainer, 5)
    _, manifest = install(rollout, trainer)
    assert {"lm_head.weight"} == {r.name for r in manifest.tensors if "lora" not in r.name}
    assert (
        len([lora for lora in manifest.loras if lora.target.endswith("layers.0.self_attn.q_proj.weight")])
        == 2
    )
    torch.testing.assert_close(logits(rollout), logits(trainer), atol=1e-4, rtol=0)


def test_weights_stored_the_other_way_round_get_transposed_adapters() -> None:
    config = GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
    base, rollout = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
    rollout.load_state_dict(base.state_dict())
    trainer = with_lora(base, 0, target_modules=["c_attn"], fan_in_fan_out=True)
    install(rollout, trainer)
    torch.testing.assert_close(logits(rollout), logits(trainer), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "no plain LoRA"),
        ({"target_modules": ["embed_tokens"]}, "only LoRA on plain linear layers"),
        ({"lora_bias": True}, "no plain LoRA"),
    ],
)
def test_adapters_that_could_not_be_merged_are_refused(changes: dict[str, Any], said: str) -> None:
    trainer, _ = pair(**changes)
    with pytest.raises(ConfigError, match=said):
        open_source(trainer)


def test_adapter_on_a_tied_weight_is_refused_and_nothing_written() -> None:
    config = LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": True})
    base, rollout = LlamaForCausalLM(config), LlamaForCausalLM(config)
    trainer = with_lora(base, 0, target_modules=["lm_head"])
    before = logits(rollout)
    with pytest.raises(WeightSyncError, match="lm_head.weight has an adapter, but is tied"):
        install(rollout, trainer)
    assert torch.equal(logits(rollout), before)


def test_adapter_for_a_weight_that_is_not_there_or_of_another_size_is_refused() -> None:
    trainer, _ = pair()
    for change, said in (
        (
            {"intermediate_size": 40},
            r"down_proj.weight.lora_A.default \[4, 48\] and .* do not make \[32, 40\]",
        ),
        (
            {"num_hidden_layers": 1},
            "model.layers.1.self_attn.q_proj.weight has an adapter, but is not a weight",
        ),
    ):
        rollout = LlamaForCausalLM(LlamaConfig(**{**CONFIG.to_dict(), **change}))
        before = logits(rollout)
        with pytest.raises(WeightSyncError, match=said):
            install(rollout, trainer)
        assert torch.equal(logits(rollout), before)
