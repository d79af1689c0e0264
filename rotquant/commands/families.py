"""`rotquant families`: what works on each family of models, asked of the code that does it or refuses it."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from rotquant.commands.answers import CommandResult, answers
from rotquant.foundation.errors import RecipeError
from rotquant.foundation.progress import task
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import find_method
from rotquant.recipes.registry import method_names
from rotquant.recipes.schemes import ROTATION_FIELDS, RotationScheme
from rotquant.recipes.traits import TRAITS


@answers({"families": "by name: each rotation, methods, convert, export, and what its layers have"})
def families(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A checkpoint, folder or hub id, to ask for its own sizes.")
    ] = None,
) -> CommandResult:
    """List the families of models that are known, and what works on them: rotations, methods, `convert` and `export`.

    Sizes are those of transformers' default configuration. Whether a transform fits also depends on sizes: one across
    heads needs a Hadamard matrix of their number. Name a MODEL to see its own. With `export` stand the formats that
    transformers runs, and the rotations that need nothing at run time; other engines may take fewer.

    Examples: `rotquant families`, `rotquant families HuggingFaceTB/SmolLM2-135M`
    """
    with task("starting"):
        from transformers import CONFIG_MAPPING

        from rotquant.models.architectures import FAMILIES
        from rotquant.models.checkpoints import config_of

    configs = [CONFIG_MAPPING[name]() for name in FAMILIES] if model is None else [config_of(model)]
    head = (*ROTATION_FIELDS, "methods", "convert", "export", "layers have")
    table, found = Table(Column("family", no_wrap=True), *head), {}
    for name, *cells in map(_row, configs):
        table.add_row(name, *cells)
        found[name] = dict(zip(head, cells, strict=True))
    return CommandResult({"families": found}, (table,))


def _row(config: Any) -> Iterator[str]:
    """The cells of a model of this configuration."""
    from rotquant.models.architectures import architecture_of
    from rotquant.models.fitting import substitutes

    architecture, transforms = architecture_of(config), RotationScheme().transforms
    missing = {one.field for one in substitutes(architecture, transforms)}
    yield architecture.family
    yield from ("no" if field in missing else "yes" for field in ROTATION_FIELDS.values())
    yield _methods(architecture.traits)
    yield _convert(config)
    fused = [one.name for one in transforms if not one.online and ROTATION_FIELDS[one.name] not in missing]
    yield f"{_formats(architecture)}, with {', '.join(fused)}"
    yield ", ".join(TRAITS[trait] for trait in sorted(architecture.traits))


def _methods(traits: frozenset[Any]) -> str:
    """The methods that act on layers with these traits, or the ones that do not where these are fewer."""
    every = method_names()
    some = [name for name in every if traits <= find_method(name).layers]
    others = [name for name in every if name not in some]
    if not others:
        return "all"
    return f"all but {', '.join(others)}" if len(others) < len(some) else f"rtn, {', '.join(some)}"


def _formats(architecture: Any) -> str:
    """The formats of `export` in which transformers runs such a model, of 4-bit weights alone."""
    from rotquant.weights.engines import check_engine

    weights_alone = preset("rtn").model_copy(update=dict.fromkeys(("activations", "keys", "values")))
    try:
        check_engine(weights_alone, architecture, "transformers")
    except RecipeError:
        return "plain"
    return "plain, packed"


def _convert(config: Any) -> str:
    """Whether the decoder computes such a model, and for texts of which length where its attention has a window."""
    from rotquant.decoder.conversion import check_config
    from rotquant.models.limits import ModelLimits

    try:
        check_config(config)
    except RecipeError:
        return "no"
    return f"up to {config.sliding_window} tokens" if ModelLimits.of(config).windowed else "yes"
