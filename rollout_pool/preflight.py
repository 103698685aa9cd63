"""What can be known to be wrong before an actor starts: local paths, and the cluster's resources.

Pure functions on plain data, called in the driver, so that a mistake costs no start of a process.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollout_pool.actors.checkpoint_files import refuse_unreadable
from rollout_pool.config import PoolConfig
from rollout_pool.demo_model import NAME as DEMO_MODEL
from rollout_pool.errors import CapacityError, ConfigError
from rollout_pool.types import Prompt

GRANULARITY = 10_000
"""Ray counts resources in steps of 1/10000."""


@dataclass(frozen=True, slots=True)
class ActorResources:
    """What each rollout actor asks of Ray, and how many torch threads it runs."""

    num_cpus: float
    num_gpus: float
    threads: int

    @property
    def device(self) -> str:
        """The torch device of the actor's engine; Ray shows it its own GPUs only."""
        return "cuda" if self.num_gpus else "cpu"

    @property
    def amounts(self) -> dict[str, float]:
        """By Ray's names, without what is not asked for."""
        asked = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return {name: amount for name, amount in asked.items() if amount}


def check_paths(config: PoolConfig) -> PoolConfig:
    """The configuration with local paths made absolute (an actor's working directory is not ours).

    Raises :class:`ConfigError` when ``model`` or ``tokenizer`` names a local path that cannot be
    loaded from. Anything else is a name on the model hub, which only the loading can check.
    """
    paths: dict[str, str] = {}
    for key in ("model", "tokenizer"):
        value = getattr(config, key)
        if value is None or not _is_local(value):
            continue
        path = Path(value)
        may_read = os.access(path, os.R_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)
        if not may_read and path.is_dir():
            raise ConfigError(f"{key}: {value!r} is a directory that may not be read; change its permissions")
        if not path.exists():
            way_out = "give one in Hugging Face format"
            if path.name == DEMO_MODEL:
                way_out += ", or let `rollout-pool fetch-demo-model` make this one"
            raise ConfigError(f"{key}: there is no directory {value!r}; {way_out}")
        if not path.is_dir():
            raise ConfigError(f"{key}: {value!r} is a file; expected a directory in Hugging Face format")
        if key == "model" and not (path / "config.json").is_file():
            raise ConfigError(f"model: {value!r} has no config.json, so it is not a Hugging Face model")
        if key == "model":
            refuse_unreadable(path)
        if key == "tokenizer" and not _has_tokenizer(path):
            raise ConfigError(f"tokenizer: {value!r} has no tokenizer files (tokenizer.json, say)")
        paths[key] = str(path.resolve())
    return config.model_copy(update=paths)


def check_tokenizer(config: PoolConfig, prompts: Iterable[Prompt]) -> None:
    """Raise :class:`ConfigError` when a prompt needs a tokenizer or a chat template and there is none.

    Looks at the files of a local folder; elsewhere, and where the checkpoint's own code may make them,
    the loading finds out.
    """
    name = config.tokenizer or config.model
    path = Path(name)
    if config.trust_remote_code or not path.is_dir():
        return
    has_tokenizer, has_template = _has_tokenizer(path), _has_chat_template(path)
    for index, prompt in enumerate(prompts):
        is_text = isinstance(prompt, str)
        is_chat = not is_text and any(isinstance(item, Mapping) for item in prompt)
        if (is_text or is_chat) and not has_tokenizer:
            raise ConfigError(
                f"tokenizer: prompt {index} is {'text' if is_text else 'a chat'}, and {name!r} has no "
                "tokenizer files; set tokenizer to a folder that has, or give token ids"
            )
        if is_chat and not has_template:
            raise ConfigError(
                f"tokenizer: prompt {index} is a chat, and {name!r} has no chat template "
                "(chat_template.jinja, say); add it, set tokenizer to a folder that has one, or give text"
            )


def _has_tokenizer(path: Path) -> bool:
    return any(any(path.glob(name)) for name in ("tokenizer*", "vocab*", "*.model", "tekken.json"))


def _has_chat_template(path: Path) -> bool:
    named = ("chat_template.*", "additional_chat_templates", "tekken.json")
    if any(any(path.glob(name)) for name in named):
        return True
    settings = path / "tokenizer_config.json"
    return settings.is_file() and b'"chat_template"' in settings.read_bytes()


def _is_local(name: str) -> bool:
    """Whether a model name means a path: it exists, or cannot be ``name`` or ``owner/name``."""
    return Path(name).exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1


def check_split(config: PoolConfig) -> None:
    """Refuse a model that ``tensor_parallel_size`` cannot split, from the config in its folder.

    Raises :class:`UnsupportedModelError` with the numbers. What is not a local folder is checked by
    the ranks when they load it.
    """
    if config.tensor_parallel_size == 1 or not _is_local(config.model):
        return
    from rollout_pool.actors.loading import load_config
    from rollout_pool.actors.sharding import refuse_unsplittable

    model = load_config(config.model, trust_remote_code=config.trust_remote_code)
    refuse_unsplittable(model, config.tensor_parallel_size, config.tensor_parallel_backend)


def plan_actors(config: PoolConfig, nodes: Iterable[Mapping[str, float]]) -> ActorResources:
    """Divide a cluster, given as the total resources of each node, among ``num_actors`` actors.

    GPU actors where the cluster has GPUs, otherwise CPU actors that share all cores; an actor
    never spans nodes. With fewer cores than actors each has one thread and a part of a core.

    A tensor-parallel group takes ``tensor_parallel_size`` such actors, its ranks, on one node
    (``strict_pack``) or on any (``pack``). A rank without a GPU has a whole core: ranks wait for
    each other in every layer, and on a shared core most of their time goes into waiting.
    Raises :class:`CapacityError` when the actors do not fit, with the count of what is there.
    """
    totals = list(nodes)
    gpus = config.gpus_per_actor
    if gpus is None:
        gpus = 1.0 if any(node.get("GPU", 0) >= 1 for node in totals) else 0.0
    if gpus > 1 and gpus != int(gpus):
        raise ConfigError(f"gpus_per_actor: above 1 it must be a whole number, got {gpus}")
    is_split, num_ranks = config.tensor_parallel_size > 1, config.num_actors * config.tensor_parallel_size
    cpus = config.cpus_per_actor
    if cpus is not None:
        asked = ActorResources(float(cpus), gpus, cpus)
        _require_room(config, asked, totals)
        return asked
    least = 1.0 if is_split and not gpus else 0.0
    _require_room(config, ActorResources(least, gpus, 1), totals)
    most = 1 if gpus else max(1, int(sum(node.get("CPU", 0) for node in totals)) // num_ranks)
    for threads in range(most, 0, -1):
        shared = ActorResources(float(threads), gpus, threads)
        if _room(config, shared, totals) >= config.num_actors:
            return shared
    for actors_per_core in range(2, num_ranks + 1):
        shared = ActorResources(math.floor(GRANULARITY / actors_per_core) / GRANULARITY, gpus, 1)
        if _room(config, shared, totals) >= config.num_actors:
            return shared
    return ActorResources(0.0, gpus, 1)  # a cluster that declares no cores, or hundreds of actors a core


def span_warning(
    config: PoolConfig, asked: ActorResources, nodes: Iterable[Mapping[str, float]]
) -> str | None:
    """What to warn of when some tensor-parallel group must span nodes, otherwise None."""
    room = _groups_within_nodes(config.tensor_parallel_size, asked, list(nodes))
    if room >= config.num_actors:
        return None
    return (
        f"{config.num_actors - room} of {_count(config.num_actors, 'group')} of "
        f"{config.tensor_parallel_size} ranks will span nodes: each layer exchanges activations at the "
        "bandwidth and latency of the network, which is far below that within a node; a smaller "
        "tensor_parallel_size that fits a node is usually faster"
    )


def _room(config: PoolConfig, asked: ActorResources, nodes: list[Mapping[str, float]]) -> int:
    """How many actors, or tensor-parallel groups of them, all nodes together can host."""
    size = config.tensor_parallel_size
    if config.tensor_parallel_placement == "strict_pack":
        return _groups_within_nodes(size, asked, nodes)
    return sum(actors_on(node, asked) for node in nodes) // size


def _groups_within_nodes(size: int, asked: ActorResources, nodes: list[Mapping[str, float]]) -> int:
    """How many groups of ``size`` fit without one that spans nodes."""
    return sum(actors_on(node, asked) // size for node in nodes)


def actors_on(node: Mapping[str, float], asked: ActorResources) -> int:
    """How many such actors one node can host."""
    if not asked.amounts:
        return sys.maxsize
    return min(math.floor(node.get(name, 0) / amount + 1e-9) for name, amount in asked.amounts.items())


def _require_room(config: PoolConfig, asked: ActorResources, nodes: list[Mapping[str, float]]) -> None:
    room, size = _room(config, asked, nodes), config.tensor_parallel_size
    if room >= config.num_actors:
        return
    each = " and ".join(_count(amount, name) for name, amount in asked.amounts.items())
    there = " and ".join(_count(sum(node.get(name, 0) for node in nodes), name) for name in asked.amounts)
    where = f" on {len(nodes)} nodes" if len(nodes) > 1 else ""
    keys = [f"{name.lower()}s_per_actor" for name in asked.amounts]
    if size == 1:
        wanted = f"{_count(config.num_actors, 'actor')} with {each} each"
        way_out = f"lower num_actors or {' or '.join(keys)}"
    else:
        num_ranks = config.num_actors * size
        total = " and ".join(_count(num_ranks * amount, name) for name, amount in asked.amounts.items())
        wanted = f"{_count(config.num_actors, 'group')} of {size} ranks with {each} each ({total} in all)"
        way_out = "lower num_actors or tensor_parallel_size"
        if (config.cpus_per_actor or 1) > 1:
            way_out += " or cpus_per_actor"
        if config.tensor_parallel_placement == "strict_pack":
            where += ", and a group needs one node"
            apart = config.model_copy(update={"tensor_parallel_placement": "pack"})
            if _room(apart, asked, nodes) >= config.num_actors:
                way_out += ", or set tensor_parallel_placement to 'pack'"
    raise CapacityError(
        f"{wanted} {'was' if config.num_actors == 1 else 'were'} asked for; "
        f"the cluster has {there}{where}, room for {room}: {way_out}"
    )


def _count(amount: float, name: str) -> str:
    return f"{amount:g} {name}{'' if amount == 1 else 's'}"
