"""Background tasks of an event loop whose failures are never lost."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any


class TaskSet:
    """Holds tasks until they are done, and gives the exception of each that fails to ``on_error``.

    The loop itself keeps only weak references to tasks, and reports an exception that nobody
    asked for when the task is collected, if ever.

    Tasks run in the context of whoever made the set, not of whoever starts them: Ray keeps the
    current call there, and when a call is cancelled it cancels all that was submitted in its
    context, which may be other callers' work.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._context = contextvars.copy_context()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background."""
        task = asyncio.get_running_loop().create_task(coroutine, context=self._context)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def cancel_all(self) -> None:
        """Cancel every task, the one that calls this included."""
        for task in tuple(self._tasks):
            task.cancel()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)
