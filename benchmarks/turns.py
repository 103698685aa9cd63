"""Processes that take turns, so that a busy machine is unfair to all contenders alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from threading import Timer
from typing import Any

from rollout_pool.threads import WAITING

LIMIT_S = 900.0
"""A process that gives no answer for so long hangs, and is ended."""


class Contender:
    """``script --worker name ...`` in a process of its own; it runs a round when told to.

    It answers in lines of JSON whose first key is ``mark``: one when it is ready, one after each round.
    What else it prints is passed over, and what it prints as errors too when ``is_quiet``. ``python`` is the
    interpreter of another environment.
    """

    def __init__(
        self,
        label: str,
        script: str,
        options: Sequence[str],
        threads: int,
        mark: str,
        is_quiet: bool = False,
        python: str = sys.executable,
    ) -> None:
        self.label = label
        self._start = f'{{"{mark}"'
        counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        environment = {**os.environ, **counts, **WAITING}
        self._process = subprocess.Popen(
            [python, script, *options, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if is_quiet else None,
            text=True,
            env=environment,
        )
        self.first_answer = self._answer()

    def round(self) -> dict[str, Any]:
        """Run one round; what it took and made."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self, patience: float = 0.0) -> None:
        """End the process, which gets so many seconds to end by itself."""
        if patience:
            assert self._process.stdin is not None
            self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        limit = Timer(LIMIT_S, self._process.kill)
        limit.start()
        try:
            for line in self._process.stdout:
                if line.startswith(self._start):
                    answer: dict[str, Any] = json.loads(line)
                    return answer
        finally:
            limit.cancel()
        raise SystemExit(f"{self.label} ended without an answer, exit code {self._process.wait()}")
