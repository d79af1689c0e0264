"""How commands print what they found: words and tables for people, or with `--json` one JSON document for programs.

A command that prints numbers is decorated by `answers` and returns a `CommandResult`. Only this module knows the
options `--json` and `--output`, documents the keys of the document, and prints.
"""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rotquant.commands.outputs import MODEL, Writes, places_of
from rotquant.foundation.files import OutputKind, check_output_file, has_keys, json_text, read_json, write_text
from rotquant.models.gguf.importing import Origin, origin_of_model

#: Exit status of a command whose result is not finite; bad input has 2.
NOT_FINITE = 3
_ORIGINS = {
    "origins": "of each model that was dequantized from a GGUF file: file, sha256, name, types (shares of weights), "
    "bits_per_weight, dtype"
}


@dataclass(frozen=True)
class CommandResult:
    """Result of a command.

    data: what `--json` prints: text, numbers, lists and mappings with text as keys. Numbers that are not finite become
        the texts "nan", "inf" and "-inf", since JSON has none.
    shown: what people read in its place, in order. status: the exit status.
    judged: numbers of the result by name, of which one that is not finite ends the command with `NOT_FINITE`.
    """

    data: Mapping[str, Any]
    shown: tuple[str | Table, ...]
    status: int = 0
    judged: Mapping[str, float] = field(default_factory=dict)

    @property
    def complaint(self) -> str:
        """A sentence about the judged numbers that are not finite; empty where all are."""
        found = [f"{name} ({value})" for name, value in self.judged.items() if not math.isfinite(value)]
        if not found:
            return ""
        return (
            f"not finite: {', '.join(found)}. The network's outputs overflow or are no numbers: run it in float32, or "
            "quantize with other settings."
        )


def answers(
    keys: Mapping[str, str], *, file: bool = False
) -> Callable[[Callable[..., CommandResult | None]], Callable[..., None]]:
    """Make a command of a function that returns a `CommandResult`: it has `--json`, and `--output` where `file` is set.

    With `--json` standard output holds the document alone: whatever else is printed meanwhile goes to standard error.
    A command of models says which of them were dequantized from GGUF files. None in place of an answer prints nothing:
    another process of the same work answers.

    Args:
        keys: the meaning of each key of the document, for `--help`.
        file: whether the document can be written to a file too; that place is checked before the work.
    """

    def decorate(command: Callable[..., CommandResult | None]) -> Callable[..., None]:
        marked = {"command": f"rotquant {command.__name__}"} if file else {}
        models = [name for name, mark in places_of(command).items() if mark is MODEL]

        def is_one(path: Path) -> bool:
            return has_keys("command")(path) and read_json(path)["command"] == marked["command"]

        @functools.wraps(command)
        def run(*arguments: Any, json: bool, **options: Any) -> None:
            output: Path | None = options.pop("output") if file else None
            if output is not None:
                check_output_file(output)
            origins = _origins(options.get(name) for name in models)
            said = {"origins": {model: one.model_dump(mode="json") for model, one in origins.items()}} if models else {}
            with redirect_stdout(sys.stderr if json else sys.stdout):
                answer = command(*arguments, **options)
            if answer is None:
                return
            document = json_text({**marked, **answer.data, **said}) if json or output else ""
            if output is not None:
                write_text(output, document)
            for part in (document,) if json else (*answer.shown, *(f"{name}: {one}" for name, one in origins.items())):
                _print(part)
            if answer.complaint:
                typer.echo(f"rotquant: {answer.complaint}", err=True)
            if status := answer.status or (NOT_FINITE if answer.complaint else 0):
                raise typer.Exit(status)

        documented = {**({"command": "what printed it"} if file else {}), **keys, **(_ORIGINS if models else {})}
        own = inspect.signature(command, eval_str=True)
        added = [inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_json(documented))]
        if file:
            annotation = Annotated[_OUTPUT, Writes(OutputKind(f"a result of `{marked['command']}`", is_one))]
            added.append(
                inspect.Parameter("output", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )
        parameters = [*own.parameters.values(), *added]
        run.__signature__ = own.replace(parameters=parameters, return_annotation=None)  # pyright: ignore
        vars(run)["keys"] = documented
        return run

    return decorate


def _origins(given: Iterable[Any]) -> dict[str, Origin]:
    """The GGUF files that models were dequantized from, by the models' names."""
    named = [str(name) for value in given for name in (value if isinstance(value, list) else [value]) if name]
    found = {name: origin_of_model(name) for name in named}
    return {name: origin for name, origin in found.items() if origin is not None}


def note_and_sentences(note: str) -> tuple[str, ...]:
    """What is written beside a number of a note, and below it as lines where the note is a sentence."""
    return ("", f"note: {note}") if note.endswith(".") else (note,)


#: Characters of a line of a table that is printed whole.
_WHOLE = 270

_OUTPUT = Annotated[Path | None, typer.Option("--output", "-o", help="Also write the result (JSON) here.")]


def _json(keys: Mapping[str, str]) -> Any:
    """The option `--json`, whose help says what each key means."""
    meanings = "; ".join(f"{name}: {meaning}" if meaning else name for name, meaning in keys.items())
    return Annotated[bool, typer.Option("--json", help=f"Print JSON and nothing else. Its keys: {meanings}.")]


def print_table(table: Table) -> None:
    """Print a table whose cells mean themselves: "[red]" in a path or a token is no colour, ":key:" no picture.

    One of columns that never wrap is printed whole where no terminal limits it. Elsewhere a word that is wider than its
    column, such as a path, goes on in the next line.
    """
    for column in table.columns:
        column.overflow = column.overflow if column.no_wrap else "fold"
    whole = all(column.no_wrap for column in table.columns) and not sys.stdout.isatty()
    Console(markup=False, emoji=False, width=_WHOLE if whole else None).print(table)


def _print(part: str | Table) -> None:
    if isinstance(part, Table):
        print_table(part)
    else:
        typer.echo(part, nl=not part.endswith("\n"))
