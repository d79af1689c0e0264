"""Long work says how far it is: bars at a terminal, lines in logs, nothing for short work. Time is a fake clock's."""

import ast
import io
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from reproduction.identity.code import STAGES, code_files
from rotquant.foundation import progress
from rotquant.foundation.progress import Display, downloading, duration, shown_on, silenced, task, track
from tests.helpers.watching import Clock, long_work

PACKAGE = Path(progress.__file__).parents[1]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the test's display."""
    monkeypatch.delenv("ROTQUANT_QUIET", raising=False)
    return Clock()


def display_on(stream: io.StringIO | None, clock: Clock) -> Display:
    """A display on a stream, without a thread."""
    return Display(clock, lambda: stream, thread=False)


@pytest.fixture
def log(clock: Clock) -> Iterator[io.StringIO]:
    """Standard error as a file."""
    stream = io.StringIO()
    with shown_on(display_on(stream, clock)):
        yield stream


@pytest.fixture
def terminal(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Standard error as a terminal."""
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with shown_on(display_on(stream, clock)):
        yield stream


def lines(stream: io.StringIO) -> list[str]:
    """What a log holds, which is whole lines without control characters."""
    text = stream.getvalue()
    assert not text or text.endswith("\n")
    assert all(line.isprintable() for line in text.splitlines())
    return text.splitlines()


def test_a_log_gets_a_line_after_five_seconds_and_then_every_twenty(clock: Clock, log: io.StringIO) -> None:
    seen = []
    for _ in track(range(12), "GPTQ", "layer"):
        clock.now += 4
        seen.append(len(lines(log)))
    assert lines(log) == [
        "GPTQ: layer 3 of 12, 8 s, about 40 s left",
        "GPTQ: layer 8 of 12, 28 s, about 20 s left",
        "GPTQ: layer 12 of 12, 48 s",
        "GPTQ: done, 12 layers in 48 s",
    ]
    assert seen == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]  # while the work is going on


def test_short_work_says_nothing(clock: Clock, log: io.StringIO) -> None:
    for _ in track(range(12), "GPTQ", "layer"):
        clock.now += 0.4
    assert lines(log) == []


def test_many_short_tasks_are_long_work_but_not_where_time_passes_between_them(clock: Clock, log: io.StringIO) -> None:
    for number in range(6):
        for _ in track(range(2), f"task {number}", "step"):
            clock.now += 1
    assert [line.split(":")[0] for line in lines(log)] == ["task 2"]
    clock.now += 3600
    for _ in track(range(2), "another", "step"):
        clock.now += 1
    assert len(lines(log)) == 1


def test_time_passes_while_a_step_is_long(clock: Clock, log: io.StringIO) -> None:
    waits = iter([False, False, True])

    class Waiting:
        """In place of the event that ends the thread: ten seconds at every wait."""

        def wait(self, _: float) -> bool:
            clock.now += 10
            return next(waits)

    display = display_on(log, clock)
    with shown_on(display), task("loading r"):
        display.watch(Waiting(), 1.0)
    assert lines(log) == ["loading r, 10 s", "loading r: done, 30 s"]


def test_the_thread_that_looks_at_the_clock_ends_with_the_work() -> None:
    ended = []

    class Watched(Display):
        def watch(self, stop: threading.Event, pause: float) -> None:
            assert stop.wait(60)
            ended.append(pause)

    earlier = set(threading.enumerate())
    with shown_on(Watched()), task("outer"), task("inner"):
        (thread,) = set(threading.enumerate()) - earlier
    thread.join(60)
    assert ended == [progress.LINES[2]]


def test_where_nobody_knows_the_end_the_steps_are_counted(clock: Clock, log: io.StringIO) -> None:
    def generated() -> Iterator[int]:
        yield from range(3)

    with task("reading", "file") as under_way:
        clock.now += 6
        under_way.advance()
    for _ in track(generated(), "listening", "thing"):
        clock.now += 15
    assert lines(log) == [
        "reading: 1 file, 6 s",
        "reading: done, 1 file in 6 s",
        "listening: 2 things, 30 s",
        "listening: done, 3 things in 45 s",
    ]


def test_the_estimate_counts_parts_of_a_step_and_not_what_was_done_before(clock: Clock, log: io.StringIO) -> None:
    with task("learning rotations", "step", total=100, done=90) as under_way:
        clock.now += 6
        under_way.advance(note="loss 3.211")
    with task("GPTQ", "layer", total=2) as under_way:
        for _ in range(2):
            for _ in under_way.parts("abcd"):
                clock.now += 20
            under_way.advance()
    assert [line for line in lines(log) if "left" in line] == [
        "learning rotations: step 92 of 100, loss 3.211, 6 s, about 1 min left",
        "GPTQ: layer 1 of 2, 20 s, about 2 min left",
        "GPTQ: layer 1 of 2, 40 s, about 2 min left",
        "GPTQ: layer 1 of 2, 1 min, about 1 min 40 s left",
        "GPTQ: layer 2 of 2, 1 min 20 s, about 1 min 20 s left",
        "GPTQ: layer 2 of 2, 1 min 40 s, about 1 min left",
        "GPTQ: layer 2 of 2, 2 min, about 40 s left",
        "GPTQ: layer 2 of 2, 2 min 20 s, about 20 s left",
    ]


def test_tasks_within_tasks_share_a_line(clock: Clock, log: io.StringIO) -> None:
    for _ in track(range(2), "OmniQuant", "layer"):
        for _ in track(range(3), "training", "step"):
            clock.now += 2
    assert lines(log) == [
        "OmniQuant: layer 1 of 2, training: step 3 of 3, 6 s",
        "OmniQuant: done, 2 layers in 12 s",
    ]


def test_a_loop_that_fails_ends_its_task_without_a_closing_line(clock: Clock, log: io.StringIO) -> None:
    def work() -> None:
        for number in track(range(12), "GPTQ", "layer"):
            clock.now += 30
            if number == 2:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert lines(log)[-1].startswith("GPTQ: layer 3 of 12")
    assert_over(clock, log)


def test_a_loop_that_is_left_early_ends_its_task(clock: Clock, log: io.StringIO) -> None:
    for _ in track(range(12), "GPTQ", "layer"):
        clock.now += 30
        break
    assert_over(clock, log)


def assert_over(clock: Clock, log: io.StringIO) -> None:
    """No earlier task is under way: a line names all that are."""
    for _ in track(range(1), "loading", "file"):
        clock.now += 60
    assert lines(log)[-2] == "loading: file 1 of 1, 1 min"


def test_silence_can_be_asked_for(clock: Clock, log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        for _ in track(range(3), "GPTQ", "layer"):
            clock.now += 30

    with silenced():
        work()
        with silenced(False):  # what is silent stays so within
            work()
    monkeypatch.setenv("ROTQUANT_QUIET", "1")
    work()
    assert log.getvalue() == ""
    monkeypatch.setenv("ROTQUANT_QUIET", "0")
    work()
    assert log.getvalue()


def test_a_terminal_shows_a_bar_for_each_task_and_is_left_as_it_was(clock: Clock, terminal: Terminal) -> None:
    for _ in track(range(2), "OmniQuant", "layer"):
        for _ in track(range(3), "training", "step"):
            clock.now += 2
    shown = terminal.getvalue()
    assert "OmniQuant" in shown
    assert "layer 2 of 2, 8 s, about 10 s left" in shown
    assert "step 2 of 3, 2 s, about 10 s left" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor, hidden and shown again
    assert "done" not in shown


def test_short_work_touches_no_terminal(clock: Clock, terminal: Terminal) -> None:
    for _ in track(range(3), "GPTQ", "layer"):
        clock.now += 0.2
    assert terminal.getvalue() == ""


def test_a_bar_vanishes_where_the_work_fails(clock: Clock, terminal: Terminal) -> None:
    before = sys.stderr

    def work() -> None:
        with task("loading") as under_way:
            clock.now += 30
            under_way.advance()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert "loading" in terminal.getvalue()
    assert terminal.getvalue().rstrip("\r\n").endswith("\x1b[2K")  # the line is erased
    assert sys.stderr is before


def test_a_terminal_without_cursor_movements_gets_lines(
    clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    for _ in track(range(3), "GPTQ", "layer"):
        clock.now += 30
    assert lines(terminal)[0] == "GPTQ: layer 2 of 3, 30 s, about 1 min left"


def test_a_narrow_terminal_shortens_bars_before_words(
    clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    for _ in track(range(3), "GPTQ", "layer"):
        clock.now += 30
    assert "layer 2 of 3, 30 s, about 1 min left" in terminal.getvalue()


@pytest.mark.parametrize("stream", [None, "closed", "broken"])
def test_work_goes_on_where_nothing_can_be_shown(stream: str | None, clock: Clock) -> None:
    class Broken(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    target = None if stream is None else Broken()
    if stream == "closed":
        target.close()
    done = []
    with shown_on(display_on(target, clock)):
        for number in track(range(3), "GPTQ", "layer"):
            clock.now += 30
            done.append(number)
    assert done == [0, 1, 2]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (3599.2, "59 min 59 s"),
        (3599.8, "1 h"),
        (3900, "1 h 5 min"),
        (90000, "25 h"),
    ],
)
def test_durations_are_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_what_progress_says_makes_no_result_anew() -> None:
    files = {stage: code_files(*entries) for stage, entries in STAGES.items()}
    assert all(files.values())
    assert [stage for stage, found in files.items() if Path(progress.__file__) in found] == []


def test_a_download_is_a_task_in_a_log_and_left_to_its_librarys_bars_at_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with long_work(monkeypatch), downloading("owner/name"):
        pass
    assert "downloading owner/name, " in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with long_work(monkeypatch), downloading("owner/name"):
        pass
    assert capsys.readouterr().err == ""


def test_no_other_module_shows_progress() -> None:
    def imported(path: Path) -> set[str]:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        names: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        return names

    doors = ("tqdm", "rich.progress", "rich.live", "rich.status")
    using = {path.name for path in PACKAGE.rglob("*.py") if any(name.startswith(doors) for name in imported(path))}
    assert using == {"progress.py"}
