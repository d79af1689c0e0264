"""What long work says of itself on standard error: bars at a terminal, elsewhere plain lines at intervals.

Work opens a task and counts its steps; nothing is computed here and no result depends on it. A thread shows that time
passes while a step is long. Work that is over soon says nothing; `ROTQUANT_QUIET=1` in the environment or a block under
`silenced()` keeps all of it silent.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Event, RLock, Thread
from typing import IO, TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

Item = TypeVar("Item")

_silent: ContextVar[bool] = ContextVar("silent", default=False)


class Task:
    """Work under way.

    unit: what a step is, in the singular; empty where nothing is counted.
    total: how many steps there are; None where nobody knows.
    done: steps that are done. part: the share, 0 to 1, of the step under way.
    note: said beside the count, for example a loss.
    """

    def __init__(
        self, display: "Display", description: str, unit: str = "", total: int | None = None, done: int = 0
    ) -> None:
        self.description, self.unit, self.total, self.done = description, unit, total, done
        self.part, self.note, self.shown = 0.0, "", False
        self._display, self._first, self.started = display, done, display.clock()

    def advance(self, steps: int = 1, note: str | None = None) -> None:
        """Count steps as done."""
        self.done, self.part = self.done + steps, 0.0
        self.note = self.note if note is None else note
        self._display.poll()

    def parts(self, items: Sequence[Item]) -> Iterator[Item]:
        """The items, each an equal part of the step under way."""
        for number, item in enumerate(items):
            self.part = number / len(items)
            self._display.poll()
            yield item

    @property
    def count(self) -> str:
        """How far it is: "layer 3 of 12"; "3 files" where nobody knows how many there are."""
        known = f"{self.unit} {min(self.done + 1, self.total)} of {self.total}" if self.total is not None else ""
        counted = (known or _number(self.done, self.unit)) if self.unit else ""
        return ", ".join(filter(None, [counted, self.note]))

    def left(self, now: float) -> float | None:
        """Seconds that the rest takes if it goes on as so far; None while nobody knows, and where there is no rest."""
        done = self.done + self.part
        if self.total is None or not self._first < done < self.total:
            return None
        return (now - self.started) / (done - self._first) * (self.total - done)

    def times(self, now: float) -> str:
        """How long it has taken, and may take: "41 s, about 2 min left"."""
        left = self.left(now)
        return duration(now - self.started) + ("" if left is None else f", about {duration(_rough(left))} left")


def duration(seconds: float) -> str:
    """Seconds in words: "41 s", "3 min 20 s", "1 h 5 min"."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    size, large, small = (60, "min", "s") if seconds < 3599.5 else (3600, "h", "min")
    whole, rest = divmod(round(seconds * 60 / size), 60)
    return f"{whole} {large}" + (f" {rest} {small}" if rest else "")


def _rough(seconds: float) -> float:
    """As exact as an estimate deserves: tens of seconds up to two minutes, then whole minutes."""
    return math.ceil(seconds / 10) * 10 if seconds <= 120 else round(seconds / 60) * 60


def _number(count: int, unit: str) -> str:
    return f"{count:,} {unit}{'' if count == 1 else 's'}"


@dataclass
class Lines:
    """Plain lines, for logs.

    first: seconds of work before the first line. interval: seconds between lines. pause: between looks at the clock.
    """

    stream: IO[str]
    first: float = 5.0
    interval: float = 20.0
    pause: float = 1.0

    def show(self, tasks: Sequence[Task], now: float) -> None:
        """One line: where each task is, from outside inwards, and the times of the first that has an estimate."""
        timed = next((task for task in tasks if task.left(now) is not None), tasks[0])
        places = [": ".join(filter(None, [task.description, task.count])) for task in tasks]
        self._write(", ".join([*places, timed.times(now)]))

    def finished(self, task: Task, now: float) -> None:
        """A closing line."""
        count = f"{_number(task.done, task.unit)} in " if task.unit else ""
        self._write(f"{task.description}: done, {count}{duration(now - task.started)}")

    def close(self) -> None:
        """Lines stay."""

    def _write(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()


class Bars:
    """Bars at a terminal, one below the other for tasks within tasks; they vanish when the work is done.

    first, interval, pause: as of `Lines`.
    """

    first, interval, pause = 1.0, 0.25, 0.25

    def __init__(self, stream: IO[str]) -> None:
        # Standard output carries results and may lead elsewhere: it is let through.
        console = Console(file=stream, force_jupyter=False)
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._live.start()

    def show(self, tasks: Sequence[Task], now: float) -> None:
        """Draw the bars anew."""
        words = [(task.description, ", ".join(filter(None, [task.count, task.times(now)]))) for task in tasks]
        room = self._live.console.width - sum(max(map(len, column)) + 1 for column in zip(*words, strict=True))
        grid = Table.grid(padding=(0, 1))
        for _ in range(3):
            grid.add_column(no_wrap=True)
        for task, (description, place) in zip(tasks, words, strict=True):
            width = max(1, min(24, room))  # a narrow terminal shows words before bars
            bar = ProgressBar(task.total, task.done + task.part, width, pulse=task.total is None, animation_time=now)
            grid.add_row(description, bar, place)
        self._live.update(grid, refresh=True)

    def finished(self, task: Task, now: float) -> None:
        """Its bar vanishes."""

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._live.stop()


class Display:
    """The tasks under way in this process, and what shows them.

    clock: seconds, never going back. stream: where to show them, asked for when work begins; None for nowhere.
    thread: whether a thread shows that time passes; else `poll` alone does.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        stream: Callable[[], IO[str] | None] = lambda: sys.stderr,
        thread: bool = True,
    ) -> None:
        self.clock, self._stream, self._thread = clock, stream, thread
        self._tasks: list[Task] = []
        self._lock = RLock()
        self._screen: Lines | Bars | None = None
        self._due = self._ended = -math.inf
        self._stop = Event()

    def open(self, task: Task) -> None:
        """A task begins, within those under way."""
        with self._lock:
            if not self._tasks:
                self._begin()
            self._tasks.append(task)
        self.poll()

    def close(self, task: Task, finished: bool) -> None:
        """A task ends, `finished` or broken off."""
        with self._lock:
            self._tasks.remove(task)
            if not self._tasks:
                self._end(task if finished and task.shown else None)

    def poll(self) -> None:
        """Show the tasks where it is time to."""
        now = self.clock()
        if now < self._due:
            return
        # What cannot be shown, on a stream that is closed or gone, is no reason to stop the work.
        with self._lock, suppress(OSError, ValueError):
            if self._tasks and self._screen is not None:
                self._due = now + self._screen.interval
                for task in self._tasks:
                    task.shown = True
                self._screen.show(self._tasks, now)

    def watch(self, stop: Event, pause: float) -> None:
        """What the thread does: poll until the work is done."""
        while not stop.wait(pause):
            self.poll()

    def _begin(self) -> None:
        self._screen = _screen(self._stream())
        if self._screen is None:
            return
        # Work that follows at once goes on in the same intervals: many short tasks are long work too.
        if self.clock() - self._ended > self._screen.first:
            self._due = self.clock() + self._screen.first
        if self._thread:
            self._stop = Event()
            Thread(target=self.watch, args=(self._stop, self._screen.pause), name="progress", daemon=True).start()

    def _end(self, finished: Task | None) -> None:
        """All work has ended, with the task given, if that has been shown and has not broken off."""
        self._ended = self.clock()
        self._stop.set()
        screen, self._screen = self._screen, None
        if screen is None:
            return
        with suppress(OSError, ValueError):
            if finished is not None and self._ended - finished.started >= screen.first:
                self._due = self._ended + screen.interval
                screen.finished(finished, self._ended)
            screen.close()


def _screen(stream: IO[str] | None) -> Lines | Bars | None:
    """What shows tasks on a stream; nothing where a process has none."""
    if stream is None or stream.closed:
        return None
    return Bars(stream) if _moves_cursor(stream) else Lines(stream)


def _moves_cursor(stream: IO[str]) -> bool:
    """Whether a stream is a terminal that can draw bars."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


_display = Display()


@contextmanager
def task(description: str, unit: str = "", total: int | None = None, done: int = 0) -> Iterator[Task]:
    """Show a task while the block runs, which counts its steps by `advance`.

    Args:
        unit: what a step is, in the singular; empty for work without steps.
        total: how many there are.
        done: steps that an earlier process has done.
    """
    display = _display
    under_way = Task(display, description, unit, total, done)
    if _silent.get() or os.environ.get("ROTQUANT_QUIET", "0") not in ("", "0"):
        yield under_way
        return
    display.open(under_way)
    finished = False
    try:
        yield under_way
        finished = True
    finally:
        display.close(under_way, finished)


def track(items: Iterable[Item], description: str, unit: str, total: int | None = None) -> Iterator[Item]:
    """Yield the items of a loop, each a step of a task; `total` where they do not know how many they are."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with task(description, unit, total) as under_way:
        for item in items:
            yield item
            under_way.advance()


def at_terminal() -> bool:
    """Whether standard error shows bars."""
    return sys.stderr is not None and not sys.stderr.closed and _moves_cursor(sys.stderr)


def downloading(what: str) -> AbstractContextManager[object]:
    """A task for logs. At a terminal the library that downloads has bars of its own, which know the bytes."""
    return nullcontext() if at_terminal() else task(f"downloading {what}")


@contextmanager
def silenced(silent: bool = True) -> Iterator[None]:
    """Say nothing of the tasks that the block opens."""
    token = _silent.set(silent or _silent.get())
    try:
        yield
    finally:
        _silent.reset(token)
