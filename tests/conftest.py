"""A tiny model with a tokenizer, made on the spot: tests need no network."""

from __future__ import annotations

import contextlib
import os
import re
import string
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

# How long an example takes says nothing on a busy machine. In CI the examples are always the same: a change
# is judged by what it changes, and what new examples find is found in the runs of those who write it.
settings.register_profile("rollout_pool", deadline=None, derandomize="SAME_EXAMPLES" in os.environ)
settings.load_profile("rollout_pool")

# Ray's workers import the files of tests whose classes they run, and with them what those share.
HELPERS = str(Path(__file__).with_name("helpers"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HELPERS, os.environ.get("PYTHONPATH")]))

ENDS = re.compile(r"was lost and is replaced|process exits|\*\*\* SIG|Fatal Python error|^\w*Error:|OOM")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """What fails beside a pool may have failed because an actor did: say at once what ended, and of what."""
    report = yield
    if report.failed and (ends := what_ended()):
        report.sections.insert(0, ("Ends of processes in Ray's logs", ends))
    return report


def what_ended(most: int = 20) -> str:
    """The lines of this Ray session's logs that tell of an end, at most so many of each process."""
    if "ray" not in sys.modules or not sys.modules["ray"].is_initialized():
        return ""
    from ray_logs import worker_logs

    lines = [f"memory: {psutil.virtual_memory().percent:.0f}% in use"]
    for pid, text in worker_logs().items():
        found = [line[:300] for line in text if ENDS.search(line)]
        lines += [f"{pid}: {line}" for line in found[-most:]]
    return "\n".join(lines)


SPECIAL = ["<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>"]
PAIRS = (
    "th",
    "he",
    "in",
    "er",
    "an",
    "re",
    "on",
    "at",
    "en",
    "nd",
    "ti",
    "es",
    "or",
    "te",
    "of",
    "ed",
    "is",
    "it",
)
VOCAB_SIZE = 128
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama of 128 token ids with the tokenizer to match, as a Hugging Face folder.

    The weights are large enough for greedy tokens to vary along a sample.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def tiny_tokenizer():
    """Characters and a few pairs of them, so that a text has more than one way into tokens."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = sorted(set(string.printable) - set("\t\r\x0b\x0c"))
    tokens = [*SPECIAL, *characters, *PAIRS, *(f"<{number}>" for number in range(VOCAB_SIZE))][:VOCAB_SIZE]
    vocab = {token: number for number, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocab, [(a, b) for a, b in PAIRS], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[3:],
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of this module alone: four cores on one node, whatever the machine has.

    The driver stands in the repository root, as a user of a checkout may; Ray hands that on.
    """
    import ray

    with contextlib.chdir(Path(__file__).parents[1]):
        ray.init(address="local", num_cpus=4, include_dashboard=False)
    yield
    ray.shutdown()
