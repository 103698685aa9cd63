"""What a run did, in a few lines at its end."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rollout_pool.prompt_file import PromptLine
from rollout_pool.types import PoolStats, RolloutGroup

NUM_FAILURES_SHOWN = 3


class Summary:
    """Counts the groups of one run from its start."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._seconds = 0.0
        self._stats = PoolStats()
        self._failures: list[str] = []
        self.num_groups = 0
        self.num_samples = 0
        self.num_tokens = 0
        self._num_of_texts = 0
        self._num_ended_at_once = 0

    def add(self, line: PromptLine, group: RolloutGroup) -> None:
        """One more group has finished."""
        self.num_groups += 1
        self.num_samples += len(group.samples)
        self.num_tokens += sum(len(sample.token_ids) for sample in group.samples)
        if isinstance(line.request.prompt, str):
            self._num_of_texts += len(group.samples)
            self._num_ended_at_once += sum(
                sample.finish_reason == "stop" and len(sample.token_ids) == 1 for sample in group.samples
            )
        if group.error is not None:
            self._failures.append(f"prompt {line.index}: {group.error}")

    def finish(self, stats: PoolStats) -> None:
        """The last group has come; ``stats`` are the pool's counters at that moment."""
        self._seconds = time.monotonic() - self._start
        self._stats = stats

    def lines(self) -> Iterator[str]:
        """The summary, line by line."""
        rate = self.num_tokens / max(self._seconds, 1e-9)
        yield (
            f"{self.num_groups} groups, {self.num_samples} samples, {self.num_tokens} new tokens "
            f"in {self._seconds:.1f} s: {rate:.0f} tokens/s"
        )
        computed = sum(actor.prefill_tokens for actor in self._stats.actors)
        saved = sum(actor.prefill_tokens_saved for actor in self._stats.actors)
        yield f"prompt tokens: {computed} computed, {saved} saved by sharing"
        if self._num_ended_at_once * 2 > self._num_of_texts:
            yield (
                f"{self._num_ended_at_once} of {self._num_of_texts} samples of plain texts ended with their "
                "first token: a text is continued as it stands; for answers of an instruction model write it "
                'as a chat, {"messages": [{"role": "user", "content": "..."}]}'
            )
        if self._stats.actors_lost:
            yield f"{self._stats.actors_lost} actors were lost, {self._stats.replayed} groups replayed"
        if self._failures:
            yield f"{len(self._failures)} groups failed:"
            yield from (f"  {failure}" for failure in self._failures[:NUM_FAILURES_SHOWN])
            if len(self._failures) > NUM_FAILURES_SHOWN:
                yield f"  ... and {len(self._failures) - NUM_FAILURES_SHOWN} more"
