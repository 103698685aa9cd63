"""New weights for a model: what is refused, what is written, and where it lands in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from rollout_pool import WeightSyncError
from rollout_pool.actors.linear_layout import lay_out, one_layout
from rollout_pool.actors.weight_places import SplitShard
from rollout_pool.actors.weight_records import Bucket, Manifest
from rollout_pool.actors.weights import ModelWeights
from rollout_pool.weight_sync.shipment import packed
from rollout_pool.weight_sync.sources import open_source

Named = Iterable[tuple[str, torch.Tensor]]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def model(build: Callable[..., Any], small_config: Callable[..., dict[str, Any]]) -> Any:
    return build(LlamaConfig(**small_config()), seed=1)


@pytest.fixture
def new(build: Callable[..., Any], small_config: Callable[..., dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Other weights for the same model."""
    return dict(build(LlamaConfig(**small_config()), seed=2).state_dict())


def pack(source: Any, bucket_bytes: int = 20_000) -> tuple[list[Bucket], Manifest]:
    *buckets, manifest = packed(open_source(source, bucket_bytes))
    assert isinstance(manifest, Manifest)
    return [bucket for bucket in buckets if isinstance(bucket, Bucket)], manifest


def stage(weights: ModelWeights, version: int, buckets: Iterable[Bucket]) -> None:
    for bucket in buckets:
        weights.stage(version, bucket)


def install(weights: ModelWeights, source: Any, version: int = 1) -> Any:
    buckets, manifest = pack(source)
    stage(weights, version, buckets)
    weights.check(version, manifest)
    return weights.commit(version)


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def is_same(model: Any, values: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(parameter, values[name]) for name, parameter in model.named_parameters())


def test_commit_writes_in_place_and_keeps_memory_and_layout(model: Any, new: dict[str, torch.Tensor]) -> None:
    lay_out(model, one_layout(model, "transposed"))
    before = {name: (p, p.data_ptr(), p.stride()) for name, p in model.named_parameters()}
    assert before[UP][2][0] == 1  # stored by columns
    weights = ModelWeights(model)
    receipt = install(weights, new)
    assert is_same(model, new)
    after = {name: (p, p.data_ptr(), p.stride()) for name, p in model.named_parameters()}
    assert all(after[name][0] is before[name][0] and after[name][1:] == before[name][1:] for name in before)
    assert weights.version == receipt.version == 1
    assert (receipt.num_tensors, receipt.num_bytes) == (len(new), sum(t.nbytes for t in new.values()))
    assert receipt.weights_checksum == weights.checksum()


def test_equal_models_have_equal_checksums_and_other_ones_do_not(
    model: Any, new: dict[str, torch.Tensor], build: Callable[..., Any], small_config: Callable[..., Any]
) -> None:
    other = build(LlamaConfig(**small_config()), seed=3)
    before = ModelWeights(other).checksum()
    first, second = install(ModelWeights(model), new), install(ModelWeights(other), new)
    assert first.weights_checksum == second.weights_checksum != before
    assert first.checksum == second.checksum
    with torch.no_grad():
        other.model.norm.weight[3] += 1e-6
    assert ModelWeights(other).checksum() != first.weights_checksum


def altered(new: dict[str, torch.Tensor], change: str) -> dict[str, torch.Tensor]:
    values = dict(new)
    if change == "missing":
        del values[UP]
    elif change == "unknown":
        values["model.layers.9.mlp.up_proj.weight"] = values[UP]
    elif change == "shape":
        values[UP] = values[UP][:-1]
    elif change == "dtype":
        values[UP] = values[UP].to(torch.int32)
    elif change == "overflow":
        values[UP] = values[UP].double() * 1e300
    else:
        values[UP] = values[UP].clone()
        values[UP][3, 5] = {"nan": torch.nan, "inf": -torch.inf}[change]
    return values


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", f"{UP} is missing"),
        ("unknown", "model.layers.9.mlp.up_proj.weight is not a weight of this model"),
        ("shape", f"{UP} has shape [95, 64], here it is [96, 64]"),
        ("dtype", f"{UP} is int32, here it is float32"),
        ("nan", f"{UP} holds NaN or infinity"),
        ("inf", f"{UP} holds NaN or infinity"),
        ("overflow", f"{UP} has values too large for float32"),
    ],
)
def test_update_at_fault_is_refused_by_name_and_writes_nothing(
    model: Any, new: dict[str, torch.Tensor], change: str, said: str
) -> None:
    weights, before = ModelWeights(model), snapshot(model)
    with pytest.raises(WeightSyncError) as refused:
        install(weights, altered(new, change))
    assert str(refused.value) == f"weights of version 1 were refused: {said}"
    assert is_same(model, before)
    with pytest.raises(WeightSyncError, match="not staged and checked"):
        weights.commit(1)
    assert is_same(model, before)
    assert weights.version == 0
    install(weights, new)  # the next one is not affected
    assert is_same(model, new)


def flip(bucket: Bucket) -> Bucket:
    payload = [array.copy() for array in bucket.payload]
    payload[0][7] ^= 1
    return dataclasses.replace(bucket, payload=payload)


def cut(bucket: Bucket) -> Bucket:
    return dataclasses.replace(bucket, payload=[array[:-4] for array in bucket.payload])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda buckets: buckets[:2] + buckets[3:], "did not arrive"),
        (lambda buckets: [flip(buckets[0]), *buckets[1:]], "was damaged on its way"),
        (lambda buckets: [*buckets, buckets[2]], "came twice"),
        (lambda buckets: [cut(buckets[0]), *buckets[1:]], "was damaged on its way"),
    ],
    ids=["skipped", "flipped bit", "twice", "cut short"],
)
def test_bucket_that_does_not_arrive_as_it_was_sent_is_noticed(
    model: Any, new: dict[str, torch.Tensor], damage: Callable[[list[Bucket]], list[Bucket]], said: str
) -> None:
    weights, before = ModelWeights(model), snapshot(model)
    buckets, manifest = pack(new)
    assert len(buckets) > 3
    sent = {record.name for bucket in buckets for record in bucket.records}
    stage(weights, 1, damage(buckets))
    with pytest.raises(WeightSyncError, match=said) as refused:
        weights.check(1, manifest)
    assert any(name in str(refused.value) for name in sent)
    assert is_same(model, before)


def test_bucket_of_another_update_is_noticed(model: Any, new: dict[str, torch.Tensor]) -> None:
    weights, before = ModelWeights(model), snapshot(model)
    buckets, _ = pack(new)
    _, manifest = pack(altered(new, "missing") | {UP: new[UP] + 1})
    stage(weights, 1, buckets)
    with pytest.raises(WeightSyncError, match=f"{UP} is not the tensor that was announced"):
        weights.check(1, manifest)
    assert is_same(model, before)


def test_what_was_staged_for_one_version_does_not_serve_another(
    model: Any, new: dict[str, torch.Tensor]
) -> None:
    weights, before = ModelWeights(model), snapshot(model)
    buckets, manifest = pack(new)
    stage(weights, 1, buckets[:2])
    stage(weights, 2, buckets[2:])
    with pytest.raises(WeightSyncError, match="did not arrive"):
        weights.check(2, manifest)
    stage(weights, 3, buckets)
    weights.check(3, manifest)
    with pytest.raises(WeightSyncError, match="version 2 were not staged"):
        weights.commit(2)
    assert is_same(model, before)


def test_what_comes_late_of_an_attempt_that_was_given_up_is_passed_over(
    model: Any, new: dict[str, torch.Tensor]
) -> None:
    weights = ModelWeights(model)
    late, _ = pack({name: value + 1 for name, value in new.items()})
    buckets, manifest = pack(new)
    weights.stage(1, late[0], attempt=1)
    weights.discard(1)
    weights.stage(1, late[0], attempt=1)
    weights.stage(1, buckets[0], attempt=2)
    weights.stage(1, late[1], attempt=1)
    weights.discard(1)  # it, too, may come late
    for bucket in buckets[1:]:
        weights.stage(1, bucket, attempt=2)
    with pytest.raises(WeightSyncError, match="version 1 were given up"):
        weights.check(1, manifest, attempt=1)
    weights.check(1, manifest, attempt=2)
    weights.commit(1)
    assert is_same(model, new)


def test_commit_without_check_writes_nothing(model: Any, new: dict[str, torch.Tensor]) -> None:
    weights, before = ModelWeights(model), snapshot(model)
    stage(weights, 1, pack(new)[0])
    with pytest.raises(WeightSyncError, match="not staged and checked"):
        weights.commit(1)
    assert is_same(model, before)


def test_many_faults_are_counted(model: Any) -> None:
    with pytest.raises(WeightSyncError, match=r"is missing \(and 21 more\)$"):
        install(ModelWeights(model), {"lm_head.weight": model.lm_head.weight})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_floats_of_another_width_are_cast(model: Any, new: dict[str, torch.Tensor], dtype: Any) -> None:
    install(ModelWeights(model), {name: tensor.to(dtype) for name, tensor in new.items()})
    assert is_same(model, {name: tensor.to(dtype).float() for name, tensor in new.items()})


@pytest.fixture
def tied(build: Callable[..., Any], small_config: Callable[..., dict[str, Any]]) -> Any:
    return build(LlamaConfig(**small_config(tie_word_embeddings=True)), seed=1)


def test_tied_embedding_may_come_under_either_name_or_both(tied: Any) -> None:
    embedding = "model.embed_tokens.weight"
    values = {name: tensor + 1 for name, tensor in tied.state_dict().items() if name != "lm_head.weight"}
    for version, names in enumerate([(embedding,), ("lm_head.weight",), (embedding, "lm_head.weight")], 1):
        sent = {name: tensor + version for name, tensor in values.items() if name != embedding}
        sent |= dict.fromkeys(names, values[embedding] * version)
        install(ModelWeights(tied), sent, version)
        assert torch.equal(tied.get_input_embeddings().weight, values[embedding] * version)
        assert tied.lm_head.weight is tied.get_input_embeddings().weight


def test_tied_embedding_with_two_values_is_refused(tied: Any) -> None:
    sent = dict(tied.state_dict())
    sent["lm_head.weight"] = sent["lm_head.weight"] + 1
    with pytest.raises(
        WeightSyncError, match="lm_head.weight and model.embed_tokens.weight differ, but are one weight here"
    ):
        install(ModelWeights(tied), sent)


def test_head_that_is_tied_by_configuration_alone_gets_the_embedding(tied: Any) -> None:
    """As on a shard, where the two are split apart."""
    sent = {name: tensor + 1 for name, tensor in tied.state_dict().items() if name != "lm_head.weight"}
    tied.lm_head.weight = torch.nn.Parameter(torch.zeros_like(tied.lm_head.weight))
    install(ModelWeights(tied), sent)
    for weight in (tied.lm_head.weight, tied.get_input_embeddings().weight):
        assert torch.equal(weight, sent["model.embed_tokens.weight"])


def test_buffers_need_not_be_sent_and_are_written_when_they_are() -> None:
    model = torch.nn.BatchNorm1d(3)
    weights = ModelWeights(model)
    install(weights, {"weight": torch.full((3,), 2.0), "bias": torch.ones(3)})
    assert model.weight.tolist() == [2.0] * 3
    assert model.running_var.tolist() == [1.0] * 3
    other = torch.nn.BatchNorm1d(3)
    other.running_mean += 5
    other.num_batches_tracked += 7
    install(weights, other.state_dict(), 2)
    assert model.running_mean.tolist() == [5.0] * 3
    assert int(model.num_batches_tracked) == 7


def test_every_rank_writes_its_own_part() -> None:
    full = {"weight": torch.arange(48.0).reshape(8, 6), "bias": torch.arange(8.0)}
    cases = [
        (SplitShard((8, 6), 0, 1, 2), full["weight"][4:]),
        (SplitShard((8, 6), 1, 0, 2), full["weight"][:, :3]),
        (SplitShard((8, 6), 0, 1, 2, blocks=2), full["weight"][[2, 3, 6, 7]]),
    ]
    for shard, expected in cases:
        model = torch.nn.Linear(expected.shape[1], 8)
        model.weight = torch.nn.Parameter(torch.zeros_like(expected).t().contiguous().t())
        receipt = install(ModelWeights(model, {"weight": shard}), full)
        assert torch.equal(model.weight, expected)
        assert torch.equal(model.bias, full["bias"])
        assert receipt.num_bytes == 4 * (48 + 8)
        with pytest.raises(WeightSyncError, match=r"weight has shape \[4, 6\], here it is \[8, 6\]"):
            install(ModelWeights(model, {"weight": shard}), full | {"weight": full["weight"][:4]})


def test_source_is_not_read_again_once_it_is_staged(model: Any, new: dict[str, torch.Tensor]) -> None:
    """Tensors that came over a transport are received into memory that is used again."""
    expected = {name: tensor.clone() for name, tensor in new.items()}
    *buckets, manifest = packed(open_source(new, 20_000), as_bytes=False)
    weights = ModelWeights(model)
    stage(weights, 1, buckets)  # type: ignore[arg-type]
    for tensor in new.values():
        tensor.zero_()
    weights.check(1, manifest)  # type: ignore[arg-type]
    weights.commit(1)
    assert is_same(model, expected)


def test_model_with_transposed_projections_and_tied_head(build: Callable[..., Any]) -> None:
    config = GPT2Config(vocab_size=160, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    model, other = build(config, seed=1), build(config, seed=2)
    install(ModelWeights(model), other)
    assert is_same(model, dict(other.named_parameters()))
