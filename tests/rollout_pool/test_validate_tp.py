"""`rollout-pool validate-tp` for real: ranks as Ray actors, a small model split over them, and what goes wrong."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rollout_pool.cli import main
from rollout_pool.commands import validate_tp

VOCAB = 160


def save_llama(folder: Path, **changes: Any) -> None:
    """A random Llama in float32, without a tokenizer, whose greedy tokens vary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": False,
        "initializer_range": 0.2, **changes,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("validate")
    save_llama(folder / "model")
    save_llama(folder / "eight", num_attention_heads=8, num_key_value_heads=8)
    engine = "engine: {num_slots: 4, max_length: 48}\ndtype: float32\nstart_timeout_s: 240\n"
    (folder / "c.yaml").write_text(f"model: {folder / 'model'}\n{engine}")
    (folder / "eight.yaml").write_text(f"model: {folder / 'eight'}\n{engine}")
    (folder / "p.jsonl").write_text("[5, 6, 7]\n[9, 10, 11, 12, 13, 14]\n[20, 21, 22]\n")
    (folder / "long.jsonl").write_text(f"[5, 6, 7]\n{list(range(3, 50))}\n")
    return folder


SMALL = ("--new-tokens", "8", "--samples", "2", "--num-prompts", "2")


def options(folder: Path, *more: str) -> list[str]:
    return ["--config", str(folder / "c.yaml"), "--prompts", str(folder / "p.jsonl"), *SMALL, *more]


def run(folder: Path, after_load: Any, *more: str) -> int:
    parser = argparse.ArgumentParser()
    validate_tp.add_arguments(parser)
    return validate_tp.run(parser.parse_args(options(folder, *more)), after_load)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_two_ranks_of_a_small_model_pass(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "o.json"
    status = main(["validate-tp", *options(folder, "--tp", "1,2", "--json", str(path))])
    output = capsys.readouterr().out
    assert status == 0, output
    assert output.endswith("checks passed\n")
    assert "FAILED" not in output
    data = json.loads(path.read_text())
    assert data["passed"] is True
    assert data["violations"] == []
    one, two = data["sizes"]
    assert [(size["size"], size["dtype"], len(size["ranks"])) for size in (one, two)] == [
        (1, "float32", 1),
        (2, "float32", 2),
    ]
    found = {finding["check"]: finding for finding in two["findings"]}
    assert found["greedy tokens"]["values"] == {"equal": 16, "total": 16, "gap": 0.0}
    assert found["sampled tokens"]["values"] == {"equal": 32, "total": 32}
    prefill = found["shared prefill"]["values"]
    assert (prefill["equal"], prefill["shared_tokens"], prefill["separate_tokens"]) == (32, 9, 18)
    assert found["logprobs"]["values"]["tokens"] == 48
    assert 0 < found["logits"]["values"]["absolute_max"] < 1e-4
    assert [name for name in found if name.startswith("hidden")] == [
        f"hidden states after layer {layer} of 3" for layer in (1, 2, 3)
    ]
    whole, parts = one["ranks"][0], two["ranks"]
    assert {rank["device"] for rank in parts} == {"cpu"}
    for rank in parts:
        assert whole["elements"] / 2 <= rank["elements"] < whole["elements"]
        assert rank["weight_bytes"] == 4 * rank["elements"]
        assert rank["kv_bytes"] * 2 == whole["kv_bytes"]
        assert rank["peak_bytes"] > rank["weight_bytes"]
    for rank in (whole, *parts):
        assert f"{rank['elements']:,}" in output
    assert one["tokens_per_second"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_one_wrong_element_on_one_rank_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.layers.1.mlp.down_proj.weight"

    def corrupt(model: Any, rank: int) -> None:
        import torch

        parameter = model.get_parameter(name)
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if local.shape[1] < model.config.intermediate_size and rank == 1:
            with torch.no_grad():
                local[3, 5] += 4.0

    assert run(folder, corrupt, "--tp", "2", "--json", str(folder / "bad.json")) == 1
    output = capsys.readouterr().out
    lines = output.splitlines()
    at = lines.index(
        "FAILED size 2, float32, parameters: faults in 30 tensors of 2 ranks: 1 (tolerance: equal bits)"
    )
    assert lines[at + 1].startswith(f"  rank 1: {name} (split in dimension 1): 1 of 3072 elements")
    assert "by up to 4.00e+00" in lines[at + 1]
    sizes = json.loads((folder / "bad.json").read_text())["sizes"]
    passed = {(size["size"], found["check"]): found["passed"] for size in sizes for found in size["findings"]}
    assert not passed[2, "hidden states after layer 2 of 3"]
    assert passed[2, "hidden states after layer 1 of 3"]
    assert not passed[2, "logits"]
    assert not passed[2, "logprobs"]
    assert passed[2, "same bits on ranks"]
    assert all(value for (size, _), value in passed.items() if size == 1)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_sizes_that_cannot_be_are_refused_in_time_and_one_is_measured(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(folder / "eight.yaml")
    assert main(["validate-tp", "--config", config, *SMALL, "--tp", "3,8"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (three,) = [line for line in lines if line.startswith("FAILED size 3")]
    assert "8" in three
    assert "3" in three.partition("refused")[2]
    (eight,) = [line for line in lines if line.startswith("FAILED size 8")]
    assert "8 ranks" in eight
    assert "the cluster has 4 CPUs" in eight
    assert any(line.startswith("| 1 ") and "equal bits" in line and " ok " in line for line in lines)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_rank_that_dies_fails_its_size_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def die(model: Any, rank: int) -> None:
        import os

        if rank == 1:
            os._exit(1)

    assert run(folder, die, "--tp", "2", "--timeout", "200") == 1
    output = capsys.readouterr().out
    died = "FAILED size 2, float32, failed: apply_on: rank 1 of 2: Actor(Died|Unavailable)Error"
    assert re.search(died, output)
    assert any(line.startswith("| 1 ") and " ok " in line for line in output.splitlines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "two"], "--tp two: expected numbers of ranks, as in 1,2,4, got 'two'"),
        (["--tp", "1,0"], "--tp 1,0: expected numbers of ranks"),
        (["--tp", "1,,2"], "--tp 1,,2: expected numbers of ranks"),
        (["--tp", "-2"], "--tp -2: expected numbers of ranks"),
        (["--tp", ""], "--tp : expected numbers of ranks"),
        (["--dtype", "int3"], "dtype: Input should be"),
        (["--tolerance", "nothing=1"], "--tolerance nothing=1: expected [DTYPE.]NAME=VALUE"),
        (["--new-tokens", "0"], "--new-tokens: expected a number above 0, got 0"),
        (["--timeout", "-1"], "--timeout: expected a number above 0, got -1"),
        (["--json", "no/o.json"], "cannot write no/o.json: there is no such folder"),
        (["--config", "no.yaml"], "cannot read configuration no.yaml"),
        (["--prompts", "no.txt"], "cannot read no.txt"),
        (["--prompts", "{folder}/long.jsonl"], "prompt 1: prompt of 47 tokens + max_new_tokens 8 = 55 exceeds"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_starts_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    given = [argument.replace("{folder}", str(folder)) for argument in arguments]
    joined = [f"{given[0]}={given[1]}"]  # a value may begin with a dash
    assert main(["validate-tp", *options(folder), *joined]) == 2
    output, errors = capsys.readouterr()
    assert message in errors
    assert errors.count("\n") == 1
    assert output == ""


def test_a_model_that_is_none_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "none").mkdir(exist_ok=True)
    (folder / "none" / "config.json").write_text('{"model_type": "no such"}')
    (folder / "none.yaml").write_text(f"model: {folder / 'none'}\n")
    assert main(["validate-tp", "--config", str(folder / "none.yaml")]) == 2
    assert "cannot load model" in capsys.readouterr().err


def test_sizes_are_read_once_each_in_order() -> None:
    assert validate_tp.parse_sizes("4, 1,2,2") == [1, 2, 4]


def test_prompts_without_a_tokenizer_are_random_ids_and_the_same_each_time(folder: Path) -> None:
    from rollout_pool.commands.validation_plan import make_plan, working_dtype
    from rollout_pool.run_config import RunConfig

    config = RunConfig.load(folder / "c.yaml", {"dtype": "auto"})
    plan = make_plan(config, None, 3, 4, 2)
    assert len(plan.prompts) == 3
    assert all(0 <= token < VOCAB for prompt in plan.prompts for token in prompt)
    assert plan == make_plan(config, None, 3, 4, 2)
    assert working_dtype(config) == "float32"


@pytest.mark.parametrize("family", ["Qwen3Moe", "Gemma3Text"])
def test_a_tokenizer_without_a_vocabulary_counts_as_none(family: str, tmp_path: Path) -> None:
    """Of some families Transformers makes one up where there is no file; every text is the same to it."""
    import transformers

    from rollout_pool.commands.validation_plan import make_plan
    from rollout_pool.run_config import RunConfig

    config = getattr(transformers, f"{family}Config")(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    plan = make_plan(RunConfig.load(None, {"model": str(tmp_path)}), None, 4, 4, 2)
    assert all(len(prompt) > 3 for prompt in plan.prompts)
    assert all(0 <= token < VOCAB for prompt in plan.prompts for token in prompt)


def test_prompts_of_a_model_with_a_tokenizer_are_texts(tiny_model_dir: str) -> None:
    from rollout_pool.commands.validation_plan import TEXTS, make_plan
    from rollout_pool.run_config import RunConfig

    plan = make_plan(RunConfig.load(None, {"model": tiny_model_dir}), None, 8, 4, 2)
    assert len(plan.prompts) == len(TEXTS) == len(set(plan.prompts))
