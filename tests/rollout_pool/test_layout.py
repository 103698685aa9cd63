"""What holds the package together: what a wheel ships, who imports whom, which names are public."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollout_pool

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rollout_pool", "actors", "kernels")
RAY_USERS = (
    "launch",
    "pool",
    "pools",
    "callers",
    "dispatch",
    "oversampling",
    "heartbeat",
    "data",
    "live.metrics",
    "live.monitor",
    "live.pools",
    "live.progress",
    "pool_memory",
    "ray_errors",
    "recovery",
    "weight_sync",
    "simulation",
    "actors.node_process",
    "actors.placement",
    "actors.tensor_parallel",
    "adapters.rollouts",
    "doctor.cluster",
    "doctor.engine",
    "doctor.ring",
    "cli",
    "commands",
)
FOUNDATION = ("types", "config", "errors", "requests", "logs", "threads")
OTHER_TRAINERS = ("deepspeed", "trl", "verl", "tensordict", "datasets", "accelerate")
PUBLIC = {
    "ActorLostError",
    "ActorStartError",
    "CapacityError",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "InputFileError",
    "NoRoomError",
    "OutputFileError",
    "Oversampled",
    "PoolClosedError",
    "PoolConfig",
    "QueueFullError",
    "RequestError",
    "RolloutGroup",
    "RolloutPool",
    "RolloutPoolError",
    "RolloutPools",
    "RolloutRequest",
    "Sample",
    "SamplingParams",
    "UnsupportedModelError",
    "Verification",
    "VerificationError",
    "WeightSyncError",
    "WeightsLostError",
    "__version__",
    "oversample",
    "stream_prompts",
    "track",
    "verify",
}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package under its name below ``rollout_pool``, and its file."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if package == "rollout_pool":
                if parts[1] in PACKAGES:  # the links; their targets are listed by themselves
                    continue
                parts = parts[1:]
            yield ".".join(part for part in parts if part != "__init__"), path


def imports(path: Path) -> set[str]:
    """Absolute names of all that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found.add(node.module or "")
    return found


def is_in(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


def imports_of(*places: str) -> dict[str, set[str]]:
    return {name: imports(path) for name, path in modules() if is_in(name, places)}


def test_ray_is_imported_only_where_processes_are_started_and_joined() -> None:
    users = {name for name, path in modules() if any(is_in(i, ("ray",)) for i in imports(path))}
    assert {name for name in users if not is_in(name, RAY_USERS)} == set()


def test_kernels_need_torch_and_triton_only() -> None:
    allowed = (*sys.stdlib_module_names, "torch", "triton", "rollout_pool.kernels")
    for name, found in imports_of("kernels").items():
        assert {i for i in found if not is_in(i, allowed)} == set(), name


def test_actors_do_not_know_the_pool() -> None:
    allowed = tuple(f"rollout_pool.{name}" for name in (*FOUNDATION, "actors", "kernels"))
    for name, found in imports_of("actors").items():
        ours = {i for i in found if i.startswith("rollout_pool.")}
        assert {i for i in ours if not is_in(i, allowed)} == set(), name


def test_the_scheduler_is_pure_python() -> None:
    allowed = (*sys.stdlib_module_names, "rollout_pool")
    for name, found in imports_of("actors.scheduler").items():
        assert {i for i in found if not is_in(i, allowed)} == set(), name


def test_the_foundation_needs_neither_torch_nor_the_rest() -> None:
    allowed = tuple(f"rollout_pool.{name}" for name in FOUNDATION)
    for name, found in imports_of(*FOUNDATION).items():
        assert not {i for i in found if is_in(i, ("torch", "transformers"))}, name
        assert {i for i in found if i.startswith("rollout_pool") and not is_in(i, allowed)} == set(), name


def test_parts_of_the_pool_do_not_import_it() -> None:
    for name, found in imports_of(
        "dispatch",
        "routing",
        "recovery",
        "weight_sync",
        "ledger",
        "live",
        "preflight",
        "calls",
        "callers",
        "fair_queue",
    ).items():
        assert not {
            i for i in found if is_in(i, ("rollout_pool.pool", "rollout_pool.launch", "rollout_pool.cli"))
        }, name


def test_an_adapter_knows_its_own_library_and_none_of_the_others() -> None:
    ours = tuple(f"rollout_pool.{name}" for name in (*FOUNDATION, "adapters", "actors.engine"))
    for name, found in imports_of("adapters").items():
        assert {i for i in found if i.startswith("rollout_pool.") and not is_in(i, ours)} == set(), name
        library = name.removeprefix("adapters.")
        assert {i for i in found if is_in(i, OTHER_TRAINERS) and not is_in(i, (library,))} == set(), name


def test_a_report_needs_files_only() -> None:
    allowed = (*FOUNDATION, "report", "records", "results", "run_config", "trace")
    ours = tuple(f"rollout_pool.{name}" for name in allowed)
    for name, found in imports_of("report", "trace").items():
        mine = {i for i in found if is_in(i, ("rollout_pool",))}
        assert {i for i in mine if i != "rollout_pool" and not is_in(i, ours)} == set(), name
        assert not {i for i in found if is_in(i, ("torch", "transformers", "ray"))}, name


def test_nothing_depends_on_the_adapters() -> None:
    for name, path in modules():
        if not is_in(name, ("adapters",)):
            assert not {i for i in imports(path) if is_in(i, ("rollout_pool.adapters",))}, name


def test_only_the_command_line_imports_the_commands() -> None:
    for name, path in modules():
        if not is_in(name, ("cli", "commands", "__main__")):
            places = ("rollout_pool.cli", "rollout_pool.commands")
            assert not {i for i in imports(path) if is_in(i, places)}, name


def test_nothing_at_the_root_can_be_taken_for_a_module() -> None:
    assert sorted(path.name for path in ROOT.glob("*.py")) == []
    assert sorted((ROOT / "tests").rglob("__init__.py")) == []


def test_the_public_names_are_these() -> None:
    assert set(rollout_pool.__all__) == PUBLIC
    assert set(dir(rollout_pool)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(rollout_pool, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Rollouts'"):
        rollout_pool.Rollouts  # noqa: B018


@pytest.mark.parametrize(
    "module",
    [
        "rollout_pool",
        "rollout_pool.adapters",
        "rollout_pool.adapters.trl",
        "rollout_pool.cli",
        "rollout_pool.live.progress",
        "rollout_pool.report.page",
        "rollout_pool.types",
    ],
)
def test_importing_loads_neither_torch_nor_ray(module: str) -> None:
    heavy = "{'torch', 'ray', 'transformers', 'pyarrow', 'deepspeed', 'trl', 'verl'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files in a wheel that is built from a copy of the checkout."""
    copy = tmp_path_factory.mktemp("wheel") / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in (*PACKAGES, "tests"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    build = "import setuptools.build_meta as backend; backend.build_wheel('out')"
    subprocess.run([sys.executable, "-P", "-c", build], cwd=copy, check=True, capture_output=True)
    (wheel,) = (copy / "out").glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_a_wheel_holds_every_module_as_a_real_file(wheel_names: set[str]) -> None:
    shipped = {name for name in wheel_names if name.endswith(".py")}
    expected = set()
    for _, path in modules():
        parts = path.relative_to(ROOT).parts
        expected.add("/".join(parts if parts[0] == "rollout_pool" else ("rollout_pool", *parts)))
    assert shipped == expected
    assert "rollout_pool/py.typed" in wheel_names
    assets = (path for path in (ROOT / "rollout_pool/report/page").rglob("*") if path.is_file())
    assert {str(path.relative_to(ROOT)) for path in assets} <= wheel_names


def test_a_wheel_installs_nothing_but_the_package(wheel_names: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert tops == {"rollout_pool", f"rollout_pool-{rollout_pool.__version__}.dist-info"}
