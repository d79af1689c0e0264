"""The `rotquant` command: quantize, evaluate and convert a model, and what other installed packages add.

For all of them bad input ends in one sentence and exit status 2, a result that is not finite in status 3, Ctrl-C in
status 130, at any moment; so this module imports the others only where it can answer for them.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

#: The exit status of a command that Ctrl-C ended, as shells have it.
_INTERRUPTED = 128 + signal.SIGINT


def app(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an expected error is one sentence on standard error and exit status 2.

    Args:
        arguments: of the command; by default those of this process.
    """
    _end_with(os.environ.pop("ROTQUANT_ENDS_WITH", ""))
    earlier = signal.getsignal(signal.SIGINT)
    listens = earlier is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if listens:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        status = _INTERRUPTED
    finally:
        if listens:
            signal.signal(signal.SIGINT, earlier)
    sys.exit(status)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C: an exception, for which work under way cleans up; while modules are imported the end at once.

    An import has nothing to clean up, and libraries make other errors of an exception there, or pass over it.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            if os.isatty(2):
                os.write(2, b"\x1b[?25h")  # the cursor, which bars of progress hide
            os._exit(_INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _end_with(process: str) -> None:
    """End this process, at any point, when another has ended: the Snakemake whose job it is, and which may be killed.

    Args:
        process: its number; nothing where there is none. One that is not to be seen from here is not waited for.
    """
    try:
        ended = os.pidfd_open(int(process))
    except (ValueError, OSError, AttributeError):  # the last where the system is no Linux
        return

    def wait() -> None:
        select.select([ended], [], [])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _run(arguments: list[str]) -> int:
    """Run the command that the arguments name; its exit status."""
    import typer

    from rotquant.foundation.errors import RotquantError

    try:
        with warnings_in_words():
            return tree()(arguments, prog_name="rotquant", standalone_mode=False) or 0
    except typer.TyperException as error:
        return _stop(_usage(error, arguments))
    except RotquantError as error:
        return _stop(error)
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        where = "" if error.filename is None else f"{error.filename}: "
        return _stop(f"{where}{error.strerror or error}.")
    except RuntimeError as error:
        # torch's, which is not imported for its name; the driver's where another process has taken the memory
        if type(error).__name__ != "OutOfMemoryError" and "CUDA error: out of memory" not in str(error):
            raise
        return _stop("the GPU's memory does not suffice: use a smaller batch, shorter texts, another device or GPU.")


@cache
def tree() -> Any:
    """All commands, built once in a process and those that it forks."""
    from typer.main import get_command

    from rotquant.commands.root import cli

    return get_command(cli)


@contextmanager
def warnings_in_words() -> Iterator[None]:
    """Print the warnings of this package as their sentence alone, without file, class and line of code."""
    import warnings

    folder, usual = os.path.dirname(__file__), warnings.formatwarning

    def worded(message: Any, category: type[Warning], file: str, number: int, line: str | None = None) -> str:
        ours = file.startswith(folder) and issubclass(category, UserWarning)
        return f"warning: {message}\n" if ours else usual(message, category, file, number, line)

    warnings.formatwarning = worded
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _usage(error: Any, arguments: list[str]) -> str:
    """Typer's message about arguments that it refuses, as a sentence; nothing where it has printed the help."""
    from rotquant.commands.root import REPRODUCTION

    message = error.format_message().strip().rstrip(".")
    command = error.ctx.command_path if error.ctx else "rotquant"
    asked = next(iter(arguments), "")
    if asked in REPRODUCTION and asked not in tree().commands:
        return f"`rotquant {asked}` is a command of the reproduction, which is not installed: see the README."
    return message and f"{message}; see `{command} --help`."


def _stop(sentence: Exception | str) -> int:
    from rich.console import Console
    from rich.markup import escape

    from rotquant.foundation.errors import one_line

    text = one_line(sentence) if isinstance(sentence, str) else str(sentence)
    if text:
        shown = f"[red]rotquant:[/red] {escape(text)}"
        Console(stderr=True, soft_wrap=True, emoji=False).print(shown, highlight=False)
    return 2


if __name__ == "__main__":
    app()
