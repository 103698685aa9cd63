"""The clusters that we describe are what their tools read, and what the configuration for them asks for."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import rollout_pool
from rollout_pool.cli import _parser
from rollout_pool.preflight import plan_actors, span_warning
from rollout_pool.run_config import RunConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CLUSTER = CONFIGS / "cluster"


@pytest.fixture
def job() -> Any:
    return yaml.safe_load((CLUSTER / "kuberay_job.yaml").read_text())


def test_the_file_for_ray_up_keeps_rays_own_schema() -> None:
    import jsonschema
    import ray.autoscaler

    schema = json.loads(Path(ray.autoscaler.__file__).with_name("ray-schema.json").read_text())
    described = yaml.safe_load((CLUSTER / "ray_up.yaml").read_text())
    jsonschema.validate(described, schema)
    config = RunConfig.load(CONFIGS / "multi_node.yaml", {})
    num_nodes = 1 + len(described["provider"]["worker_ips"])
    assert num_nodes * 8 == config.num_actors * config.tensor_parallel_size


def test_the_kuberay_cluster_has_room_for_the_pool(job: Any) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    nodes: list[dict[str, float]] = [{"CPU": 0.0}]
    for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        assert container["resources"]["requests"] == limits  # so that what Ray counts is there
        one = {"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"])}
        nodes += [one] * group["replicas"]
    config = RunConfig.load(CONFIGS / "multi_node.yaml", {})
    asked = plan_actors(config, nodes)
    assert span_warning(config, asked, nodes) is None
    assert sum(node.get("GPU", 0) for node in nodes) == config.num_actors * config.tensor_parallel_size


def test_every_pod_has_memory_for_the_object_store_and_the_shared_disk(job: Any) -> None:
    spec = job["spec"]["rayClusterSpec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert set(mounts) == set(volumes)
            assert mounts["shm"] == "/dev/shm"
            assert container["image"] == f"rollout-pool:{rollout_pool.__version__}"
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        memory, shared = (container["resources"]["limits"]["memory"], volumes["shm"]["emptyDir"]["sizeLimit"])
        assert 0.3 * int(memory.removesuffix("Gi")) <= int(shared.removesuffix("Gi"))


def test_the_jobs_commands_are_ours(job: Any) -> None:
    shell, flag, script = shlex.split(job["spec"]["entrypoint"])
    assert (shell, flag) == ("sh", "-c")
    parsed = [_parser().parse_args(shlex.split(line)[1:]) for line in script.split("&&")]
    assert [args.command for args in parsed] == ["doctor", "run"]
    assert parsed[1].resume


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_key_of_a_configuration_is_explained(path: Path) -> None:
    """By a comment in its line or in the lines above it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    for number, line in enumerate(lines):
        if line.rstrip().endswith(":") or not line.strip() or line.lstrip().startswith("#"):
            continue
        above = lines[number - 1].lstrip() if number else ""
        is_explained = "#" in line or above.startswith("#") or line.split(":")[0].strip() in ("dtype", "seed")
        assert is_explained, f"{path.name}:{number + 1}: {line}"
