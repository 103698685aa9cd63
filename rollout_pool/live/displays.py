"""Ways to show progress: a bar on a terminal, a line that is renewed in a notebook, lines in a log."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol, TextIO

PLAIN_INTERVAL_S = 5.0
NOTEBOOK_INTERVAL_S = 0.5
BAR_WIDTH = 30


class News(Protocol):
    """What is shown; as text it is one line."""

    @property
    def total(self) -> int: ...

    @property
    def done(self) -> int: ...

    @property
    def description(self) -> str: ...

    @property
    def state(self) -> str: ...


class Display(Protocol):
    """Where progress is shown. ``show`` may be called as often as there is news."""

    def start(self, news: News) -> None: ...

    def show(self, news: News, *, is_last: bool = False) -> None: ...

    def say(self, text: str) -> None: ...

    def stop(self) -> None: ...


def choose(stream: TextIO | None) -> Display:
    """For ``stream``; None is standard error, or the output of a notebook's cell."""
    if stream is None and _is_notebook():
        return _Notebook()
    stream = stream or sys.stderr
    return _Bar(stream) if stream.isatty() else _Plain(stream)


def _is_notebook() -> bool:
    """Whether this process is the kernel of a notebook. One that never loaded IPython is none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


class _Plain:
    """A line every few seconds, for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown_at = time.monotonic()

    def start(self, news: News) -> None:
        self._shown_at = time.monotonic()

    def show(self, news: News, *, is_last: bool = False) -> None:
        if is_last or time.monotonic() - self._shown_at >= PLAIN_INTERVAL_S:
            self.say(str(news))

    def say(self, text: str) -> None:
        self._shown_at = time.monotonic()
        print(text, file=self._stream, flush=True)

    def stop(self) -> None:
        pass


class _Notebook:
    """One line below the cell that is renewed. Needs no widgets; a saved notebook shows it, too."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown_at = 0.0
        self._news: News | None = None

    def start(self, news: News) -> None:
        from IPython.display import display

        self._news = news
        self._handle = display({"text/plain": self._line()}, raw=True, display_id=True)

    def show(self, news: News, *, is_last: bool = False) -> None:
        if is_last or time.monotonic() - self._shown_at >= NOTEBOOK_INTERVAL_S:
            self._shown_at = time.monotonic()
            self._handle.update({"text/plain": self._line()}, raw=True)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def stop(self) -> None:
        self._handle.update({"text/plain": self._line()}, raw=True)

    def _line(self) -> str:
        assert self._news is not None
        filled = BAR_WIDTH * self._news.done // max(self._news.total, 1)
        return f"{'█' * filled}{'░' * (BAR_WIDTH - filled)} {self._news}"


class _Bar:
    """A bar on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichBar

        self._bar = RichBar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=Console(file=stream),
        )
        self._task: Any = None

    def start(self, news: News) -> None:
        self._task = self._bar.add_task("starting", total=news.total, completed=news.done, state="")
        self._bar.start()

    def show(self, news: News, *, is_last: bool = False) -> None:
        self._bar.update(self._task, description=news.description, completed=news.done, state=news.state)

    def say(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)

    def stop(self) -> None:
        self._bar.stop()
