"""`rotquant prefix`: a model's outlier tokens, and which tokens PrefixQuant puts in front of every text for them."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Table

from reproduction.commands.report import FIGURE
from reproduction.corpora import corpus_spec
from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.options import Checkpoint, Corpus, Device, Dtype, Seed
from rotquant.commands.outputs import Writes
from rotquant.foundation.errors import RecipeError
from rotquant.foundation.files import check_output_file
from rotquant.foundation.progress import task
from rotquant.recipes.schemes import Calibration
from rotquant.tensors.devices import torch_device, torch_dtype
from rotquant.text import NO_BOS, check_split, corpus_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rotquant.models.outlier_tokens import TokenMaxima

Found = dict[str, Any]
"""What `reproduction.metrics.outlier_tokens.look` finds."""


@answers(
    {
        "model": "",
        "settings": "",
        "text": "its digest",
        "prefix": "ids, content, and both in words",
        "found": "by what stands in front: ratios and outlier tokens by layer, positions, contents",
        "residual": "of tokens in the residual stream, the largest ratio by layer, without and with the prefix",
    },
    file=True,
)
def prefix(
    model: Checkpoint,
    corpus: Corpus = "modules",
    samples: Annotated[int, typer.Option(min=2, help="Windows of the train split.")] = 16,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens per window. Default: as model and tokenizer allow, at most 512.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(help="Times the median that make an outlier token: PrefixQuant's eta, above 1.")
    ] = 64.0,
    figure: Annotated[Path | None, typer.Option(help="Also draw what was found, as SVG."), Writes(FIGURE)] = None,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> CommandResult:
    """Show which tokens of a text are MODEL's outlier tokens, and which prefix takes them to itself (PrefixQuant).

    The prefix is the one that a recipe with the same text, samples, seed and threshold finds. The threshold is of the
    input of down_proj, which is quantized. The residual stream is shown too: norms take a large token out of it before
    linear layers read it. Nothing is written into MODEL.

    Example: `rotquant prefix workflow/resources/models/rq-7b --figure outliers.svg`
    """
    if not 1 < threshold < math.inf:
        raise RecipeError(f"a threshold of {threshold:g} times the median makes no outlier token: take one above 1.")
    if figure is not None:
        check_output_file(figure)
        if figure.suffix.lower() != ".svg":
            raise RecipeError(f"{figure}: the figure is SVG; name a file that ends with .svg.")
    spec = corpus_spec(corpus)
    check_split(spec, "train")
    with task("starting"):
        from reproduction.metrics.outlier_tokens import look
        from rotquant import api
        from rotquant.models.checkpoints import load_tokenizer, local_folder
        from rotquant.models.folders import check_kind
        from rotquant.models.outlier_tokens import detect_prefix, token_maxima

    kind, place = torch_dtype(dtype), torch_device(device)
    folder = local_folder(model)
    check_kind(folder, "plain")
    length = api.limits_of(folder).length(sequence_length, usual=512)
    tokenizer = load_tokenizer(folder)
    text = Calibration(samples=samples, sequence_length=length)
    windows = api.calibration_tokens(spec, text, tokenizer, seed)
    network, _ = api.load_checkpoint(folder, kind, place)
    decode, bos = cast("Callable[[int], str]", tokenizer.decode), network.config.bos_token_id
    maxima = token_maxima(network, windows, device=place)
    chosen = detect_prefix(maxima.ratios, windows, bos, threshold)
    found = {"no prefix": look(maxima.ratios, windows, decode, threshold)}
    residual = _residual(maxima, "the first token", 1)
    if chosen:
        behind = token_maxima(network, windows, chosen, place)
        found["behind the prefix"] = look(behind.ratios[..., len(chosen) :], windows, decode, threshold)
        residual |= _residual(behind, "the prefix", len(chosen))
    outliers = found["no prefix"]["first"] + found["no prefix"]["others"]
    words = "; ".join([_chosen(chosen, decode, outliers)] + [NO_BOS] * (tokenizer.bos_token_id is None))
    streams = _in_the_residual_stream(residual, outliers, threshold)
    on = f"on {samples} windows of {length} tokens from the train split of {spec.name}, seed {seed}"
    if figure:
        from reproduction.render.figures.tokens import outliers_of_model

        outliers_of_model(found, threshold, figure)
    settings = {"samples": samples, "sequence_length": length, "threshold": threshold, "seed": seed, "dtype": dtype}
    told = {"ids": chosen, "content": [decode(token) for token in chosen], "words": words}
    about = corpus_identity(spec, ["train"], max_characters=text.characters)
    tables = [_layers(found, residual, threshold)]
    tables += [_contents(found["no prefix"])] if found["no prefix"]["others"] else []
    data = {"model": model, "settings": settings, "text": about, "prefix": told, "found": found, "residual": residual}
    return CommandResult(data, (*tables, streams, f"{words}; {on}"))


def _residual(maxima: "TokenMaxima", name: str, first: int) -> dict[str, list[float]]:
    """The largest ratios of the residual stream by layer: of the first so many tokens, and of those after them."""
    ratios = maxima.residual_ratios
    parts = {name: ratios[..., :first], f"after {name}": ratios[..., first:]}
    return {part: found.amax(dim=(1, 2)).tolist() for part, found in parts.items()}


def _in_the_residual_stream(residual: "Mapping[str, list[float]]", outliers: int, threshold: float) -> str:
    """Where the residual stream is largest, and what that means where down_proj shows no outlier token."""
    largest = {name: max(ratios) for name, ratios in residual.items()}
    layers = {name: ratios.index(largest[name]) + 1 for name, ratios in residual.items()}
    shown = ", ".join(f"{name} {ratio:,.0f} (layer {layers[name]})" for name, ratio in largest.items())
    found = f"in the residual stream, times the median: {shown}"
    if outliers or not max(largest.values()) > threshold:
        return found
    return (
        f"{found}; outlier tokens there and none at the input of down_proj: norms divide by them before linear layers "
        "read them, so no static scale suffers from them"
    )


def _chosen(prefix: tuple[int, ...], decode: "Callable[[int], str]", outliers: int) -> str:
    """The result in words, and the tokens as a recipe is told them."""
    from rotquant.commands.diagnosis import token_text

    said = "" if outliers else "no outlier token found at the input of down_proj, "
    if not prefix:
        return f"{said}no prefix: none is frequent and the model has no BOS" if outliers else f"{said}and no prefix"
    tokens = " ".join(token_text(decode(token)) for token in prefix)
    ids = f"--set methods.prefixed_outliers.ids=[{','.join(map(str, prefix))}]"
    return f"{said}prefix of {len(prefix)} token{'s' * (len(prefix) > 1)}: {tokens} ({ids})"


def _layers(found: "Mapping[str, Found]", residual: "Mapping[str, list[float]]", threshold: float) -> Table:
    """The largest ratio of each layer, at the input of down_proj and after the layer, and how many are outliers."""
    table = Table(
        "layer",
        title="outlier tokens by layer",
        caption="largest ratio of a token's input of down_proj to the median of its window; in brackets the number of "
        f"outlier tokens in a window, which are above {threshold:g}; then the same ratio in the residual stream after "
        "the layer",
    )
    for name in (*found, *(f"residual, {name}" for name in residual)):
        table.add_column(name, justify="right")
    for layer, stream in enumerate(zip(*residual.values(), strict=True)):
        inputs = (f"{one['ratios'][layer]:.1f} ({one['by_layer'][layer]:.2f})" for one in found.values())
        table.add_row(str(layer + 1), *inputs, *(f"{ratio:,.1f}" for ratio in stream))
    return table


def _contents(one: Found) -> Table:
    from rotquant.commands.diagnosis import token_text

    table = Table(
        "token",
        "times",
        "share",
        "low in meaning",
        title="content, but for the first position",
        caption="low in meaning: neither letter nor digit, or an English word that connects others",
    )
    for text, count, low in one["contents"]:
        table.add_row(token_text(text), str(count), f"{100 * count / one['others']:.0f}%", "yes" if low else "")
    return table
