"""TRL's own trainer trains on our rollouts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout_pool import ConfigError, Engine, EngineConfig, RequestError, RolloutPoolError, verify
from rollout_pool.adapters.rollouts import draw_seed
from rollout_pool.adapters.trl import GRPORollout, encode_prompts, rollout_func, sampling_params

pytest.importorskip("trl", reason="needs rollout-pool[trl]")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
TEXTS = ["the end ", "a", "on and on and on"]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
ENGINE = EngineConfig(num_slots=8, max_length=64)


def build(
    folder: str,
    output: Path,
    rollout: GRPORollout,
    prompts: list[Any] = TEXTS,
    reward: Any = None,
    **changes: Any,
) -> Any:
    """A trainer of the tiny model: 4 completions for each of 2 prompts a step."""
    options = {
        "output_dir": str(output),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 10,
        "temperature": 0.7,
        "learning_rate": 1e-2,
        "max_steps": 2,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "seed": 5,
    }
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=reward or (lambda completions, **_: [float(len(text)) for text in completions]),
        args=GRPOConfig(**(options | changes)),
        train_dataset=Dataset.from_list([{"prompt": prompt, "color": "red"} for prompt in prompts]),
        rollout_func=rollout,
    )


def batch_of(prompts: list[Any], repeats: int = 4) -> list[dict[str, Any]]:
    """What TRL's sampler gives: every prompt once for each of its completions."""
    return [{"prompt": prompt} for prompt in prompts for _ in range(repeats)]


def scored_by_trainer(trainer: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The log-probabilities that TRL itself computes for a batch, in training mode as in its loss."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        scored: torch.Tensor = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, batch["completion_ids"].shape[1]
        )[0]
    return scored * batch["completion_mask"]


@pytest.mark.slow
def test_the_trainer_recomputes_our_log_probabilities_before_and_after_steps(
    tiny_model_dir: str, tmp_path: Path
) -> None:
    seen: list[dict[str, Any]] = []

    def reward(prompts: list[Any], completions: list[str], **fields: Any) -> list[float]:
        seen.append({"prompts": prompts, "completions": completions, **fields})
        return [float(text.count("e")) for text in completions]

    rollout = rollout_func(engine_config=ENGINE, extra=lambda group, sample: {"place": sample.sample_index})
    trainer = build(tiny_model_dir, tmp_path, rollout, reward=reward)
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}

    def largest_difference() -> float:
        trainer.model.train()
        batch = trainer._generate_and_score_completions(batch_of(TEXTS[:2]))
        difference = scored_by_trainer(trainer, batch) - batch["sampling_per_token_logps"]
        assert batch["completion_mask"].sum(dim=1).tolist() == [
            sample.token_ids.size for group in rollout.last_groups for sample in group.samples
        ]
        assert verify(rollout.last_groups, trainer.model).max_abs_diff < 1e-4
        assert trainer.model.training
        return float(difference.abs().max())

    assert largest_difference() < 1e-4
    trainer.train()
    moved = [name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])]
    assert len(moved) == len(before)
    assert largest_difference() < 1e-4  # the engine's weights are the trainer's, without a sync

    assert len(seen) == 4
    for call in seen:
        assert len(call["prompts"]) == len(call["completions"]) == 8
        assert call["prompts"][0] == call["prompts"][3] != call["prompts"][4]
        assert call["place"] == [0, 1, 2, 3] * 2
        assert set(call["finish_reason"]) <= {"stop", "length"}
        assert len(set(call["weight_version"])) == 1
        assert len(set(call["completions"])) > 4  # samples of one prompt differ
    versions = [call["weight_version"][0] for call in seen]
    assert versions == [0, 0, 1, 2]  # the engine sees the steps between the calls
    assert seen[1]["color"] == ["red"] * 8  # TRL's own columns are still there
    assert rollout.last_groups[0].samples[0].text in seen[-1]["completions"]


def test_prompts_are_encoded_as_the_trainer_encodes_them(tiny_model_dir: str, tmp_path: Path) -> None:
    for prompts in (TEXTS, CHATS):
        trainer = build(tiny_model_dir, tmp_path, rollout_func(), prompts)
        assert encode_prompts(prompts, trainer) == trainer._tokenize_prompts(prompts)[0]


def test_equal_prompts_share_a_prefill(tiny_model_dir: str, tmp_path: Path) -> None:
    engine = Engine(tiny_model_dir, ENGINE)
    rollout = rollout_func(engine, sync=lambda trainer: None)
    trainer = build(tiny_model_dir, tmp_path, rollout)
    prompts = [row["prompt"] for row in batch_of(TEXTS)]
    fields = rollout(prompts, trainer)
    assert engine.stats().prefills == len(TEXTS)
    assert fields["prompt_ids"] == trainer.processing_class(text=prompts)["input_ids"]
    assert [len(ids) for ids in fields["completion_ids"]] == [len(values) for values in fields["logprobs"]]
    assert all(
        type(item) is list for name in ("prompt_ids", "completion_ids", "logprobs") for item in fields[name]
    )


def test_weights_are_brought_once_a_step_and_before_the_rollout(tiny_model_dir: str, tmp_path: Path) -> None:
    engine = Engine(tiny_model_dir, ENGINE)
    steps: list[int] = []

    def bring(trainer: Any) -> None:
        steps.append(trainer.state.global_step)
        engine.model.load_state_dict(trainer.model.state_dict())

    rollout = rollout_func(engine, sync=bring)
    trainer = build(
        tiny_model_dir, tmp_path, rollout, max_steps=2, steps_per_generation=1, gradient_accumulation_steps=2
    )
    with torch.no_grad():  # weights that the engine did not load by itself
        for parameter in trainer.model.parameters():
            parameter.mul_(1.1)
    rollout([TEXTS[0]] * 4, trainer)
    assert verify(rollout.last_groups, trainer.model).max_abs_diff < 1e-4
    trainer.train()
    assert steps == [0, 1]


def test_samples_of_other_weights_are_refused(tiny_model_dir: str, tmp_path: Path) -> None:
    rollout = rollout_func(Engine(tiny_model_dir, ENGINE), sync=lambda trainer: 3)
    trainer = build(tiny_model_dir, tmp_path, rollout)
    with pytest.raises(RolloutPoolError, match="with weights of version 0; sync brought version 3"):
        rollout([TEXTS[0]] * 4, trainer)


def test_sampling_is_the_trainers(tiny_model_dir: str, tmp_path: Path) -> None:
    changes = {"top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "max_completion_length": 6}
    kwargs = {"min_new_tokens": 2, "stop_strings": ["x"]}
    trainer = build(tiny_model_dir, tmp_path, rollout_func(), generation_kwargs=kwargs, **changes)
    params = sampling_params(trainer, seed=9)
    assert (params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (0.9, 7, 0.1, 1.2)
    assert (params.temperature, params.max_new_tokens, params.min_new_tokens) == (0.7, 6, 2)
    assert (params.stop, params.seed) == (("x",), 9)
    assert params.stop_token_ids == tuple(trainer.eos_token_ids)
    trainer.args.generation_kwargs = {"num_beams": 4}
    with pytest.raises(ConfigError, match="generation_kwargs: 'num_beams' has no counterpart"):
        sampling_params(trainer)


def test_which_log_probabilities_trl_gets_is_chosen(tiny_model_dir: str, tmp_path: Path) -> None:
    engine = Engine(tiny_model_dir, ENGINE)
    for kind in ("logprobs", "sampling_logprobs"):
        rollout = rollout_func(engine, sync=lambda trainer: None, logprobs=kind)
        trainer = build(tiny_model_dir, tmp_path, rollout, top_k=5)
        fields = rollout([TEXTS[0]] * 4, trainer)
        samples = rollout.last_groups[0].samples
        assert fields["logprobs"] == [getattr(sample, kind).tolist() for sample in samples]
        assert not (samples[0].logprobs == samples[0].sampling_logprobs).all()


def test_every_process_step_mode_and_call_draws_anew(tiny_model_dir: str, tmp_path: Path) -> None:
    def seeds(process: int, seed: int = 5) -> list[int]:
        """Of two calls in training, two in evaluation, and one in the next step."""
        rollout = rollout_func()
        found = []
        for step, training in ((0, True), (0, True), (0, False), (0, False), (1, True)):
            trainer = SimpleNamespace(
                state=SimpleNamespace(global_step=step),
                model=SimpleNamespace(training=training),
                accelerator=SimpleNamespace(process_index=process),
                args=SimpleNamespace(seed=seed),
            )
            found.append(rollout._next_seed(trainer))
        return found

    assert len({*seeds(0), *seeds(1), *seeds(0, seed=6)}) == 15
    assert seeds(0) == seeds(0)
    assert draw_seed(1, 2) != draw_seed(2, 1)


def test_what_cannot_be_rolled_out_is_refused(tiny_model_dir: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs sync="):
        rollout_func(object())
    with pytest.raises(ConfigError, match="sync= is for a pool"):
        rollout_func(sync=lambda trainer: None)
    with pytest.raises(ConfigError, match="engine_config= is for an engine on the trainer's own model"):
        rollout_func(object(), sync=lambda trainer: None, engine_config=ENGINE)
    with pytest.raises(ConfigError, match="logprobs must be 'logprobs' or 'sampling_logprobs'"):
        rollout_func(logprobs="raw")  # type: ignore[arg-type]
    rollout = rollout_func(engine_config=EngineConfig(num_slots=4, max_length=8))
    trainer = build(tiny_model_dir, tmp_path, rollout)
    with pytest.raises(RequestError, match="1 of 1 groups failed"):
        rollout([TEXTS[2]] * 4, trainer)
    trainer.tools = [len]
    with pytest.raises(ConfigError, match="tools and environments"):
        encode_prompts(TEXTS, trainer)


@pytest.mark.slow
def test_a_pool_rolls_out_the_weights_of_each_step(
    cluster: None, tiny_model_dir: str, tmp_path: Path
) -> None:
    import ray

    from rollout_pool import PoolConfig, RolloutPool
    from rollout_pool.weight_sync import ship

    pool: Any = RolloutPool.remote(PoolConfig(model=tiny_model_dir, cpus_per_actor=1, engine=ENGINE))
    apart: list[float] = []
    versions: list[list[int]] = []

    def bring(trainer: Any) -> int:
        (receipt,) = ray.get(pool.sync_weights.remote(ship(trainer.model)), timeout=120)
        version: int = receipt.version
        return version

    def reward(completions: list[str], weight_version: list[int], **_: Any) -> list[float]:
        apart.append(verify(rollout.last_groups, trainer.model).max_abs_diff)
        versions.append(sorted(set(weight_version)))
        return [float(text.count("e")) for text in completions]

    rollout = rollout_func(pool, sync=bring)
    trainer = build(tiny_model_dir, tmp_path, rollout, reward=reward, max_steps=3)
    trainer.train()
    ray.kill(pool)
    assert versions == [[1], [2], [3]]
    assert max(apart) < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"),
    reason="keys of two dtypes under autocast: refused there",
)
def test_a_trainer_in_bfloat16_rolls_out_through_its_own_autocast(
    tiny_model_dir: str, tmp_path: Path
) -> None:
    rollout = rollout_func(engine_config=ENGINE)
    trainer = build(tiny_model_dir, tmp_path, rollout, bf16=True)
    trainer.train()
    trainer.model.train()
    batch = trainer._generate_and_score_completions(batch_of(TEXTS[:2]))
    difference = (scored_by_trainer(trainer, batch) - batch["sampling_per_token_logps"]).abs()
    # Logits from 4 to 8 in bfloat16 are 0.03 apart, and are then divided by the temperature.
    assert 0 < float(difference.max()) < 0.2
    assert float(difference.sum() / batch["completion_mask"].sum()) < 0.04
