"""What commands read and write: an output replaces only its like, and nothing that the same command reads.

A parameter that names a place says so in its annotation, `Reads` or `Writes`. `guard` checks them before a command
begins, and gives each command that writes the option `--force`; a test finds the commands that say nothing.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from rotquant.foundation.errors import ResultError, RotquantError
from rotquant.foundation.files import OutputKind, check_output_file, check_output_folder, replacing
from rotquant.models.deltas import base_folder

Arguments = Mapping[str, Any]
"""A command's arguments by name."""


def place_of(given: str | Path) -> list[Path]:
    """A path that is there, and the base of low-rank deltas; of the hub's names nothing."""
    path = Path(given).expanduser()
    with suppress(RotquantError, OSError):
        base = base_folder(path)
        return [path, *([base] if base else [])] if path.exists() else []
    return [path]


def _recipe(given: str) -> list[Path]:
    return place_of(given) if Path(given).suffix in (".yaml", ".yml", ".json") else []


@dataclass(frozen=True)
class Reads:
    """Mark of a parameter that names what is read. places: the files and folders that a value of it means."""

    places: Callable[[Any], Iterable[Path]] = place_of


@dataclass(frozen=True)
class Writes:
    """Mark of a parameter that names what is written.

    kind: of what is written, by the command's arguments where they decide it.
    folder: whether it is a folder, which is replaced as a whole; by the arguments too.
    files: the files that are written below a folder, which stays, by its path and the arguments.
    """

    kind: OutputKind | Callable[[Arguments], OutputKind]
    folder: bool | Callable[[Arguments], bool] = False
    files: Callable[[Path, Arguments], Iterable[Path]] | None = None

    def check(self, path: Path, arguments: Arguments, inputs: list[Path], force: bool) -> list[Path]:
        """Refuse a path where writing loses something; what may be replaced there.

        Raises:
            ResultError: it is an input, or another thing stands there and `force` is not given.
        """
        kind = self.kind if isinstance(self.kind, OutputKind) else self.kind(arguments)
        folder = self.folder if isinstance(self.folder, bool) else self.folder(arguments)
        targets = [path] if self.files is None else [*self.files(path, arguments)]
        with replacing(*(targets if force else ())):
            for target in targets:
                if folder:
                    check_output_folder(target, kind, inputs=inputs)
                else:
                    check_output_file(target, kind, inputs)
        return targets


MODEL, FILE, RECIPE = Reads(), Reads(), Reads(_recipe)
NEW = Writes(OutputKind("empty"), folder=True)

_FORCE = Annotated[
    bool, typer.Option("--force", help="Replace what stands in the place of the output, whatever it is.")
]


def places_of(command: Callable[..., Any]) -> dict[str, Reads | Writes | None]:
    """What a command's parameters say of the places that they name, by name; None of paths that say nothing."""
    found: dict[str, Reads | Writes | None] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        hint, *marks = get_args(parameter.annotation) if get_origin(parameter.annotation) is Annotated else (None,)
        kinds = {hint if hint is not None else parameter.annotation, *get_args(hint)}
        mark = next((one for one in marks if isinstance(one, Reads | Writes)), None)
        if mark is not None or Path in kinds or list[Path] in kinds:
            found[name] = mark
    return found


def guard(app: typer.Typer) -> None:
    """Have every command of a tree check its outputs before it begins; those that write get `--force`."""
    for info in app.registered_commands:
        command = info.callback
        if command is not None and any(isinstance(mark, Writes) for mark in places_of(command).values()):
            info.callback = _guarded(command)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            guard(group.typer_instance)


def _guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    marks, own = places_of(command), inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def run(*positional: Any, force: bool, **named: Any) -> Any:
        arguments = own.bind(*positional, **named).arguments
        inputs = [
            path for name, mark in marks.items() if isinstance(mark, Reads) for path in _read(mark, arguments.get(name))
        ]
        written: list[Path] = []
        for name, mark in marks.items():
            if isinstance(mark, Writes) and arguments.get(name) is not None:
                targets = mark.check(arguments[name], arguments, inputs, force)
                if twice := {*map(Path.absolute, targets)} & {*map(Path.absolute, written)}:
                    raise ResultError(f"{twice.pop()} is named for two outputs: name two places.")
                written += targets
        with replacing(*(written if force else ())):
            return command(*positional, **named)

    added = inspect.Parameter("force", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_FORCE)
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), added])  # pyright: ignore
    return run


def _read(mark: Reads, value: Any) -> Iterator[Path]:
    for given in value if isinstance(value, list | tuple) else () if value is None else (value,):
        with suppress(RotquantError):  # which the command itself says
            yield from mark.places(given)
