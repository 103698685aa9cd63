"""The workloads: which prompts, how many samples, what ends them. `docs/performance.md` describes them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speed.long_tail import folder_with_drawn_ends
from speed.work import Work

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "List three prime numbers and explain in one sentence each why it is prime.",
    "Hi!",
    "Explain photosynthesis to a child of eight, with an everyday example.",
    "Translate 'good morning, how did you sleep?' into Spanish.",
    "What is 17 + 25? Show the steps.",
    "Name a fruit and say where it grows best, and why the climate there suits it.",
    "Give me a short plan for learning to cook in four weeks, one line a week.",
    "Who wrote Don Quixote?",
    "Summarise the water cycle in two sentences for a poster in a school corridor.",
    "What rhymes with 'light'?",
    "Suggest a name for a small bakery near a river, and a slogan of five words.",
    "Why is the sky blue? Answer as a pirate would, but keep the physics right.",
    "Convert 3.5 kilometres to miles.",
    "Tell me a joke about a computer that goes to the doctor.",
]
TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 12},
    "letter_counting": {"min_words": 1, "max_words": 1},
}


@dataclass(frozen=True)
class Recipe:
    """How a workload is made; ``prompts`` gets the tokenizer and how many."""

    title: str
    prompts: Callable[[Any, int], list[list[int]]]
    num_prompts: int
    n: int
    max_new: int
    max_rows: int
    temperature: float = 1.0
    ends: str = "none"
    """``none``: all samples have ``max_new`` tokens. ``model``: its EOS as it comes. ``drawn``: one in ten at
    ``max_new`` tokens, the others at an eighth of it."""
    peers: tuple[str, ...] = ()
    """In `make bench`, besides ours and `generate`."""
    quick: dict[str, int] | None = None
    """What differs in `make bench-quick`; None: it is not part of that."""


def chats(tokenizer: Any, count: int) -> list[list[int]]:
    """Chat prompts of different lengths."""
    wished = ("", " Be brief.", " Answer in one sentence.", " Explain how you know.")
    texts = [question + wish for wish in wished for question in QUESTIONS]
    return [_as_chat(tokenizer, text) for text in texts[:count]]


def tasks(tokenizer: Any, count: int) -> list[list[int]]:
    """Tasks of reasoning-gym."""
    import reasoning_gym

    each = -(-count // len(TASKS))
    sets = [reasoning_gym.create_dataset(name, seed=0, size=each, **o) for name, o in TASKS.items()]
    questions = [entry["question"] for entries in zip(*sets, strict=True) for entry in entries]
    return [_as_chat(tokenizer, question) for question in questions[:count]]


def long_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Many worked examples, 1,024 tokens of them."""
    return [_passage(tokenizer, seed, 1024) for seed in range(count)]


def equal_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """32 tokens each."""
    return [_passage(tokenizer, seed, 32) for seed in range(count)]


RECIPES = {
    "chat": Recipe(
        "(a) chat prompts, 8 samples each", chats, 16, 8, 48, 128,
        peers=("generate_batch", "pool", "split engines", "split generate"),
        quick={"num_prompts": 8, "max_new": 24, "max_rows": 64},
    ),
    "long-prompt": Recipe(
        "(b) long prompts, short answers", long_prompts, 2, 8, 64, 16, peers=("generate_batch",)
    ),
    "long-tail": Recipe(
        "(c) one sample in ten is eight times longer", equal_prompts, 8, 8, 128, 64, ends="drawn",
        peers=("split engines", "split generate"),
    ),
    "greedy": Recipe(
        "(d) greedy, one sample each, EOS as it comes", chats, 32, 1, 96, 32, temperature=0.0, ends="model",
        peers=("generate_batch",), quick={"num_prompts": 16, "max_new": 48, "max_rows": 16},
    ),
    "one-prompt": Recipe("(e) one prompt, 64 samples", chats, 1, 64, 64, 64),
    "equal": Recipe(
        "(f) equal lengths, no EOS", equal_prompts, 64, 1, 64, 64,
        quick={"num_prompts": 32, "max_new": 24, "max_rows": 32},
    ),
    "tasks": Recipe("(g) tasks of reasoning-gym, EOS as it comes", tasks, 8, 8, 96, 64, ends="model"),
}  # fmt: skip
"""By name; sizes are chosen for rounds of seconds to a minute on two cores with a model of 135M weights."""


def make_work(
    name: str, model: str, folder: Path, threads: int, dtype: str = "float32", **changes: int
) -> Work:
    """A workload for this model. folder: where a model that needs one of its own is put.

    changes: of the recipe's numbers.
    """
    from transformers import AutoTokenizer

    recipe = dataclasses.replace(RECIPES[name], **changes)  # type: ignore[arg-type]
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = recipe.prompts(tokenizer, recipe.num_prompts)
    eos = [] if recipe.ends == "none" else [int(tokenizer.eos_token_id)]
    own_code = recipe.ends == "drawn"
    if own_code:
        length = max(map(len, prompts))
        short, long = length + max(1, recipe.max_new // 8), length + recipe.max_new
        model = str(folder_with_drawn_ends(model, folder / "drawn-ends", short, long, eos[0]))
    return Work(
        name, model, prompts, recipe.n, recipe.max_new, recipe.max_rows,
        temperature=recipe.temperature, eos=eos, own_code=own_code, threads=threads, dtype=dtype,
    )  # fmt: skip


def _as_chat(tokenizer: Any, text: str) -> list[int]:
    if tokenizer.chat_template:
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _passage(tokenizer: Any, seed: int, length: int) -> list[int]:
    """Exactly ``length`` tokens of worked sums."""
    draw = random.Random(seed)
    ids: list[int] = []
    while len(ids) < length:
        a, b = draw.randrange(10, 100), draw.randrange(10, 100)
        name = draw.choice(["Ada", "Ben", "Cleo", "Dan", "Eve"])
        text = f"{name} has {a} apples and finds {b} more. Then {name} has {a} + {b} = {a + b} apples. "
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids[:length]
