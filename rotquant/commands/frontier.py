"""`rotquant frontier`: methods of one class of bits on one model, and which of them to take."""

import re
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.options import Checkpoint, Corpus, Device, Dtype, Seed, corpus_spec
from rotquant.foundation.progress import task
from rotquant.tensors.devices import torch_device, torch_dtype
from rotquant.text import check_split

if TYPE_CHECKING:
    from rotquant.frontier import Frontier

_UNITS = {"s": 1, "min": 60, "h": 3600}


def a_budget(given: str | None) -> str | None:
    """Refuse what is no time."""
    if given is not None:
        _seconds(given)
    return given


def _seconds(given: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)", given)
    if found is None:
        raise typer.BadParameter(f"{given!r} is no time: write it as 90s, 10min or 2h")
    return float(found[1]) * _UNITS[found[2]]


@answers(
    {
        "class": "",
        "tried": "by method, the best first: kl in nats, its standard error over windows, perplexity, bits a weight, "
        "online transforms, seconds",
        "left": "by method, why it was not tried",
        "full_precision": "perplexity",
        "alike": "methods that cannot be told apart from the best",
        "taken": "the one to take; empty where the budget allowed too few",
        "metric": "the windows",
        "samples": "of the calibration text",
        "needed": "seconds of a budget that allows some five methods",
    },
    file=True,
)
def frontier(
    model: Checkpoint,
    corpus: Corpus,
    kind: Annotated[
        str,
        typer.Option("--class", help="Bits of weights, inputs and KV cache: W4A4KV4, W4A16, KV4 ...; MXFP4, NVFP4."),
    ] = "W4A4KV4",
    budget: Annotated[
        str | None,
        typer.Option(
            callback=a_budget,
            help="A time such as 10min. Methods that learn take few steps then, and samples and windows are fewer "
            "where less than five methods would fit. Default: all methods, with their presets' steps.",
        ),
    ] = None,
    methods: Annotated[
        list[str] | None, typer.Option("--method", help="One of the class's methods; repeatable. Default: all.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Calibration samples, and texts that are learned from.")] = 32,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens of a sample, and of a window.")] = 512,
    max_windows: Annotated[int, typer.Option(min=2, help="Windows that methods are judged on.")] = 16,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> CommandResult:
    """Try the methods of a class on MODEL with the same text, and say which to take.

    They are judged by KL divergence from full precision on --corpus's validation split, or else its test split.

    Example: `rotquant frontier MODEL --corpus text/ --class W4A4KV4 --budget 10min`
    """
    spec = corpus_spec(corpus)
    check_split(spec, "train")
    with task("starting"):
        from rotquant import frontier as work

    found = work.frontier(
        model,
        kind,
        spec,
        budget=None if budget is None else _seconds(budget),
        samples=samples,
        length=sequence_length,
        windows=max_windows,
        methods=methods or (),
        seed=seed,
        device=torch_device(device),
        dtype=torch_dtype(dtype),
    )
    left = [f"{one.name}: {one.said}" for one in found.left if not one.late]
    left += [f"not begun within {budget}: {', '.join(found.late)}"] if found.late else []
    metric = found.metric
    on = (
        f"on {len(found.tried[0].kl) if found.tried else 0} windows of {metric.sequence_length} tokens of {spec.name} "
        f"{metric.split}, calibrated on {found.samples} samples; full precision has a perplexity of "
        f"{found.full_precision:.4f}"
    )
    data = {
        "class": kind,
        "tried": {
            one.name: {
                "kl": one.mean,
                "error": one.error,
                "perplexity": one.perplexity,
                "bits": one.bits,
                "online": one.online,
                "seconds": one.seconds,
            }
            for one in found.tried
        },
        "left": {one.name: one.said for one in found.left},
        "full_precision": found.full_precision,
        "alike": list(found.alike),
        "taken": found.taken,
        "metric": metric.model_dump(mode="json"),
        "samples": found.samples,
        "needed": found.needed,
    }
    return CommandResult(data, (_table(kind, found), on, *left, found.reason))


def _table(kind: str, found: "Frontier") -> Table:
    """The methods, the best first."""
    table = Table(
        "method", "KL, nats", "perplexity", "bits", "online", "s", title=kind,
        caption="KL divergence of the next token from full precision, ± standard error over windows; bits of a weight; "
        "transforms that act while the model runs; seconds of quantizing",
    )  # fmt: skip
    for one in found.tried:
        mark = "*" if one.name in found.alike else ""
        kl = f"{one.mean:.4f} ± {one.error:.4f}{mark}"
        table.add_row(one.name, kl, f"{one.perplexity:.4f}", f"{one.bits:.2f}", str(one.online), f"{one.seconds:.0f}")
    return table
