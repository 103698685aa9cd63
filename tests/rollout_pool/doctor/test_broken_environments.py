"""The doctor names the fault: each environment here is really broken, by files, variables or settings."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_pool.cli import main
from rollout_pool.doctor import devices, packages, process, storage
from rollout_pool.doctor.check import Check, Checks, guarded, ok
from rollout_pool.doctor.devices import Gpus
from rollout_pool.doctor.examination import Wanted, examine

ROOT = Path(__file__).resolve().parents[3]
NO_LISTENER = "127.0.0.1:1"


def consume(checks: Checks[Any]) -> dict[str, Check]:
    """By name; of several of one name the worst."""
    found: dict[str, Check] = {}
    for check in checks:
        if check.name not in found or check.status == "failed":
            found[check.name] = check
    return found


@contextmanager
def no_cluster() -> Iterator[None]:
    raise AssertionError("the checks before the cluster need none")
    yield


@pytest.fixture
def before_cluster(tmp_path: Path, tiny_model_dir: str) -> Callable[..., dict[str, Check]]:
    """``before_cluster(**settings)``: every check that needs no Ray, on a copy of the tiny model."""

    def run(**settings: Any) -> dict[str, Check]:
        model = tmp_path / "model"
        if not model.exists():
            shutil.copytree(tiny_model_dir, model)
        values = {"model": str(model), "engine": {"num_slots": 2, "max_length": 64}, **settings}
        (tmp_path / "c.yaml").write_text(json.dumps(values))
        wanted = Wanted(tmp_path / "c.yaml", tmp_path, None, no_cluster)
        about = itertools.takewhile(lambda found: found[0] != "cluster", examine(wanted))
        return consume(check for _, check in about)  # type: ignore[arg-type]

    return run


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """``installed(name, version)``: a package of that name and version before all others on ``sys.path``."""
    site = tmp_path / "site"

    def install(name: str, version: str) -> Path:
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(site))
        return site

    return install


def test_a_good_environment_has_no_failure(before_cluster: Callable[..., dict[str, Check]]) -> None:
    found = before_cluster()
    assert [check for check in found.values() if check.status == "failed"] == []
    for name in (
        "Python",
        "packages",
        "configuration",
        "model",
        "tokenizer",
        "chat template",
        "memory",
        "output",
    ):
        assert found[name].status == "ok", found[name]


@pytest.mark.parametrize(
    ("settings", "name", "found", "remedy"),
    [
        ({"engine": {"num_slots": 65536, "max_length": 100_000}}, "memory", "engine.num_slots 65536 x engine.max_length 100000 needs", "lower engine.num_slots to at most"),
        ({"engine": {"num_slots": 2, "max_length": 64, "deterministic": "strict", "layout": "aligned"}}, "configuration", "deterministic: 'strict' needs layout 'ragged'", "correct the file"),
        ({"engine": {"num_slot": 2}}, "configuration", "engine.num_slot: unknown key; did you mean 'num_slots'?", "correct the file"),
        ({"num_actors": 2, "cpus_per_actor": 4096}, "actors", "2 actors with 4096 CPUs each were asked for", "lower num_actors or cpus_per_actor"),
        ({"tensor_parallel_size": 3}, "model", "4 attention heads cannot be divided by tensor_parallel_size 3", "it can be 2"),
        ({"model": "/nowhere/at/all"}, "model", "there is no directory '/nowhere/at/all'", "give one in Hugging Face format"),
        ({"model": "nobody/has-this"}, "model", "'nobody/has-this' is neither a folder nor in the hub's cache", "give the path of a folder"),
        ({"tokenizer": "."}, "model", "has no tokenizer files", ""),
    ],
)  # fmt: skip
def test_a_configuration_at_fault_is_named(
    before_cluster: Callable[..., dict[str, Check]],
    settings: dict[str, Any],
    name: str,
    found: str,
    remedy: str,
) -> None:
    check = before_cluster(**settings)[name]
    assert check.status == "failed"
    assert found in check.found
    assert remedy in check.remedy


def break_tokenizer(model: Path) -> None:
    for file in model.glob("*token*"):
        file.unlink()
    (model / "chat_template.jinja").unlink(missing_ok=True)


def cut_weights(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def without_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()


def rewrite(**changes: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, **changes}))

    return change


@pytest.mark.parametrize(
    ("break_model", "name", "status", "found"),
    [
        (break_tokenizer, "tokenizer", "failed", "there is none in"),
        (without_template, "chat template", "warning", "chat prompts will fail"),
        (cut_weights, "model", "failed", "model.safetensors is cut off"),
        (rewrite(model_type="t5"), "model", "failed", "'t5' is not a causal LM"),
        (rewrite(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "supported", "failed", "uses dynamic RoPE scaling"),
        (rewrite(vocab_size=64), "tokenizer", "warning", "of 128 tokens, and the model knows 64"),
    ],
)  # fmt: skip
def test_a_model_at_fault_is_named(
    before_cluster: Callable[..., dict[str, Check]],
    tmp_path: Path,
    tiny_model_dir: str,
    break_model: Callable[[Path], None],
    name: str,
    status: str,
    found: str,
) -> None:
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    break_model(tmp_path / "model")
    checks = before_cluster()
    assert checks[name].status == status
    assert found in checks[name].found
    assert checks[name].remedy
    if status == "failed" and name == "model":  # nothing is said twice
        assert checks["memory"].status == "skipped"


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU")
def test_a_gpu_that_is_asked_for_and_not_there_is_named(
    before_cluster: Callable[..., dict[str, Check]],
) -> None:
    found = before_cluster(gpus_per_actor=1)
    assert found["GPU"].status == "failed"
    assert "set gpus_per_actor: 0" in found["GPU"].remedy
    assert found["actors"].status == "failed"


@pytest.mark.parametrize(
    ("name", "version"), [("transformers", "4.57.1"), ("ray", "2.9.0"), ("torch", "9.0")]
)
def test_a_version_out_of_range_is_named(
    installed: Callable[[str, str], Path], name: str, version: str
) -> None:
    installed(name, version)
    check = consume(packages.check_packages())[f"package {name}"]
    assert check.status == "failed"
    assert check.found.startswith(f"version {version}; {name}")
    assert check.remedy.startswith(f"pip install '{name}<") or check.remedy.startswith(
        f"pip install '{name}>"
    )


def test_ranges_are_those_of_the_packages_own_metadata(installed: Callable[[str, str], Path]) -> None:
    (requirement,) = (one for one in packages.requirements() if one.name == "transformers")
    (lowest,) = (one.version for one in requirement.specifier if one.operator == ">=")
    installed("transformers", lowest)
    assert "package transformers" not in consume(packages.check_packages())


def test_a_folder_that_hides_a_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("__version__ = '4.0'\n")
    (tmp_path / "random.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    check = consume(packages.check_packages())["package transformers"]
    assert check.status == "failed"
    assert check.found.startswith(f"{tmp_path}/transformers/__init__.py hides transformers")
    monkeypatch.chdir(tmp_path)  # where Ray's workers would find it
    check = consume(packages.check_shadows(packages.leading_places({"PYTHONPATH": str(ROOT)})))["module path"]
    assert check.status == "warning"
    assert str(tmp_path / "random.py") in check.found
    assert str(tmp_path / "transformers") in check.found


def test_a_folder_called_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert consume(packages.check_kernels())["kernels"].status == "ok"
    monkeypatch.syspath_prepend(str(ROOT))
    check = consume(packages.check_kernels())["kernels"]
    assert check.status == "failed"
    assert str(ROOT / "kernels") in check.found


def test_a_python_that_is_too_old_is_named() -> None:
    check = consume(packages.check_python("3.10.2"))["Python"]
    assert check.status == "failed"
    assert check.remedy == "make an environment with Python >=3.11"


def test_missing_triton_is_named_where_a_gpu_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert consume(devices.check_triton(Gpus(), True))["Triton"].status == "failed"
    assert consume(devices.check_triton(Gpus(), False))["Triton"].status == "skipped"


@pytest.mark.skipif("__import__('torch').version.cuda is not None", reason="torch is a CUDA build")
def test_a_cpu_build_on_a_machine_with_a_driver_is_named(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("NVRM version")
    check = consume(devices.check_torch(tmp_path / "version"))["torch build"]
    assert check.status == "failed"
    assert "install a CUDA build of torch" in check.remedy


@pytest.mark.parametrize(
    ("environment", "name", "found"),
    [
        ({}, "OMP_WAIT_POLICY", "not set"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "OMP_WAIT_POLICY", "ACTIVE"),
        ({"OMP_NUM_THREADS": "64"}, "OMP_NUM_THREADS", "64, and there are 4 cores"),
        ({"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS", "many"),
    ],
)
def test_variables_that_slow_threads_down_are_named(
    environment: dict[str, str], name: str, found: str
) -> None:
    check = consume(process.check_threads(environment, num_cores=4))[name]
    assert (check.status, check.found.startswith(found)) == ("warning", True)


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    for output, found in (
        (Path("/proc/results.jsonl"), "/proc cannot be written"),
        (tmp_path / "no" / "results.jsonl", f"there is no folder {tmp_path / 'no'}"),
    ):
        check = consume(storage.check_output(output))["output"]
        assert check.status == "failed"
        assert check.found.startswith(found)


def test_limits_that_are_too_low_are_named(tmp_path: Path) -> None:
    assert consume(process.check_open_files((256, 1024)))["open files"].status == "warning"
    assert consume(process.check_open_files((256, 65536)))["open files"].status == "ok"
    huge = float(shutil.disk_usage(tmp_path).total + 1)
    assert consume(storage.check_shared_memory(huge, tmp_path))["shared memory"].status == "warning"
    assert consume(storage.check_shared_memory(1.0, tmp_path / "none"))["shared memory"].status == "warning"


def test_a_check_that_breaks_off_is_a_failed_one_and_the_rest_goes_on() -> None:
    def breaks() -> Checks[int]:
        yield ok("first", "fine")
        raise ZeroDivisionError("of\nall")

    def both() -> Checks[None]:
        value = yield from guarded("second", breaks)
        yield ok("third", str(value))

    found = consume(both())
    assert found["first"].status == "ok"
    assert found["second"].status == "failed"
    assert found["second"].found == "the check broke off: ZeroDivisionError: of all"
    assert found["third"].found == "None"


def test_a_process_with_everything_broken_still_answers(tmp_path: Path) -> None:
    """A package that cannot be imported, an old one, a working directory with traps, and no Ray."""
    site = tmp_path / "site"
    (site / "pydantic").mkdir(parents=True)
    (site / "pydantic" / "__init__.py").write_text("raise ImportError('broken')\n")
    (site / "transformers-4.40.0.dist-info").mkdir()
    (site / "transformers-4.40.0.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 4.40.0\n")
    (tmp_path / "c.yaml").write_text("model: m\n")
    command = [sys.executable, "-P", "-m", "rollout_pool", "doctor", "--config", "c.yaml"]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [*command, "--json", "found.json", "--ray-address", NO_LISTENER],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    records = json.loads((tmp_path / "found.json").read_text())
    found = {check["name"]: check for check in records["checks"]}
    assert records["status"] == "failed"
    assert found["package transformers"]["found"].startswith("version 4.40.0;")
    assert "hides pydantic" in found["package pydantic"]["found"]
    assert found["configuration"]["found"] == "the check broke off: ImportError: broken"
    assert found["OMP_WAIT_POLICY"]["status"] == "warning"
    assert found["Ray"]["status"] == "failed"
    assert found["engine"]["status"] == "skipped"
    assert found["output"]["status"] == "ok"
    for check in records["checks"]:
        assert f"{check['status']:<9}{check['name']}" in done.stdout
        assert check["remedy"] in done.stdout


def test_a_json_file_that_cannot_be_written_is_said_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", "--json", str(tmp_path / "no" / "found.json")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
