"""The thread that owns an engine: loads it, steps it while there is work, touches it alone."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn

from rollout_pool.actors.progress import IDLE, Activity, Progress
from rollout_pool.types import EngineStats, ResolvedRequest, RolloutGroup

if TYPE_CHECKING:
    from rollout_pool.actors.engine import Engine

logger = logging.getLogger(__name__)

LAST_WORDS_S = 2.0
"""A process that failed lives on for so long, so that an answer can tell why it failed."""


class EngineThread:
    """Runs what ``load`` returns. ``loaded`` is done when it did, or holds what it raised.

    If the engine fails after that, the process exits: one without an engine that still answers
    would hold its callers for ever.
    """

    def __init__(self, name: str, load: Callable[[], Engine]) -> None:
        self.loaded: Future[None] = Future()
        self.stats = EngineStats()
        """As of the engine's last step."""
        self._name = name
        self._load = load
        self._engine: Engine | None = None
        self._activity = Activity()
        self._commands: queue.SimpleQueue[tuple[str, Callable[[Engine], object]] | None] = queue.SimpleQueue()
        self._samples_submitted = self._samples_ended = 0
        self._finished: list[tuple[Callable[[RolloutGroup], None], RolloutGroup]] = []
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    @property
    def progress(self) -> Progress:
        """How far it has come, and what it is doing."""
        steps, doing = self._activity.finished, self._activity.doing
        if self._engine is not None:  # one step may compute many prompts
            steps += self._engine.batch.worker.runner.num_prefills
        return Progress(self._samples_ended, steps, doing != IDLE, doing)

    def submit(self, request: ResolvedRequest, on_finish: Callable[[RolloutGroup], None]) -> None:
        """Run a group. ``on_finish`` is called in the engine's thread."""

        def command(engine: Engine) -> None:
            self._samples_submitted += request.sampling.n
            engine.submit(request, lambda group: self._finished.append((on_finish, group)))

        self._commands.put(("submit", command))

    def abort(self, request_id: str | int) -> None:
        """Stop the groups of this id; they finish with what they have so far."""
        self._commands.put(("abort", lambda engine: engine.abort(request_id)))

    def call(self, function: Callable[[Engine], object], doing: str = "call") -> Future[None]:
        """Call ``function`` in the engine's thread between two steps. If it fails, so has the engine."""
        done: Future[None] = Future()

        def command(engine: Engine) -> None:
            if not done.set_running_or_notify_cancel():
                return  # its caller is gone
            try:
                function(engine)
            except BaseException as error:
                done.set_exception(error)
                time.sleep(LAST_WORDS_S)
                raise
            self.stats = engine.stats()
            done.set_result(None)

        self._commands.put((doing, command))
        return done

    def stop(self) -> None:
        """End the thread after the step it is in, and wait for that."""
        self._commands.put(None)
        self._thread.join()

    def _main(self) -> None:
        try:
            with self._activity.of("load"):
                self._engine = engine = self._load()
        except BaseException as error:
            self.loaded.set_exception(error)
            logger.warning("%s could not load its engine", self._name, exc_info=True)
            return
        try:
            self.stats = engine.stats()
            self.loaded.set_result(None)
            while self._take_commands(engine):
                with self._activity.of("step"):
                    self._step(engine)
            with self._activity.of("close"):
                engine.close()
        except BaseException:
            end_process(f"the engine of {self._name} failed; its process exits")

    def _take_commands(self, engine: Engine) -> bool:
        """Carry out all that has arrived; without work, wait for some. False: the thread is to end."""
        while True:
            try:
                command = self._commands.get(block=not engine.has_work())
            except queue.Empty:
                return True
            if command is None:
                return False
            doing, carry_out = command
            with self._activity.of(doing):
                carry_out(engine)

    def _step(self, engine: Engine) -> None:
        engine.step()
        self.stats = stats = engine.stats()
        self._samples_ended = self._samples_submitted - stats.live_rows - stats.waiting_samples
        finished, self._finished = self._finished, []
        for on_finish, group in finished:  # after the counters, so that who gets a group finds it counted
            on_finish(group)


def end_process(message: str) -> NoReturn:
    """End this process from any of its threads, with ``message`` and the present exception in its log.

    It ends also when the log can't be written, or hangs.
    """
    try:
        at_the_latest = threading.Timer(LAST_WORDS_S, os._exit, [1])
        at_the_latest.daemon = True
        at_the_latest.start()
        logger.critical(message, exc_info=True)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)
