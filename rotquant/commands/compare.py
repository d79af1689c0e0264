"""`rotquant compare`: two models on one text, plain or quantized: what B loses against A, and what it saves."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Table

from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.options import Corpus, Device, Split, corpus_spec, of_a_known_family
from rotquant.foundation.errors import RecipeError
from rotquant.foundation.progress import task
from rotquant.recipes.schemes import Perplexity
from rotquant.tensors.devices import torch_device, torch_dtype

if TYPE_CHECKING:
    from rotquant.comparison import ModelComparison

_SIDE = (
    "model, format, perplexity (with by_window, and of b kl and flips by window), bytes of its weights on disk, "
    "bits_per_weight stored, tokens_per_second of a forward pass, device, dtype"
)


@answers(
    {
        "a": _SIDE,
        "b": "the same",
        "ratio": "perplexity of b over a",
        "kl": "KL(a || b), nats",
        "flips": "percent of positions with another first choice; these three as mean and standard error over windows",
        "metric": "the windows",
    },
    file=True,
)
def compare(
    a: Annotated[str, typer.Argument(metavar="A", callback=of_a_known_family, help="The model to compare with.")],
    b: Annotated[str, typer.Argument(metavar="B", callback=of_a_known_family, help="The model that is compared.")],
    corpus: Corpus = "modules",
    split: Split = "test",
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens per window. Default: what both models allow, at most 2048.")
    ] = None,
    max_windows: Annotated[int | None, typer.Option(min=1, help="So many, spread evenly. Default: all.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows per forward pass.")] = 8,
    device: Device = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: a folder's own; float32 of a plain one.")
    ] = None,
) -> CommandResult:
    """Compare two models on the same text: perplexity, KL divergence, first choices, size, bits, speed.

    Each is plain or quantized: a folder or hub id, or a folder of `rotquant quantize`, `export`, `convert` or of
    compressed-tensors by another library. Both need the same tokenizer.

    Example: `rotquant compare workflow/resources/models/rq-7b quantized/ --max-windows 20`
    """
    if split not in ("train", "validation", "test"):
        raise RecipeError(f"unknown split {split!r}; use train, validation or test.")
    place, kind, spec = torch_device(device), None if dtype is None else torch_dtype(dtype), corpus_spec(corpus)
    with task("starting"):
        from rotquant import comparison
        from rotquant.models.checkpoints import local_folder

    length = comparison.window_length([local_folder(a), local_folder(b)], sequence_length)
    metric = Perplexity(corpus=spec.name, split=cast(Any, split), sequence_length=length, max_windows=max_windows)
    found = comparison.compare(a, b, spec, metric=metric, batch_size=batch_size, device=place, dtype=kind)
    windows = f"{found.a.perplexity.windows} windows of {length} tokens of {spec.name} {split}"
    shown = (_table(found), *_sentences(found), f"on {windows}")
    judged = {f"perplexity of {side.model}": side.perplexity.perplexity for side in (found.a, found.b)}
    data = dataclasses.asdict(found) | {"metric": metric.model_dump(mode="json")}
    return CommandResult(data, shown, judged=judged | {"KL divergence": found.kl[0], "other choices": found.flips[0]})


def _table(found: "ModelComparison") -> Table:
    table = Table("", "A", "B", "B over A", caption="speed: of a forward pass here; only a decoder runs on integers")
    sides = (found.a, found.b)
    table.add_row("model", *(side.model for side in sides), "")
    table.add_row("format", *(f"{side.format}, run in {side.dtype}" for side in sides), "")
    rows: list[tuple[str, str, Any]] = [
        ("perplexity", "{:.4f}", lambda side: side.perplexity.perplexity),
        ("MiB of weights", "{:.1f}", lambda side: side.bytes / 2**20),
        ("bits per weight", "{:.2f}", lambda side: side.bits_per_weight),
        (f"tokens/s, {found.a.device}", "{:,.0f}", lambda side: side.tokens_per_second),
    ]
    for name, form, value in rows:
        first, second = map(value, sides)
        table.add_row(name, form.format(first), form.format(second), f"{second / first:.3f}")
    return table


def _sentences(found: "ModelComparison") -> tuple[str, ...]:
    def shown(pair: tuple[float, float], digits: int) -> str:
        return " ± ".join(f"{value:.{digits}f}" for value in pair)

    return (
        f"perplexity: times {shown(found.ratio, 4)}",
        f"KL divergence of B from A: {shown(found.kl, 5)} nats a token",
        f"another first choice: {shown(found.flips, 2)} % of the positions (± standard errors over windows)",
    )
