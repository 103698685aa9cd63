"""Ranks of a DeepSpeed trainer that roll out on the model they train; ``rank_launcher.py`` starts them.

Not collected by pytest. Every case compares a trainer that rolls out with a twin that does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollout_pool import Engine, EngineConfig, RequestError, RolloutRequest, SamplingParams, verify
from rollout_pool.actors.rank_group import RankGroup
from rollout_pool.errors import RolloutPoolError

CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.4, attention_dropout=0.1,
    eos_token_id=90, pad_token_id=0, bos_token_id=None, tie_word_embeddings=True,
)  # fmt: skip
ENGINE = EngineConfig(num_slots=3, max_length=48)
LENGTHS = [[3, 9, 5, 7], [4]]  # of the prompts of each rank
BUDGETS = [[6, 20, 3, 11], [9]]


def trainer(stage: int) -> Any:
    """The same on every call."""
    import deepspeed

    torch.manual_seed(3)
    model = LlamaForCausalLM(CONFIG)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    engine.train()
    engine.module.model.norm.eval()  # a mode of its own is kept too
    return engine


def train(engine: Any, step: int) -> float:
    """One step on this rank's own batch; dropout is drawn from the global generator."""
    torch.manual_seed(step)
    number = 10 * step + torch.distributed.get_rank()
    ids = torch.randint(5, 128, (2, 12), generator=torch.Generator().manual_seed(number))
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return float(loss)


def prompts_of(rank: int, lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in lengths]


def requests_of(rank: int) -> list[RolloutRequest]:
    pairs = zip(prompts_of(rank, LENGTHS[rank]), BUDGETS[rank], strict=True)
    return [
        RolloutRequest(prompt, SamplingParams(temperature=0, max_new_tokens=new), request_id=index)
        for index, (prompt, new) in enumerate(pairs)
    ]


def whole(engine: Any) -> Any:
    """A plain copy of the trainer's model, gathered by DeepSpeed."""
    import deepspeed

    plain = LlamaForCausalLM(CONFIG)
    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())), torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(parameters[name])
    return plain.eval()


def greedy(model: Any, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def tokens_of(groups: list[Any]) -> list[list[int]]:
    return [sample.token_ids.tolist() for group in groups for sample in group.samples]


def versions_of(groups: list[Any]) -> list[int]:
    return sorted({int(v) for g in groups for sample in g.samples for v in sample.token_versions})


def snapshot(engine: Any) -> dict[str, Any]:
    """Everything of a trainer that a rollout could leave changed, except which layers are gathered."""
    model = engine.module
    parts = [getattr(p, "ds_tensor", p).detach().clone() for p in model.parameters()]
    return {
        "modes": [module.training for module in model.modules()],
        "checkpointing": [getattr(module, "gradient_checkpointing", None) for module in model.modules()],
        "attention": model.config._attn_implementation,
        "use_cache": model.config.use_cache,
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "inference": [p.is_inference() or p.data.is_inference() for p in model.parameters()],
        "weights": [hash(part.numpy().tobytes()) for part in parts],
        "hooks": [[*m._forward_hooks, *m._forward_pre_hooks] for m in model.modules()],
        "forward": [vars(module).get("forward") for module in model.modules()],
        "counts": [vars(m).get("applied_pre_backward_ref_cnt") for m in model.modules()],
        "stack": stack_depth(),
        "in flight": len(getattr(model, "ds_inflight_param_registry", ())),
        "in use": [len(getattr(p, "ds_active_sub_modules", ())) for p in model.parameters()],
        "in forward": [getattr(m._parameters, "_in_forward", None) for m in model.modules()],
        "generation": model.generation_config.to_dict(),
        "steps": [engine.global_steps, engine.micro_steps],
        "gradients on": torch.is_grad_enabled(),
        "rng": torch.get_rng_state().tolist(),
    }


def stack_depth() -> int:
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    return len(FWD_MODULE_STACK)


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name, value in before.items() if after[name] != value]


@contextmanager
def failing(module: Any, at: int) -> Iterator[None]:
    """The module's forward number ``at`` from now raises, on every rank."""
    calls = [0]

    def fail(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == at:
            raise RuntimeError("out of luck")

    handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def rollouts(rank: int, stage: int, gather: str, gives_module: bool) -> dict[str, Any]:
    """Train, roll out, train: what comes back, what has changed, and the losses of the twin."""
    one, twin = trainer(stage), trainer(stage)
    before = snapshot(one)
    config = ENGINE.model_copy(update={"zero3_gather": gather})
    engine = Engine(one.module if gives_module else one, config)
    changed = changes(before, snapshot(one))
    plain, held = whole(one), sum(p.numel() for p in one.module.parameters())
    got = [engine.generate(requests_of(rank))]  # before the first step of training
    expected = [[greedy(plain, r.prompt, r.sampling.max_new_tokens) for r in requests_of(rank)]]
    losses, twin_losses, errors = [], [], []
    for step in range(3):
        losses.append(train(one, step))
        twin_losses.append(train(twin, step))
        plain = whole(one)
        before = snapshot(one)
        with failing(one.module.model.layers[1].mlp, at=4 + step):
            try:
                engine.generate(requests_of(rank))
            except RuntimeError as error:
                errors.append(str(error))
        for request in requests_of(rank):
            engine.abort(request.request_id)
        engine.step()
        got.append(engine.generate(requests_of(rank)))
        expected.append([greedy(plain, r.prompt, r.sampling.max_new_tokens) for r in requests_of(rank)])
        changed += changes(before, snapshot(one))
    partitioned = engine.batch.worker.runner.partitioned
    return {
        "tokens": [tokens_of(groups) for groups in got],
        "expected": expected,
        "versions": [versions_of(groups) for groups in got],
        "changed": changed,
        "errors": errors,
        "losses": losses,
        "twin": twin_losses,
        "held": held,
        "numbers": [p.numel() for p in plain.parameters()],
        "forwards": partitioned.num_forwards if partitioned else 0,
        "dummies": partitioned.num_dummies if partitioned else 0,
    }


def steps(rank: int, stage: int, gather: str) -> dict[str, Any]:
    """A step of training in the middle of running samples: what comes after it is of the new weights."""
    trained = trainer(stage)
    engine = Engine(trained, ENGINE.model_copy(update={"zero3_gather": gather}))
    groups: list[Any] = []
    for request in requests_of(rank):
        engine.submit(request, groups.append)
    models = [whole(trained)]
    rounds = 0
    while engine.any_rank_has_work():
        if rounds == 2:
            train(trained, 0)
            models.append(whole(trained))
        engine.step()
        rounds += 1
    found = []
    for group in groups:
        prompt, (sample,) = group.prompt_token_ids.tolist(), group.samples
        tokens, versions = sample.token_ids.tolist(), sample.token_versions.tolist()
        for at, (token, version) in enumerate(zip(tokens, versions, strict=True)):
            found.append(greedy(models[version], [*prompt, *tokens[:at]], 1) == [token])
    engine.sleep()
    train(trained, 1)
    engine.wake()
    after = engine.generate(requests_of(rank))
    plain = whole(trained)
    expected = [greedy(plain, r.prompt, r.sampling.max_new_tokens) for r in requests_of(rank)]
    alone = lone_rank(rank, engine)
    scored = verify(after, engine)
    refusals = []
    for refused in (lambda: engine.sleep(weights=True), lambda: engine.weights_changed(1)):
        try:
            refused()
        except RequestError as error:
            refusals.append(str(error))
    return {
        "is_greedy": all(found),
        "versions": versions_of(groups),
        "num_mixed": sum(len(set(g.samples[0].token_versions.tolist())) > 1 for g in groups),
        "after": tokens_of(after) == expected,
        "after_versions": versions_of(after),
        "alone": alone,
        "logprobs off by": scored.max_abs_diff,
        "scored": scored.num_tokens,
        "refusals": refusals,
    }


def lone_rank(rank: int, engine: Engine) -> Any:
    """The first rank rolls out, while the other has no prompts, and then while it fails between two forwards."""
    expected = tokens_of(engine.generate(requests_of(0) if rank == 0 else []))
    if rank == 0:
        return tokens_of(engine.generate(requests_of(0))) == expected

    def prompts() -> Iterator[list[int]]:
        yield [5]
        raise LookupError("no more prompts")

    try:
        engine.generate(prompts())
    except LookupError as error:
        return str(error)


def refusals(rank: int) -> list[str]:
    """What cannot be done with weights that a trainer keeps in buffers of its own."""
    found = []
    small = EngineConfig(num_slots=1 if rank else 2**16, max_length=2**20)  # too much on the first rank only
    try:
        verify([], trainer(3).module)
    except RolloutPoolError as error:
        found.append(str(error))
    for stage, config in (
        (1, EngineConfig(linear_layout="transposed")),
        (3, EngineConfig(linear_layout="transposed")),
        (3, small),
    ):
        try:
            Engine(trainer(stage), config)
            found.append("served")
        except RolloutPoolError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def colocated(rank: int, size: int, address: str, store: Any, cases: list[list[Any]]) -> list[Any]:
    group = RankGroup.join(address, rank, size, "cpu", store=store, timeout_s=600)
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False  # compiled when first used; gloo does the sums
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    functions = {"rollouts": rollouts, "steps": steps, "refusals": refusals}
    results = [functions[name](rank, *arguments) for name, *arguments in cases]
    group.close()
    return results


CASES = {"colocated": colocated}
