"""An engine borrows a model that somebody else trains, and gives it back as it was."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import transformers

from rollout_pool import Engine, EngineConfig, RolloutGroup, RolloutRequest, SamplingParams

SAMPLING = SamplingParams(n=2, max_new_tokens=10, ignore_eos=True)
CONFIG = EngineConfig(num_slots=4, max_length=64)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"attention_dropout": 0.3}),
    "gemma2-eager": ("Gemma2Config", {"head_dim": 16, "sliding_window": 7}),
    "gpt2-dropout": ("GPT2Config", {"resid_pdrop": 0.3, "attn_pdrop": 0.3}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
}


def snapshot(model: Any) -> dict[str, Any]:
    """Everything of a model that an engine could leave changed."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    return {
        "modes": [module.training for module in model.modules()],
        "attention": [config._attn_implementation for config in configs],
        "use_cache": [getattr(config, "use_cache", None) for config in configs],
        "experts": [config._experts_implementation for config in configs],
        "gradients": [(name, p.requires_grad, p.grad) for name, p in model.named_parameters()],
        "weights": [
            (name, p.data_ptr(), p.stride(), p.shape, p.dtype) for name, p in model.named_parameters()
        ],
        "buffers": [(name, buffer.data_ptr()) for name, buffer in model.named_buffers()],
        "forward": [type(module).forward for module in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "generation": model.generation_config.to_dict(),
        "gradients on": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "rng": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(params=FAMILIES)
def borrowed(request: Any, build: Any, small_config: Any) -> Any:
    class_name, changes = FAMILIES[request.param]
    return build(getattr(transformers, class_name)(**small_config(**changes)))


def test_the_tokenizer_of_a_borrowed_model_may_be_named_by_its_folder(tiny_model_dir: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    (group,) = Engine(model, CONFIG, tokenizer=tiny_model_dir).generate(["the cat"], SAMPLING)
    assert group.error is None
    assert all(sample.text for sample in group.samples)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
def test_a_borrowed_model_comes_back_as_it_was(training: bool, borrowed: Any, prompts_of: Any) -> None:
    borrowed.train(training)
    first = next(module for module in borrowed.modules() if isinstance(module, torch.nn.Embedding))
    first.train(not training)  # a mode of its own is kept too
    first.weight.requires_grad_(False)
    before, weights = snapshot(borrowed), [p.clone() for p in borrowed.parameters()]
    engine = Engine(borrowed, CONFIG)
    assert snapshot(borrowed) == before
    prompts = prompts_of([3, 9, 5])
    engine.submit(RolloutRequest(prompts[0], SAMPLING, request_id="x"))
    engine.step()
    assert snapshot(borrowed) == before, "between steps the model is the trainer's"
    engine.abort("x")
    groups = engine.generate([*prompts, []], SAMPLING)
    assert [group.error is None for group in groups] == [True, True, True, False]
    assert snapshot(borrowed) == before
    assert all(torch.equal(p, old) for p, old in zip(borrowed.parameters(), weights, strict=True))


def test_the_model_is_restored_when_a_forward_fails(borrowed: Any, prompts_of: Any) -> None:
    borrowed.train()
    engine = Engine(borrowed, CONFIG)
    before = snapshot(borrowed)

    def fail(module: Any, args: Any) -> None:
        raise RuntimeError("out of luck")

    handle = borrowed.get_output_embeddings().register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.generate(prompts_of([4]), SAMPLING)
    handle.remove()
    assert snapshot(borrowed) == before


def test_training_goes_on_between_rollouts_and_new_weights_are_used_at_once(
    borrowed: Any, prompts_of: Any, hf_greedy: Any
) -> None:
    engine = Engine(borrowed, CONFIG)
    prompts = prompts_of([3, 9, 5])
    greedy = SamplingParams(temperature=0, max_new_tokens=10, ignore_eos=True)
    before = engine.generate(prompts, greedy)
    optimizer = torch.optim.SGD(borrowed.parameters(), lr=0.5)
    borrowed.train()
    ids = torch.tensor([prompts[1]])
    loss = borrowed(input_ids=ids, labels=ids).loss
    loss.backward()
    assert all(
        p.grad is not None and torch.isfinite(p.grad).all()
        for p in borrowed.get_input_embeddings().parameters()
    )
    optimizer.step()
    after = engine.generate(prompts, greedy)
    assert borrowed.training
    borrowed.eval()
    assert [group.samples[0].token_ids.tolist() for group in after] == [
        hf_greedy(borrowed, p, 10) for p in prompts
    ]
    assert [g.samples[0].token_ids.tolist() for g in before] != [
        g.samples[0].token_ids.tolist() for g in after
    ]


def test_dropout_of_a_training_model_is_off_in_rollouts(
    build: Any, small_config: Any, prompts_of: Any
) -> None:
    model = build(transformers.GPT2Config(**small_config(resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)))
    seeded = SAMPLING.model_copy(update={"seed": 1})
    model.eval()
    expected = Engine(model, CONFIG).generate(prompts_of([4, 7]), seeded)
    model.train()
    got = Engine(model, CONFIG).generate(prompts_of([4, 7]), seeded)
    assert [s.token_ids.tolist() for g in got for s in g.samples] == [
        s.token_ids.tolist() for g in expected for s in g.samples
    ]


def test_two_engines_share_one_model(llama: Any, prompts_of: Any) -> None:
    prompts = prompts_of([4, 7, 5])
    seeded = SAMPLING.model_copy(update={"seed": 1})
    expected = texts_of(Engine(llama, CONFIG).generate(prompts, seeded))
    one, other = Engine(llama, CONFIG), Engine(llama, EngineConfig(num_slots=2, max_length=32))
    got: dict[int, list[RolloutGroup]] = {0: [], 1: []}
    for number, engine in enumerate((one, other)):
        for index, prompt in enumerate(prompts):
            engine.submit(RolloutRequest(prompt, seeded, request_id=index), got[number].append)
    while one.has_work() or other.has_work():
        one.step()
        other.step()
    assert texts_of(sorted(got[0], key=index_of)) == texts_of(sorted(got[1], key=index_of))
    assert len(texts_of(got[0])) == len(expected)


def index_of(group: RolloutGroup) -> int:
    return int(group.request_id)


def texts_of(groups: list[RolloutGroup]) -> list[list[int]]:
    return [sample.token_ids.tolist() for group in groups for sample in group.samples]


@pytest.mark.parametrize("layout", ["native", "transposed"])
def test_the_layout_of_weights_changes_no_name_shape_or_value(
    layout: Any, build: Any, small_config: Any
) -> None:
    model = build(transformers.LlamaConfig(**small_config()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Engine(model, EngineConfig(num_slots=2, max_length=32, linear_layout=layout))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    is_transposed = not model.model.layers[0].mlp.up_proj.weight.is_contiguous()
    assert is_transposed == (layout == "transposed")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rollouts_agree_with_a_forward_in_the_same_precision(
    dtype: str, tiny_model_dir: str, prompts_of: Any
) -> None:
    from rollout_pool import verify

    engine = Engine(tiny_model_dir, EngineConfig(num_slots=4, max_length=64), dtype=dtype)  # type: ignore[arg-type]
    assert engine.model.dtype == getattr(torch, dtype)
    groups = engine.generate(prompts_of([4, 20, 9], high=100), SAMPLING)
    report = verify(groups, engine)
    assert report.mean_abs_diff < 0.05
    assert report.max_abs_diff < 0.5
    assert all(sample.logprobs.dtype == np.float32 for group in groups for sample in group.samples)


def test_memory_is_flat_over_many_rollouts_on_a_warm_engine(llama: Any, prompts_of: Any) -> None:
    engine = Engine(llama, EngineConfig(num_slots=8, max_length=64))
    prompts = prompts_of([5, 17, 1, 9, 3])
    sampling = SamplingParams(n=4, max_new_tokens=12, repetition_penalty=1.1, top_p=0.9)
    process = psutil.Process(os.getpid())

    def roll_out(times: int) -> None:
        for _ in range(times):
            engine.generate([*prompts, []], sampling)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    roll_out(4)  # 80 samples: caches of allocators and of Python are warm
    held, resident = tensors(), process.memory_info().rss
    roll_out(10)  # 200 samples
    assert tensors() <= held
    assert process.memory_info().rss - resident < 8 << 20
    stats = engine.stats()
    assert stats.samples_finished == 14 * 20
    assert (stats.live_rows, stats.waiting_groups, stats.running_groups) == (0, 0, 0)
    assert not engine.has_work()


@pytest.mark.parametrize("by", ["optimizer", "data", "load"])
def test_weights_that_change_between_two_calls_leave_nothing_behind(
    by: str, build: Any, small_config: Any, prompts_of: Any, hf_greedy: Any
) -> None:
    model = build(transformers.LlamaConfig(**small_config()))
    engine = Engine(model, EngineConfig(num_slots=2, max_length=64))
    (prompt,) = prompts_of([24])
    greedy = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    before = engine.generate([prompt, prompt], greedy)[0].samples[0]
    changed = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    if by == "optimizer":
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        torch.optim.SGD(model.parameters(), lr=0.05).step()
    elif by == "data":  # as trainers with master weights of their own do it; torch does not count it
        for name, parameter in model.named_parameters():
            parameter.data.copy_(changed[name])
    else:
        model.load_state_dict(changed)
    after = engine.generate([prompt], greedy)[0].samples[0]
    assert after.token_ids.tolist() == hf_greedy(model, prompt, 8) != before.token_ids.tolist()
    assert (before.weight_version, after.weight_version) == (0, 1)
    assert engine.generate([prompt], greedy)[0].samples[0].weight_version == 1
