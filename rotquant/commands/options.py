"""Command-line options that several commands share, and their translation into recipes and corpora."""

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from rotquant.corpora import DOCSTRINGS, CorpusSpec
from rotquant.errors import RecipeError
from rotquant.recipes import Recipe, override

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
        return DOCSTRINGS
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
