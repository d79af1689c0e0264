"""Command-line options that several commands share, and their translation into recipes, corpora, devices and dtypes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from rotquant.corpora import CorpusSpec
from rotquant.errors import RecipeError
from rotquant.recipes import Recipe, override

if TYPE_CHECKING:
    import torch

Model = Annotated[
    str, typer.Argument(help="Local Hugging Face folder, hub id, or a folder written by `rotquant quantize`.")
]
Corpus = Annotated[
    str,
    typer.Option(
        help="Text: `docstrings` (built from the installed packages), a .txt file, a folder of parquet/json/txt files, "
        "or a hub id with an optional configuration, e.g. Salesforce/wikitext:wikitext-2-raw-v1."
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ... ; auto takes a GPU when there is one.")]
Dtype = Annotated[str, typer.Option(help="Floating-point type of the network: float32, bfloat16 or float16.")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Change a recipe field, e.g. --set weights.scheme.bits=3 --set rotation=null. Repeatable."
    ),
]


def corpus_spec(text: str) -> CorpusSpec:
    """The corpus a user names on the command line: see `Corpus`."""
    if text == "docstrings":
        return CorpusSpec(name="docstrings", source="docstrings")
    if Path(text).exists():
        return CorpusSpec(name=Path(text).stem, source="local", path=text)
    path, _, subset = text.partition(":")
    return CorpusSpec(name=path.split("/")[-1], source="hub", path=path, subset=subset or None)


def changed(recipe: Recipe, changes: list[str] | None) -> Recipe:
    """Apply `--set path=value` options in order; values are YAML, so numbers, true, null and {a: 1} mean themselves.

    Raises:
        RecipeError: an option without "=", an unknown field or an impossible value.
    """
    for change in changes or []:
        path, equals, value = change.partition("=")
        if not equals:
            raise RecipeError(f"--set {change}: write it as field.subfield=value.")
        nested: Any = yaml.safe_load(value)
        for part in reversed(path.split(".")):
            nested = {part: nested}
        recipe = override(recipe, nested, f"--set {change}")
    return recipe


def torch_device(name: str) -> "torch.device":
    """The torch device of a `--device` option.

    Raises:
        RecipeError: for an unknown device or a GPU that is not there.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RecipeError(f"unknown device {name!r}; use cpu, cuda, cuda:N or auto.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RecipeError(f"device {name!r} is not available: torch sees {torch.cuda.device_count()} GPUs.")
    return device


def torch_dtype(name: str) -> "torch.dtype":
    """The torch dtype of a `--dtype` option.

    Raises:
        RecipeError: for a type other than float32, bfloat16, float16 and float64.
    """
    import torch

    if name not in ("float32", "bfloat16", "float16", "float64"):
        raise RecipeError(f"unknown dtype {name!r}; use float32, bfloat16, float16 or float64.")
    return getattr(torch, name)
