"""`rotquant diagnose`: what outliers do to a model, printed and written into its card."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Table

from rotquant.commands.answers import CommandResult, answers, note_and_sentences
from rotquant.commands.options import Checkpoint, Corpus, Device, Dtype, Seed, corpus_spec, known_bos, place_of_bos
from rotquant.commands.outputs import Writes
from rotquant.foundation.errors import RecipeError, ResultError
from rotquant.foundation.files import OutputKind, check_output_file, read_text, write_text
from rotquant.foundation.progress import task
from rotquant.metrics.zeroshot import TASKS, Scores, identity, prepare, scores
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import Calibration, Perplexity, ZeroShot
from rotquant.tensors.devices import torch_device, torch_dtype
from rotquant.text import (
    MODULES,
    NO_BOS,
    adds_bos,
    check_split,
    corpus_identity,
    evaluation_windows,
    load_text,
    split_of_file,
    tokenize,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from transformers import PreTrainedModel

    from rotquant.commands.diagnosis import FigureTable
    from rotquant.metrics.diagnostics import Costs, Sinks
    from rotquant.recipes.corpus import Split
    from rotquant.text import Tokens

CARD_START, CARD_END = "<!-- diagnose:start -->", "<!-- diagnose:end -->"

KEYS = {
    "model": "",
    "settings": "of the windows, threshold, seed, type",
    "tasks": "definitions and items, null where none are asked",
    "text": "its digest",
    "note": "where a rotation was changed to fit",
    "asked": "each figure with what is asked of a model that stands for the papers'",
    "perplexity": "by variant, with each window's loss, and its rise over the unquantized in nats with the error",
    "same": "variants left out, by that whose network is theirs",
    "in_words": "what the figures say",
    "accuracy": "by variant and task, percent",
    "outlier_tokens": "by prefix, ratios by layer",
}


@answers(KEYS, file=True)
def diagnose(
    context: typer.Context,
    model: Checkpoint,
    corpus: Corpus = "modules",
    split: Annotated[
        str | None,
        typer.Option(
            help="test, or validation for what models and settings are chosen by; of the tasks too. Default: test, or "
            "validation where --corpus is one file named for it."
        ),
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens per window. Default: as for evaluate, at most 512.")
    ] = None,
    max_windows: Annotated[int, typer.Option(min=1, help="Windows, spread evenly over the split.")] = 32,
    bos: Annotated[
        str | None,
        typer.Option(
            callback=known_bos,
            help="Where BOS stands: at the head of the text (text), of each window (window), nowhere (none). Default: "
            "none, and items of tasks have one.",
        ),
    ] = None,
    tasks_limit: Annotated[
        int, typer.Option(min=0, help="Items of each of the eight shipped tasks of choice; 0 asks none.")
    ] = 100,
    outlier_ratio: Annotated[
        float,
        typer.Option(
            min=1.0, help="Times the median that make an outlier token; PrefixQuant takes 64 for large models."
        ),
    ] = 20.0,
    card: Annotated[
        Path | None,
        typer.Option(help="Write the result into this model card, between its diagnose markers."),
        Writes(OutputKind("a model card", lambda _: True)),  # of which only what stands between the markers is replaced
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> CommandResult:
    """Show what outliers do to MODEL: what 4 bits cost before and after rotation, and which tokens stand out.

    Nothing is tuned: weights are rounded to nearest. Rises are in nats a token. One copy of MODEL is in memory at a
    time; it is loaded six times.

    Example: `rotquant diagnose workflow/resources/models/rq-7b`
    """
    if card is not None:
        check_output_file(card)
    if card and CARD_START not in read_text(card, "model card", "write it in UTF-8"):
        raise ResultError(f"{card} has no line {CARD_START} to write the diagnosis after.")
    spec, tasks = corpus_spec(corpus), _tasks(tasks_limit, bos)
    part = _part(split or split_of_file(spec))
    check_split(spec, part)
    folder = None if tasks is None else prepare(tasks, None, MODULES, part)
    with task("starting"):
        from rotquant import api
        from rotquant.commands.diagnosis import phenomena, sentences, tables
        from rotquant.models.checkpoints import load_tokenizer, local_folder
        from rotquant.models.folders import check_kind

    kind, place = torch_dtype(dtype), torch_device(device)
    checkpoint = local_folder(model)
    check_kind(checkpoint, "plain")
    length = api.limits_of(checkpoint).length(sequence_length, usual=512)
    tokenizer = load_tokenizer(checkpoint)
    shape: dict[str, Any] = {"sequence_length": length, "max_windows": max_windows, "bos": place_of_bos(bos, "none")}
    metric = Perplexity(corpus=spec.name, split=part, **shape)
    text = load_text(spec, part)
    tokens = tokenize(text, tokenizer)
    evaluation_windows(tokens, length, metric.bos)  # too short a text is reported before a model is loaded
    calibration = Calibration(samples=32, sequence_length=length, bos=place_of_bos(bos))
    samples = api.calibration_tokens(spec, calibration, tokenizer, seed)

    def load() -> "PreTrainedModel":
        return api.load_checkpoint(checkpoint, kind, place)[0]

    def ask(network: "PreTrainedModel") -> Scores:
        return scores(network, tokenizer, cast(ZeroShot, tasks), cast(Path, folder))

    changed = api.fit(checkpoint, preset("quarot-rtn"))[1]  # which has all rotations that are compared here

    def fit(recipe: Recipe) -> Recipe:
        return api.fit(checkpoint, recipe)[0]

    begun = adds_bos(tokenizer)
    costs, sinks, advice = _measured(
        load, tokens, metric, samples, ask if tasks else None, fit, outlier_ratio, seed, begun
    )
    decode = cast(Any, tokenizer.decode)
    shown, said = tables(costs, sinks, decode), sentences(costs, sinks)
    windows = costs.perplexity["unquantized"].windows
    on = f"{windows} windows of {length} tokens spread over the {part} split of {spec.name}, "
    on += (f"tasks made from {part} modules, " if tasks else "") + f"rotation of seed {seed}"
    on += f"; {changed.rstrip('.')}" if changed else ""
    if card:
        head = f"Printed by `{_command(context)}`, on {on}."
        _write_card(card, head, [phenomena(costs, sinks, decode), *shown])
    settings = {**metric.model_dump(mode="json"), "outlier_ratio": outlier_ratio, "seed": seed, "dtype": dtype}
    about = {"model": model, "settings": settings, "tasks": identity(tasks, folder) if tasks and folder else None}
    about["text"] = corpus_identity(spec, [part], texts={part: text})
    notes = [note for note in (changed, advice) if note]
    about |= {"note": " ".join(notes)} if notes else {}
    last = f"on {on}" + ("" if tokens.bos is not None else f"; {NO_BOS}")
    found = about | _numbers(costs, sinks, decode) | {"in_words": said}
    judged = {"perplexity": costs.perplexity["unquantized"].perplexity}
    return CommandResult(found, (*map(_table, shown), *said, last, *note_and_sentences(advice)[1:]), judged=judged)


def _measured(
    load: "Callable[[], PreTrainedModel]",
    tokens: "Tokens",
    metric: Perplexity,
    samples: "Tensor",
    ask: "Callable[[PreTrainedModel], Scores] | None",
    fit: "Callable[[Recipe], Recipe]",
    outlier_ratio: float,
    seed: int,
    adds_bos: bool,
) -> "tuple[Costs, list[Sinks], str]":
    """Costs; of the copy of the model that is loaded first its outlier tokens, and a sentence where it needs BOS."""
    from rotquant.metrics.bos import bos_note
    from rotquant.metrics.diagnostics import find_sinks, measure_costs
    from rotquant.models.limits import metric_windows

    sinks: list[Sinks] = []
    notes: list[str] = []

    def look(network: "PreTrainedModel") -> None:
        windows = metric_windows(network, tokens, metric.model_copy(update={"bos": "none"}))
        sinks.extend(find_sinks(network, windows, tokens.bos, outlier_ratio, network.device))
        notes.append(bos_note(network, tokens, adds_bos, metric.bos))

    costs = measure_costs(load, tokens, metric, samples, ask=ask, look=look, fit=fit, seed=seed)
    return costs, sinks, notes[0]


def _part(split: str) -> "Split":
    """The split of windows and tasks. Raises `RecipeError` for another one than test and validation."""
    if split not in ("validation", "test"):
        raise RecipeError(f"unknown split {split!r}; use validation or test.")
    return cast("Split", split)


def _tasks(limit: int, bos: str | None) -> ZeroShot | None:
    """The eight shipped tasks of choice, or None where they are left out."""
    chosen: dict[str, Any] = {"tasks": tuple(TASKS["shipped"])[:8], "corpus": MODULES.name, "limit": limit}
    return ZeroShot(**chosen, bos=place_of_bos(bos)) if limit else None


def _command(context: typer.Context) -> str:
    """The command as a user would repeat it, without where its result goes and what it runs on."""
    usual = {str(parameter.name): parameter.default for parameter in context.command.params}
    left_out = ("model", "card", "output", "json", "device")
    given = {name: value for name, value in context.params.items() if name not in left_out and value != usual[name]}
    words = [f"--{name.replace('_', '-')} {given[name]}" for name in usual if name in given]
    return " ".join(["rotquant diagnose", context.params["model"], *words])


def _numbers(costs: "Costs", sinks: "list[Sinks]", decode: Any) -> dict[str, Any]:
    """The measured numbers of the JSON file, without settings and text."""
    from rotquant.commands.diagnosis import asked

    return {
        "asked": [dataclasses.asdict(one) for one in asked(costs, sinks, decode)],
        "perplexity": {
            name: {"words": costs.words[name], **found.as_metrics(), "by_window": found.by_window}
            | ({} if name == "unquantized" else {"rise": costs.rise(name)})
            for name, found in costs.perplexity.items()
        },
        "same": costs.same,
        "accuracy": {name: found.metrics for name, found in costs.scores.items()},
        "outlier_tokens": [
            dataclasses.asdict(found)
            | {"prefix": [decode(token) for token in found.prefix], "ids": found.prefix}
            | {"common": [(decode(token), count) for token, count in found.common]}
            for found in sinks
        ],
    }


def _table(part: "FigureTable") -> Table:
    table = Table(*part.head, title=part.title, caption=part.help)
    for row in part.rows:
        table.add_row(*row)
    return table


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
