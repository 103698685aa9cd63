"""The configuration, its model, tokenizer and memory, as far as no process is needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rollout_pool.config import PoolConfig
from rollout_pool.doctor.check import Checks, failed, of_error, ok, skipped, warning
from rollout_pool.errors import CapacityError, ConfigError
from rollout_pool.run_config import RunConfig

if TYPE_CHECKING:
    from rollout_pool.planning.pool_plan import PoolPlan


def check_config(path: Path) -> Checks[RunConfig | None]:
    """Whether the file is one, and what it says in short."""
    try:
        config = RunConfig.load(path, {})
    except ConfigError as error:
        yield of_error(
            "configuration", error, "correct the file; configs/ has examples with every key explained"
        )
        return None
    size = config.tensor_parallel_size
    ranks = f" of {size} ranks" if size > 1 else ""
    actors = "1 actor" if config.num_actors == 1 else f"{config.num_actors} actors"
    yield ok("configuration", f"{path}: {config.model}, {actors}{ranks}, dtype {config.dtype}")
    return config


def check_model(config: RunConfig) -> Checks[PoolConfig | None]:
    """The folder and its files; returns the configuration with the folder in place of the model's name."""
    from rollout_pool.actors.loading import load_config
    from rollout_pool.planning.pool_plan import local_folder
    from rollout_pool.preflight import check_paths, check_split

    try:
        checked = check_paths(config.pool)
    except ConfigError as error:
        yield of_error("model", error)
        return None
    try:
        local = checked.model_copy(update={"model": str(local_folder(checked.model))})
        found = load_config(local.model, trust_remote_code=local.trust_remote_code)
        check_split(local)
    except ConfigError as error:
        yield of_error("model", error)
        return None
    kinds = ", ".join(getattr(found, "architectures", None) or [found.model_type])
    yield ok("model", f"{kinds} in {local.model}")
    return local


def check_tokenizer(config: PoolConfig) -> Checks[None]:
    """Text prompts need one, and chats need its template."""
    from rollout_pool.actors.loading import load_config, load_tokenizer

    name = config.tokenizer or config.model
    options = {"trust_remote_code": config.trust_remote_code}
    tokenizer = load_tokenizer(name, **options, required=config.tokenizer is not None)
    if tokenizer is None:
        yield failed(
            "tokenizer",
            f"there is none in {name}, so prompts can be lists of token ids only",
            "copy the tokenizer's files into that folder, or name another as tokenizer",
        )
        yield skipped("chat template", "there is no tokenizer")
        return
    vocabulary = load_config(config.model, **options).get_text_config(decoder=True).vocab_size
    if len(tokenizer) > vocabulary:
        yield warning(
            "tokenizer",
            f"{type(tokenizer).__name__} of {len(tokenizer):,} tokens, and the model knows {vocabulary:,}",
            "name the tokenizer that the model was trained with; prompts with other ids will fail",
        )
    else:
        yield ok("tokenizer", f"{type(tokenizer).__name__} of {len(tokenizer):,} tokens")
    if getattr(tokenizer, "chat_template", None):
        yield ok("chat template", "there")
    else:
        yield warning(
            "chat template",
            "the tokenizer has none, so chat prompts will fail; text prompts are fine",
            "give prompts as text, or copy chat_template.jinja of the instruction model into the folder",
        )


def check_memory(config: PoolConfig, joins: bool = False) -> Checks[bool]:
    """Whether weights and slots fit here, and whether an engine takes the model; True when both do.

    joins: engines will be on a cluster, where this machine's cores, GPUs and memory say little.
    """
    from rollout_pool.planning.machine import boundless_machine, this_machine
    from rollout_pool.planning.pool_plan import make_plan
    from rollout_pool.planning.tables import describe_machine

    machine = boundless_machine(config) if joins else this_machine()
    try:
        plan = make_plan(config, machine)
    except CapacityError as error:
        yield of_error("actors", error)
        yield skipped("memory", "there is no room for the actors")
        return False
    except ConfigError as error:
        yield of_error("supported", error)
        yield skipped("memory", "the model cannot be served")
        return False
    yield ok(
        "supported", f"{plan.kind} can be served in layout {config.engine.layout!r}, as far as its files tell"
    )
    asked = plan.resources
    if joins:
        yield ok("memory", f"{_needs(plan)}; an engine says below whether a node of the cluster has that")
        return True
    where = "a GPU" if asked.num_gpus else "cores"
    threads = "1 thread" if asked.threads == 1 else f"{asked.threads} threads"
    yield ok("actors", f"each on {where} with {threads}; {plan.ranks_per_node} of {plan.num_ranks} on a node")
    if plan.problem is not None:
        found, _, remedy = plan.problem.rpartition("; ")
        yield failed("memory", f"{found} ({describe_machine(machine)})", remedy)
        return False
    yield ok("memory", f"{_needs(plan)}; {plan.slots_that_fit:,} slots would fit")
    return True


def _needs(plan: PoolPlan) -> str:
    from rollout_pool.planning.tables import size_of

    memory = plan.memory
    return (
        f"{size_of(memory.weight_bytes)} of weights, {size_of(memory.kv_bytes)} of KV for {memory.num_slots} "
        f"slots of {memory.max_length} tokens"
    )
