"""`rotquant diagnose`: what outliers do to a model."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Table

from rotquant.commands.answers import CommandResult, answers, note_and_sentences
from rotquant.commands.options import Checkpoint, Corpus, Device, Dtype, Seed, corpus_spec, known_bos, place_of_bos
from rotquant.foundation.errors import RecipeError
from rotquant.foundation.progress import task
from rotquant.recipes.presets import preset
from rotquant.recipes.schemes import Calibration, Perplexity
from rotquant.tensors.devices import torch_device, torch_dtype
from rotquant.text import (
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
    from transformers import PreTrainedModel

    from rotquant.commands.diagnosis import FigureTable
    from rotquant.metrics.diagnostics import Costs, Sinks
    from rotquant.recipes.corpus import CorpusSpec, Split

KEYS = {
    "model": "",
    "settings": "of the windows, threshold, seed, type",
    "text": "its digest",
    "note": "where a rotation was changed to fit",
    "perplexity": "by variant, with each window's loss, and its rise over the unquantized in nats with the error",
    "same": "variants left out, by that whose network is theirs",
    "in_words": "what the figures say",
    "outlier_tokens": "by prefix, ratios by layer",
}

DiagnosedSplit = Annotated[
    str | None,
    typer.Option(
        help="test, or validation for what models and settings are chosen by. Default: test, or validation where "
        "--corpus is one file named for it."
    ),
]
DiagnosedLength = Annotated[
    int | None, typer.Option(min=2, help="Tokens per window. Default: as for evaluate, at most 512.")
]
DiagnosedWindows = Annotated[int, typer.Option(min=1, help="Windows, spread evenly over the split.")]
DiagnosedBos = Annotated[
    str | None,
    typer.Option(
        callback=known_bos,
        help="Where BOS stands: at the head of the text (text), of each window (window), nowhere (none). Default: "
        "none.",
    ),
]
OutlierRatio = Annotated[
    float,
    typer.Option(min=1.0, help="Times the median that make an outlier token; PrefixQuant takes 64 for large models."),
]


@answers(KEYS, file=True)
def diagnose(
    model: Checkpoint,
    corpus: Corpus,
    split: DiagnosedSplit = None,
    sequence_length: DiagnosedLength = None,
    max_windows: DiagnosedWindows = 32,
    bos: DiagnosedBos = None,
    outlier_ratio: OutlierRatio = 20.0,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> CommandResult:
    """Show what outliers do to MODEL: what 4 bits cost before and after rotation, and which tokens stand out.

    Nothing is tuned: weights are rounded to nearest. Rises are in nats a token. One copy of MODEL is in memory at a
    time; it is loaded six times.

    Example: `rotquant diagnose MODEL --corpus wikitext2`
    """
    spec = corpus_spec(corpus)
    part = _part(split, spec)
    with task("starting"):
        from rotquant import api
        from rotquant.commands.diagnosis import sentences, tables
        from rotquant.metrics.bos import bos_note
        from rotquant.metrics.diagnostics import find_sinks, measure_costs
        from rotquant.metrics.key_bias import key_bias_note
        from rotquant.models.checkpoints import load_tokenizer, local_folder
        from rotquant.models.folders import check_kind
        from rotquant.models.limits import metric_windows

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

    changed = api.fit(checkpoint, preset("quarot-rtn"))[1]  # which has all rotations that are compared here
    sinks: list[Sinks] = []
    begun, advice = adds_bos(tokenizer), ""

    def look(network: "PreTrainedModel") -> None:
        """Find outlier tokens of the copy that is loaded first, and whether it needs BOS, or its keys more bits."""
        nonlocal advice
        windows = metric_windows(network, tokens, metric.model_copy(update={"bos": "none"}))
        sinks.extend(find_sinks(network, windows, tokens.bos, outlier_ratio, network.device))
        notes = bos_note(network, tokens, begun, metric.bos), key_bias_note(network, preset("quarot-rtn"))
        advice = " ".join(filter(None, notes))

    costs = measure_costs(
        lambda: api.load_checkpoint(checkpoint, kind, place)[0],
        tokens,
        metric,
        samples,
        look=look,
        fit=lambda recipe: api.fit(checkpoint, recipe)[0],
        seed=seed,
    )
    windows = costs.perplexity["unquantized"].windows
    on = f"{windows} windows of {length} tokens spread over the {part} split of {spec.name}, rotation of seed {seed}"
    on += f"; {changed.rstrip('.')}" if changed else ""
    on += "" if tokens.bos is not None else f"; {NO_BOS}"
    settings = {**metric.model_dump(mode="json"), "outlier_ratio": outlier_ratio, "seed": seed, "dtype": dtype}
    about = {"model": model, "settings": settings, "text": corpus_identity(spec, [part], texts={part: text})}
    notes = [note for note in (changed, advice) if note]
    about |= {"note": " ".join(notes)} if notes else {}
    decode: Callable[[int], str] = cast(Any, tokenizer.decode)
    said = sentences(costs, sinks)
    found = about | _numbers(costs, sinks, decode) | {"in_words": said}
    shown = (*map(_table, tables(costs, sinks, decode)), *said, f"on {on}", *note_and_sentences(advice)[1:])
    return CommandResult(found, shown, judged={"perplexity": costs.perplexity["unquantized"].perplexity})


def _part(split: str | None, spec: "CorpusSpec") -> "Split":
    """The split of windows.

    Raises:
        RecipeError, CorpusError: another one than test and validation, or one that the corpus lacks.
    """
    chosen = split or split_of_file(spec)
    if chosen not in ("validation", "test"):
        raise RecipeError(f"unknown split {chosen!r}; use validation or test.")
    part = cast("Split", chosen)
    check_split(spec, part)
    return part


def _numbers(costs: "Costs", sinks: "list[Sinks]", decode: Callable[[int], str]) -> dict[str, Any]:
    """The measured numbers of the JSON file, without settings and text."""
    return {
        "perplexity": {
            name: {"words": costs.words[name], **result.as_metrics(), "by_window": result.by_window}
            | ({} if name == "unquantized" else {"rise": costs.rise(name)})
            for name, result in costs.perplexity.items()
        },
        "same": costs.same,
        "outlier_tokens": [
            dataclasses.asdict(one)
            | {"prefix": [decode(token) for token in one.prefix], "ids": one.prefix}
            | {"common": [(decode(token), count) for token, count in one.common]}
            for one in sinks
        ],
    }


def _table(part: "FigureTable") -> Table:
    table = Table(*part.head, title=part.title, caption=part.help)
    for row in part.rows:
        table.add_row(*row)
    return table
