"""Progress of long work on standard error: bars at a terminal, elsewhere plain lines at intervals.

Work opens a task and counts its steps; nothing is computed here and no result depends on it. A thread shows that time
passes while a step is long. Work that is over soon says nothing; `ROTQUANT_QUIET=1` in the environment or a block under
`silenced()` keeps all of it silent.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from threading import Event, RLock, Thread
from typing import IO, Any, TypeGuard, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

Item = TypeVar("Item")

_silent: ContextVar[bool] = ContextVar("silent", default=False)


#: Seconds of work before it is first shown, between two showings, and between two looks at the clock.
LINES, BARS = (5.0, 20.0, 1.0), (1.0, 0.25, 0.25)


class ProgressTask:
    """Work under way.

    unit: what a step is, in the singular; empty where nothing is counted.
    total: how many steps there are; None where nobody knows.
    done: steps that are done. part: the share, 0 to 1, of the step under way.
    note: shown next to the count, for example a loss.
    """

    def __init__(self, display: "Display", description: str, unit: str, total: int | None, done: int) -> None:
        self.description, self.unit, self.total, self.done = description, unit, total, done
        self.part, self.note, self.shown, self.bar = 0.0, "", False, TaskID(0)
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
        """Progress as a count: "layer 3 of 12"; "3 files" where nobody knows how many there are."""
        known = f"{self.unit} {min(self.done + 1, self.total)} of {self.total}" if self.total is not None else ""
        return ", ".join(filter(None, [self.unit and (known or _number(self.done, self.unit)), self.note]))

    def left(self, now: float) -> float | None:
        """Seconds that the rest takes if it goes on as so far; None while nobody knows, and where there is no rest."""
        done = self.done + self.part
        if self.total is None or not self._first < done < self.total:
            return None
        return (now - self.started) / (done - self._first) * (self.total - done)

    def times(self, now: float) -> str:
        """Elapsed and remaining time: "41 s, about 2 min left"."""
        left, taken = self.left(now), duration(now - self.started)
        if left is None:
            return taken
        rough = math.ceil(left / 10) * 10 if left <= 120 else round(left / 60) * 60  # as exact as it deserves
        return f"{taken}, about {duration(rough)} left"


def duration(seconds: float) -> str:
    """Seconds in words: "41 s", "3 min 20 s", "1 h 5 min"."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    size, large, small = (60, "min", "s") if seconds < 3599.5 else (3600, "h", "min")
    whole, rest = divmod(round(seconds * 60 / size), 60)
    return f"{whole} {large}" + (f" {rest} {small}" if rest else "")


def _number(count: int, unit: str) -> str:
    return f"{count:,} {unit}{'' if count == 1 else 's'}"


class Display:
    """The tasks under way in this process, and where they are shown.

    clock: seconds, never going back. stream: where to show them, asked for when work begins; None for nowhere.
    thread: whether a thread shows that time passes; else `poll` alone does.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        stream: Callable[[], IO[str] | None] = lambda: sys.stderr,
        thread: bool = True,
    ) -> None:
        self.clock, self._choose, self._thread = clock, stream, thread
        self._tasks: list[ProgressTask] = []
        self._stream: IO[str] | None = None
        self._bars: Progress | None = None
        self._due = self._ended = -math.inf
        self._lock, self._stop = RLock(), Event()

    def anew(self) -> "Display":
        """A display like this one on which nothing was shown."""
        return Display(self.clock, self._choose, self._thread)

    @contextmanager
    def running(self, task: ProgressTask) -> Iterator[None]:
        """Show a task, within those under way, while the block runs."""
        with self._lock:
            if not self._tasks:
                self._begin()
            self._tasks.append(task)
        finished = False
        try:
            self.poll()
            yield
            finished = True
        finally:
            with self._lock, suppress(OSError, ValueError):
                self._tasks.remove(task)
                if not self._tasks:
                    self._end(task if finished and task.shown else None)
                elif self._bars is not None and task.shown:
                    self._bars.remove_task(task.bar)

    def poll(self) -> None:
        """Show the tasks where it is time to."""
        now = self.clock()
        # What cannot be shown, on a stream that is closed or gone, is no reason to stop the work.
        with self._lock, suppress(OSError, ValueError):
            if now >= self._due and self._tasks and self._stream is not None:
                self._due = now + self._interval
                self._show(now)

    def say(self, line: str) -> None:
        """Show a line of text at once."""
        with suppress(OSError, ValueError):
            if (stream := self._choose()) is not None and not stream.closed:
                print(line, file=stream, flush=True)

    def watch(self, stop: Event, pause: float) -> None:
        """Body of the display's thread: poll until the work is done."""
        while not stop.wait(pause):
            self.poll()

    def _begin(self) -> None:
        stream = self._choose()
        self._stream = None if stream is None or stream.closed else stream
        self._bars = _bars(self._stream) if _moves_cursor(self._stream) else None
        self._first, self._interval, pause = LINES if self._bars is None else BARS
        # Work that follows at once goes on in the same intervals: many short tasks are long work too.
        if self.clock() - self._ended > self._first:
            self._due = self.clock() + self._first
        if self._thread and self._stream is not None:
            self._stop = Event()
            Thread(target=self.watch, args=(self._stop, pause), name="progress", daemon=True).start()

    def _show(self, now: float) -> None:
        """Where each task is, from outside inwards: a bar each, or a line with the first estimate that there is."""
        if self._bars is None:
            timed = next((task for task in self._tasks if task.left(now) is not None), self._tasks[0])
            places = [": ".join(filter(None, [task.description, task.count])) for task in self._tasks]
            print(*places, timed.times(now), sep=", ", file=self._stream, flush=True)
        else:
            for task in self._tasks:
                if not task.shown:
                    task.bar = self._bars.add_task(task.description, total=task.total, place="")
                place = ", ".join(filter(None, [task.count, task.times(now)]))
                self._bars.update(task.bar, completed=task.done + task.part, place=place)
            self._bars.start()
            self._bars.refresh()
        for task in self._tasks:
            task.shown = True

    def _end(self, finished: ProgressTask | None) -> None:
        """All work has ended, with the task given, if that has been shown and has not broken off."""
        self._ended = self.clock()
        self._stop.set()
        if self._bars is not None:
            self._bars.stop()
        elif finished is not None and self._ended - finished.started >= self._first:
            self._due = self._ended + self._interval
            count = f"{_number(finished.done, finished.unit)} in " if finished.unit else ""
            words = f"{finished.description}: done, {count}{duration(self._ended - finished.started)}"
            print(words, file=self._stream, flush=True)


def _bars(stream: IO[str]) -> Progress:
    """Bars that vanish when the work is done; a narrow terminal shortens them before words."""
    description, place = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[place]"))
    # Standard output carries results and may lead elsewhere: it is let through.
    console = Console(file=stream, force_jupyter=False)
    columns = (description, BarColumn(24), place)
    return Progress(*columns, console=console, auto_refresh=False, transient=True, redirect_stdout=False)


def _moves_cursor(stream: IO[str] | None) -> TypeGuard[IO[str]]:
    """Whether a stream is a terminal that can draw bars."""
    return bool(stream and not stream.closed and stream.isatty()) and os.environ.get("TERM") not in ("dumb", "unknown")


_process = Display()
_display: ContextVar[Display | None] = ContextVar("display", default=None)


@contextmanager
def shown_on(display: Display | None = None) -> Iterator[None]:
    """Show the tasks that the block opens on another display; by default one like this, whose intervals begin anew."""
    token = _display.set(display or (_display.get() or _process).anew())
    try:
        yield
    finally:
        _display.reset(token)


@contextmanager
def task(description: str, unit: str = "", total: int | None = None, done: int = 0) -> Iterator[ProgressTask]:
    """Show a task while the block runs, which counts its steps by `advance`.

    Args:
        unit: what a step is, in the singular; empty for work without steps.
        total: how many there are.
        done: steps that an earlier process has done.
    """
    display = _display.get() or _process
    under_way = ProgressTask(display, description, unit, total, done)
    with nullcontext() if is_silent() else display.running(under_way):
        yield under_way


_listener: ContextVar[Callable[[str, Mapping[str, Any]], object] | None] = ContextVar("listener", default=None)


@contextmanager
def heard_by(listener: Callable[[str, Mapping[str, Any]], object] | None) -> Iterator[None]:
    """Let a function hear each step of the block's trainings: the training's description and the step's record."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(description: str, record: Mapping[str, Any]) -> None:
    """Tell a step to the one that listens, if any."""
    if (listener := _listener.get()) is not None:
        listener(description, record)


def is_silent() -> bool:
    """Whether nothing is said of work here."""
    return _silent.get() or os.environ.get("ROTQUANT_QUIET", "0") not in ("", "0")


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
    return _moves_cursor(sys.stderr)


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
