"""What is trusted and what is not: no code from checkpoints, no pickles, no open ports, no prompts in logs."""

from __future__ import annotations

import ast
import inspect
import json
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from waiting import wait_until

from rollout_pool import (
    ConfigError,
    Engine,
    EngineConfig,
    PoolConfig,
    RolloutPool,
    RolloutRequest,
    SamplingParams,
)
from rollout_pool.actors.loading import load_config, load_model, load_tokenizer
from rollout_pool.actors.rank_worker import follow
from rollout_pool.cli import main
from rollout_pool.preflight import check_split

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("rollout_pool", "actors", "kernels")
UNPICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
FORBIDDEN = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load"), ("yaml", "unsafe_load"),
             ("yaml", "full_load"), ("pd", "read_pickle"), ("ray", "cloudpickle")}  # fmt: skip
SECRET = "xylophone"
FEW = SamplingParams(max_new_tokens=4, ignore_eos=True)


def calls(*folders: str) -> Iterator[tuple[str, ast.AST]]:
    """Every node of the sources, with its file."""
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            if not path.is_symlink():
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    yield str(path.relative_to(ROOT)), node


def test_no_source_reads_a_pickle_or_yaml_that_makes_objects() -> None:
    found = []
    for where, node in calls(*PRODUCT, "examples", "benchmarks"):
        if isinstance(node, ast.Import):
            found += [(where, alias.name) for alias in node.names if alias.name.split(".")[0] in UNPICKLERS]
        elif isinstance(node, ast.ImportFrom):
            found += [(where, node.module)] if (node.module or "").split(".")[-1] in UNPICKLERS else []
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [(where, node.attr)] if (node.value.id, node.attr) in FORBIDDEN else []
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            found.append((where, node.arg))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("eval", "exec")
        ):
            found.append((where, node.func.id))
    assert found == []


def test_who_loads_says_whether_code_is_trusted_and_weights_come_from_safetensors() -> None:
    num_calls = 0
    for where, node in calls(*PRODUCT):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "from_pretrained"
        ):
            num_calls += 1
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            if node.args and ast.unparse(node.args[0]) == "None":  # from memory
                continue
            if "Model" in ast.unparse(node.func.value):
                assert where == "actors/loaded_weights.py"  # whose callers pass the trust on
                assert isinstance(given["use_safetensors"], ast.Constant)
                assert given["use_safetensors"].value is True
            else:
                assert "trust_remote_code" in given, where
    assert num_calls >= 4


def test_no_code_is_trusted_unless_asked_for() -> None:
    assert PoolConfig(model="m").trust_remote_code is False
    for function in (Engine.__init__, follow):
        assert inspect.signature(function).parameters["trust_remote_code"].default is False
    for function in (load_model, load_config, load_tokenizer):
        trust = inspect.signature(function).parameters["trust_remote_code"]
        assert trust.default is trust.empty, "who calls it has to say"


@pytest.fixture
def own_code(tiny_model_dir: str, tmp_path: Path) -> tuple[Path, Path]:
    """A model folder with code of its own, and the file that this code makes when it runs."""
    folder, mark = tmp_path / "own", tmp_path / "ran"
    shutil.copytree(tiny_model_dir, folder)
    (folder / "own_code.py").write_text(
        f"open({str(mark)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    settings = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    (folder / "config.json").write_text(json.dumps({**settings, "model_type": "own", "auto_map": own}))
    return folder, mark


def test_code_in_a_checkpoint_does_not_run_unless_asked_for(
    own_code: tuple[Path, Path], tiny_model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, mark = own_code
    wanted = "if you trust that code, set trust_remote_code: true"
    (tmp_path / "p.txt").write_text("hello\n")
    (tmp_path / "c.yaml").write_text(f"model: {folder}\n")
    (tmp_path / "o.jsonl").write_text("")
    for call in (
        lambda: Engine(str(folder)),
        lambda: check_split(PoolConfig(model=str(folder), tensor_parallel_size=2)),
    ):
        with pytest.raises(ConfigError, match=wanted):
            call()
    for command in (["verify", str(tmp_path / "o.jsonl")], ["validate-tp"]):
        assert main([*command, "--config", str(tmp_path / "c.yaml")]) == 2
        assert wanted in capsys.readouterr().err
    settings = json.loads((Path(tiny_model_dir) / "tokenizer_config.json").read_text())
    lone = tmp_path / "tokenizer"
    shutil.copytree(folder, lone)
    shutil.copy(Path(tiny_model_dir) / "config.json", lone / "config.json")
    settings |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "own_code.OwnTokenizer"]},
    }
    (lone / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=wanted):
        Engine(tiny_model_dir, tokenizer=str(lone))
    assert not mark.exists()
    load_config(str(folder), trust_remote_code=True)
    assert mark.exists(), "this is what would have run"


class _Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_beside_the_weights_is_not_read(tiny_model_dir: str, tmp_path: Path) -> None:
    folder, mark = tmp_path / "both", tmp_path / "ran"
    shutil.copytree(tiny_model_dir, folder)
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        torch.save(_Payload(mark), folder / name)
    Engine(str(folder), EngineConfig(num_slots=2, max_length=32)).generate(["hi"], FEW)
    assert not mark.exists()


def listening(pid: int) -> set[str]:
    """The addresses on which a process listens."""
    sockets = psutil.Process(pid).net_connections("inet")
    return {entry.laddr.ip for entry in sockets if entry.status == psutil.CONN_LISTEN}


def test_the_store_and_the_line_of_ranks_listen_where_they_are_told_alone() -> None:
    from rollout_pool.actors.rank_group import open_store
    from rollout_pool.actors.rank_messages import Announcer

    before = listening(os.getpid())
    store, address = open_store("127.0.0.1")
    line = Announcer("127.0.0.1")
    try:
        assert address.startswith("127.0.0.1:")
        assert listening(os.getpid()) - before == {"127.0.0.1"} - before
        assert {"127.0.0.1"} <= listening(os.getpid())
    finally:
        line.close()
        del store


def secrets() -> list[Any]:
    """Prompts that hold the word, those that are served and those that fail in every way."""
    chat = [{"role": "user", "content": f"the {SECRET}"}]
    stop = SamplingParams(max_new_tokens=4, stop=f"{SECRET}s", ignore_eos=True)
    return [
        f"a {SECRET}", chat, f"{SECRET} " * 60, [SECRET], [{"role": "user", "content": SECRET}, 3], f"{SECRET}\ud800",
        [{"role": "user", "text": SECRET}], RolloutRequest(f"my {SECRET}", stop, metadata={"answer": SECRET}),
        RolloutRequest([5, 6], FEW.model_copy(update={"stop_token_ids": (999,), "stop": (SECRET,)})),
    ]  # fmt: skip


def test_neither_logs_nor_errors_of_an_engine_hold_a_prompt(
    tiny_model_dir: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    engine = Engine(tiny_model_dir, EngineConfig(num_slots=3, max_length=64), dtype="float32")
    groups = engine.generate(secrets(), FEW)
    assert [group.error is None for group in groups] == [True, True, *[False] * 5, True, False]
    engine.submit(RolloutRequest(f"{SECRET} {SECRET}", FEW, request_id="gone"))
    engine.step()
    engine.abort("gone")
    engine.model.lm_head.weight.data.fill_(float("nan"))
    (broken,) = engine.generate([f"a {SECRET}"], FEW)
    assert "not finite" in str(broken.error)
    said = [*(group.error or "" for group in groups), str(broken.error), caplog.text, *capfd.readouterr()]
    assert SECRET not in "".join(said)


@pytest.mark.slow
def test_a_pool_logs_no_prompt_and_its_ranks_listen_on_this_host_alone(
    cluster: None, tiny_model_dir: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Looked for in the logs of all of Ray's processes, also of an actor that died with prompts in it."""
    import ray

    plain = ray.remote(_Plain).options(num_cpus=0).remote()
    of_ray = listening(ray.get(plain.pid.remote())) - {"127.0.0.1", "::1"}
    config = PoolConfig(
        model=tiny_model_dir,
        tensor_parallel_size=2,
        cpus_per_actor=1,
        engine=EngineConfig(num_slots=3, max_length=256),
    )
    pool = RolloutPool.remote(config)
    (actor,) = ray.get(pool.ready.remote())
    for rank in actor.ranks:
        addresses = [
            entry.laddr.ip
            for entry in psutil.Process(rank.pid).net_connections("inet")
            if entry.status == psutil.CONN_LISTEN
        ]
        assert sum(not ip.startswith("127.") for ip in addresses) <= 1, "Ray itself has one"
        assert set(addresses) - of_ray <= {"127.0.0.1"}
        assert rank.rank or "127.0.0.1" in addresses
    long = SamplingParams(n=1000, max_new_tokens=200, ignore_eos=True)  # still runs when it is killed
    groups = ray.get(pool.rollout.remote(secrets(), FEW))
    lost = pool.rollout.remote([f"a long {SECRET}"] * 3, long)
    is_running = lambda: any(stats.live_rows for stats in ray.get(pool.stats.remote()).actors)  # noqa: E731
    wait_until(is_running, "nothing runs")
    os.kill(actor.pid, signal.SIGKILL)
    wait_until(lambda: ray.get(pool.stats.remote()).actors_lost, "nobody noticed")
    assert any(group.error for group in groups)
    assert SECRET not in "".join(group.error or "" for group in groups)
    ray.get(pool.shutdown.remote())
    ray.get(lost, timeout=60)
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    texts = {path: path.read_bytes() for path in logs.rglob("*") if path.is_file()}
    assert any(b"was lost and is replaced" in text for text in texts.values())
    assert [path.name for path, text in texts.items() if SECRET.encode() in text] == []
    assert SECRET not in "".join(capfd.readouterr())


class _Plain:
    """An actor in which nothing of ours runs."""

    def pid(self) -> int:
        return os.getpid()
