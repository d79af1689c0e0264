"""`rotquant card`: a diagnosis, tasks and what is asked of a model that stands for the papers', as a model card."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reproduction.corpora import MODULES, corpus_spec
from reproduction.tasks import TASKS, Scores, identity, prepare, scores
from reproduction.tasks.settings import ZeroShot
from rotquant.commands import diagnose
from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.options import Checkpoint, Corpus, Device, Dtype, Seed, place_of_bos
from rotquant.commands.outputs import Writes
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import OutputKind, check_output_file, read_text, write_text

if TYPE_CHECKING:
    from rotquant.commands.diagnosis import FigureTable

CARD_START, CARD_END = "<!-- diagnose:start -->", "<!-- diagnose:end -->"


@answers(
    {
        **diagnose.KEYS,
        "tasks": "definitions and items, null where none are asked",
        "asked": "each figure with what is asked of a model that stands for the papers'",
        "accuracy": "by variant and task, percent",
    },
    file=True,
)
def card(
    context: typer.Context,
    model: Checkpoint,
    card: Annotated[
        Path | None,
        typer.Option(help="Write the result into this model card, between its diagnose markers."),
        Writes(OutputKind("a model card", lambda _: True)),  # of which only what stands between the markers is replaced
    ] = None,
    corpus: Corpus = "modules",
    split: diagnose.DiagnosedSplit = None,
    sequence_length: diagnose.DiagnosedLength = None,
    max_windows: diagnose.DiagnosedWindows = 32,
    bos: diagnose.DiagnosedBos = None,
    tasks_limit: Annotated[
        int, typer.Option(min=0, help="Items of each of the eight shipped tasks of choice; 0 asks none.")
    ] = 100,
    outlier_ratio: diagnose.OutlierRatio = 20.0,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> CommandResult:
    """Diagnose MODEL as `rotquant diagnose` does, ask it the shipped tasks, and judge it as a stand-in for the papers'.

    Example: `rotquant card workflow/resources/models/rq-7b --split validation`
    """
    if card is not None:
        check_output_file(card)
    if card and CARD_START not in read_text(card, "model card", "write it in UTF-8"):
        raise ResultError(f"{card} has no line {CARD_START} to write the diagnosis after.")
    spec = corpus_spec(corpus)
    part = diagnose.diagnosed_part(split, spec)
    chosen: dict[str, Any] = {"tasks": tuple(TASKS["shipped"])[:8], "corpus": MODULES.name, "limit": tasks_limit or 1}
    tasks = ZeroShot(**chosen, bos=place_of_bos(bos))
    folder = prepare(tasks, None, MODULES, part) if tasks_limit else None

    def ask(network: Any, tokenizer: Any) -> Scores | None:
        return None if folder is None else scores(network, tokenizer, tasks, folder)

    measured = diagnose.diagnosed(
        model,
        spec,
        part,
        sequence_length,
        max_windows,
        bos,
        outlier_ratio,
        seed,
        device,
        dtype,
        ask if folder else None,
    )
    from reproduction.shipped.phenomena import accuracies, asked, phenomena
    from rotquant.commands.diagnosis import tables

    found = (
        measured
        if folder is None
        else dataclasses.replace(measured, on=f"{measured.on}, tasks made from {part} modules")
    )
    shown = [*tables(found.costs, found.sinks, found.decode), *([accuracies(found.costs)] if folder else [])]
    if card:
        head = f"Printed by `{_command(context)}`, on {found.on}."
        _write_card(card, head, [phenomena(found.costs, found.sinks, found.decode), *shown])
    more = {
        "tasks": None if folder is None else identity(tasks, folder),
        "asked": [dataclasses.asdict(one) for one in asked(found.costs, found.sinks, found.decode)],
        "accuracy": {name: scored.metrics for name, scored in found.costs.answers.items()},
    }
    return found.result(shown, more)


def _command(context: typer.Context) -> str:
    """The command as a user would repeat it, without where its result goes and what it runs on."""
    usual = {str(parameter.name): parameter.default for parameter in context.command.params}
    left_out = ("model", "card", "output", "json", "device")
    given = {name: value for name, value in context.params.items() if name not in left_out and value != usual[name]}
    words = [f"--{name.replace('_', '-')} {given[name]}" for name in usual if name in given]
    return " ".join(["rotquant card", context.params["model"], *words])


def _write_card(card: Path, head: str, parts: "list[FigureTable]") -> None:
    """Replace what stands between the markers of a model card by the tables, in Markdown."""
    before, _, rest = read_text(card, "model card", "write it in UTF-8").partition(CARD_START)
    _, _, after = rest.partition(CARD_END)
    written = [head]
    for part in parts:
        lines = [part.head, tuple("---" for _ in part.head), *part.rows]
        rows = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        written += [f"**{part.title.capitalize()}**: {part.help}.", "\n".join(rows)]
    write_text(card, before + CARD_START + "\n" + "\n\n".join(written) + "\n" + CARD_END + after)
