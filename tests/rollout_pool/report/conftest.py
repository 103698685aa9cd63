"""Runs made up on the spot, as files in the format that `rollout-pool run` documents, and a browser."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

WORDS = ("the", "answer", "is", "one", "two", "three", "because", "a", "number", "of", "steps", "leads", "to")
EOS = "<eos>"
NASTY = [
    "</script><script>window.pwned = 1</script>",
    "<img src=x onerror=window.pwned=2> & <b>bold</b> \"quoted\" 'too'",
    "naïve café, 数える and 🤔👩‍👩‍👧 on\nthree lines\t with {{ 7 * 7 }} and ${7 * 7}\n",
]


@dataclass
class FakeRun:
    """A run's files, and what was put into them."""

    output: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def samples(self) -> list[dict[str, Any]]:
        return [sample for record in self.records for sample in record["samples"]]

    def write(self) -> None:
        for path, lines in (
            (self.output, self.records),
            (self.output.with_suffix(".trace.jsonl"), self.events),
        ):
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer, so that some characters are spread over several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[EOS], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 5, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def fake_run(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Callable[..., FakeRun]:
    """``fake_run(num_groups, n)``: two actors of 16 slots, one that is lost, a group that failed."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))

    def make(num_groups: int, n: int) -> FakeRun:
        draw = random.Random(num_groups)
        run = FakeRun(tmp_path_factory.mktemp("run") / "results.jsonl")
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(5, 60))) for _ in range(num_groups * n)]
        texts[: len(NASTY)] = NASTY
        texts[7] += " xylophone"
        encoded = iter(tokenizer.encode_batch(texts))
        for index in range(num_groups):
            samples = [
                _sample(draw, number, texts[index * n + number], next(encoded).ids) for number in range(n)
            ]
            run.records.append(_record(index, samples))
        failed = run.records[-1]
        failed.update(samples=[], error="its rollout actor was lost 3 times <b>& more</b>")
        run.events = _events(run, str(tokenizer_dir))
        run.write()
        return run

    return make


def _sample(draw: random.Random, number: int, text: str, ids: list[int]) -> dict[str, Any]:
    is_cut = draw.random() < 0.2
    ids = ids if is_cut else [*ids, 0]
    logprobs: list[float | None] = [round(-draw.expovariate(1.5), 4) for _ in ids]
    if number == 1:
        logprobs[0] = None
    return {
        "sample_index": number, "text": text, "token_ids": ids, "logprobs": logprobs,
        "sampling_logprobs": logprobs, "finish_reason": "length" if is_cut else "stop",
        "stop_match": None if is_cut else 0, "weight_version": 0, "seed": 1, "reward": round(draw.random(), 3),
    }  # fmt: skip


def _record(index: int, samples: list[dict[str, Any]]) -> dict[str, Any]:
    prompt = (
        [{"role": "user", "content": f"Question {index}: <i>why</i>?"}] if index % 2 else f"Question {index}"
    )
    return {
        "index": index, "request_id": index, "prompt": prompt, "prompt_token_ids": list(range(10)),
        "samples": samples, "error": None, "metadata": {"task": f"</script>{index}"},
        "sampling": {"n": max(1, len(samples))}, "config_hash": "c", "prompt_hash": "p",
    }  # fmt: skip


def _events(run: FakeRun, tokenizer: str, start: float = 1_000.0) -> list[dict[str, Any]]:
    """Whole groups one after the other, each on the actor that is free first; a token takes 10 ms."""
    config = {"model": "some/model", "tokenizer": tokenizer, "layout": "ragged", "num_slots": 16}
    size = {"num_prompts": len(run.records), "num_kept": 0, "num_actors": 2, "tensor_parallel_size": 1}
    names = ["actor-0", "actor-1"]
    events: list[dict[str, Any]] = [
        {"event": "run", "time": start - 5, **config, **size},
        {"event": "actors", "time": start, "actors": [{"name": name, "device": "cpu"} for name in names]},
    ]
    free_at = {(name, half): start for name in names for half in (0, 1)}
    groups = []
    for record in run.records:
        (name, half), begin = min(free_at.items(), key=lambda item: item[1])
        ready = begin + 0.02
        lengths = [len(sample["token_ids"]) for sample in record["samples"]]
        stays = [
            [at, 8 * half + at, begin, ready, ready + 0.01 * length] for at, length in enumerate(lengths)
        ]
        if record["index"] == 2:  # moved by compaction
            sample, slot, *_, end = stays.pop()
            middle = (ready + end) / 2
            stays += [[sample, slot, begin, ready, middle], [sample, 15, middle, middle, end]]
        end = free_at[name, half] = max((stay[-1] for stay in stays), default=begin)
        facts = {"index": record["index"], "actor": name, "error": record["error"], "prefill_tokens": 10}
        groups.append({"event": "group", "time": end, "queue_s": 0.0, "stays": stays, **facts})
    drawn = 0
    for number, group in enumerate(sorted(groups, key=lambda group: group["time"])):
        drawn += sum(len(sample["token_ids"]) for sample in run.records[group["index"]]["samples"])
        is_late = number >= len(groups) // 2
        engines = {
            "new_tokens": drawn,
            "live_rows": 24,
            "num_slots": 32,
            "decode_steps": 10,
            "rows_decoded": 120,
        }
        present = (
            ["actor-0"] if number == len(groups) // 2 else ["actor-0", "actor-1.1" if is_late else "actor-1"]
        )
        counts = {
            "actors_lost": int(is_late),
            "replayed": 2 * int(is_late),
            "engines": engines,
            "actors": present,
        }
        events += [group, {"event": "stats", "time": group["time"], **counts}]
    return [*events, {"event": "end", "time": max(free_at.values())}]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, the one that the system has. CI has it; elsewhere tests do without.

    For one module: an event loop runs in this thread until Playwright ends, and lets no other run.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        missing = "there is no Chromium on this machine"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Root, as CI is, may not have a sandbox.
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """``visit(path, **context)``: the page once it is ready. It must ask no network and log no error."""
    contexts, faults = [], []

    def open_page(path: Path, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: faults.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: _note_network(request.url, faults))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=true]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def _note_network(url: str, faults: list[str]) -> None:
    if not url.startswith(("file:", "data:", "blob:")):
        faults.append(f"asked for {url}")
