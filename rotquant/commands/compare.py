"""`rotquant compare`: models against a reference on one text, plain or quantized: what each loses and saves."""

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rotquant.commands.answers import CommandResult, answers, note_and_sentences
from rotquant.commands.options import (
    Bos,
    Corpus,
    Device,
    LoadedDtype,
    Split,
    a_model,
    chosen_split,
    corpus_spec,
    place_of_bos,
)
from rotquant.commands.outputs import MODEL
from rotquant.foundation.progress import task
from rotquant.recipes.schemes import Perplexity
from rotquant.tensors.devices import torch_device, torch_dtype

if TYPE_CHECKING:
    from rotquant.comparison import ModelComparison


_MODEL = (
    "model, format, perplexity (with by_window), bytes of its weights on disk, parameters, bits_per_weight of linear "
    "layers, bits_per_parameter of all files, tokens_per_second of a forward pass (null without --timing), device, "
    "dtype"
)


@answers(
    {
        "reference": _MODEL,
        "models": "the same of each, kl and flips by window, and as mean and standard error over windows: ratio, "
        "perplexity over the reference's; kl, KL(reference || model) in nats; flips, percent of positions with another "
        "first choice",
        "metric": "the windows",
    },
    file=True,
)
def compare(
    reference: Annotated[
        str, typer.Argument(metavar="REFERENCE", callback=a_model, help="The model to compare with."), MODEL
    ],
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            callback=lambda models: [*map(a_model, models)],
            help="Models that are compared with it.",
        ),
        MODEL,
    ],
    corpus: Corpus,
    split: Split = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens per window. Default: what all models allow, at most 2048.")
    ] = None,
    max_windows: Annotated[int | None, typer.Option(min=1, help="So many, spread evenly. Default: all.")] = None,
    bos: Bos = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows per forward pass.")] = 8,
    timing: Annotated[
        bool, typer.Option(help="Also time a forward pass of one window, four times. Only a decoder's is of integers.")
    ] = False,
    device: Device = "auto",
    dtype: LoadedDtype = None,
) -> CommandResult:
    """Compare models with a reference on the same text: perplexity, KL divergence, first choices, size, bits.

    Each is plain or quantized: a folder or hub id, or a folder of `rotquant quantize`, `export`, `convert` or another
    library (compressed-tensors, GPTQ, AWQ). All need the same tokenizer.

    Example: `rotquant compare MODEL quantized/ other/ --corpus wikitext2 --max-windows 20`
    """
    spec = corpus_spec(corpus)
    part = chosen_split(split, spec)
    with task("starting"):
        from rotquant import comparison
        from rotquant.models.checkpoints import local_folder

    place, kind = torch_device(device), None if dtype is None else torch_dtype(dtype)
    length = comparison.window_length([*map(local_folder, (reference, *models))], sequence_length)
    shape: dict[str, Any] = {"sequence_length": length, "max_windows": max_windows, "bos": place_of_bos(bos)}
    metric = Perplexity(corpus=spec.name, split=part, **shape)
    found = comparison.compare(
        reference, models, spec, metric=metric, batch_size=batch_size, device=place, dtype=kind, timing=timing
    )
    first = found.reference
    on = f"on {first.perplexity.windows} windows of {length} tokens of {spec.name} {part}, {first.device}"
    short, *sentences = note_and_sentences(first.perplexity.note)
    on += f"; {short}" if short else ""
    judged = {f"perplexity of {one.model}": one.perplexity.perplexity for one in (first, *found.models)}
    judged |= {f"KL divergence of {one.model}": one.kl[0] for one in found.models}
    data = found.as_data() | {"metric": metric.model_dump(mode="json")}
    return CommandResult(data, (*_tables(found, timing), on, *sentences), judged=judged)


def _tables(found: "ModelComparison", timing: bool) -> tuple[Table, Table]:
    """What the models lose, and what they take."""
    losses = Table(
        "model", "perplexity", "times", "KL, nats", "other choices", title="quality",
        caption="times the reference's perplexity; KL divergence of the next token from the reference's; positions at "
        "which the likeliest token is another one; ± standard errors over windows",
    )  # fmt: skip
    losses.add_row(found.reference.model, f"{found.reference.perplexity.perplexity:.4f}", "", "", "")
    for one in found.models:
        ratio, kl, flips = _with_error(one.ratio, 3), _with_error(one.kl, 4), _with_error(one.flips, 1, " %")
        losses.add_row(one.model, f"{one.perplexity.perplexity:.4f}", ratio, kl, flips)
    head = ["model", "format", "run in", "MiB", "bits a weight", "bits a parameter", *(["tokens/s"] if timing else [])]
    counted = (
        "MiB: all safetensors files; bits a weight: of linear layers, with scales, zero points and tables; bits a "
    )
    sizes = Table(*head, title="size", caption=f"{counted}parameter: of all files, embedding and head included")
    for one in (found.reference, *found.models):
        speed = [] if one.tokens_per_second is None else [f"{one.tokens_per_second:,.0f}"]
        bits = (f"{one.bits_per_weight:.2f}", f"{one.bits_per_parameter:.2f}")
        sizes.add_row(one.model, one.format, one.dtype, f"{one.bytes / 2**20:.1f}", *bits, *speed)
    return losses, sizes


def _with_error(pair: tuple[float, float], digits: int, unit: str = "") -> str:
    """A mean and its standard error, where there is more than one window."""
    mean, error = pair
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}") + unit
