"""`rotquant families`: what works on each family of models, asked of the code that does it or refuses it."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.table import Table

from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.options import a_model
from rotquant.foundation.errors import RecipeError
from rotquant.foundation.progress import task
from rotquant.recipes.presets import all_presets, preset
from rotquant.recipes.schemes import ROTATION_FIELDS, RotationScheme
from rotquant.recipes.traits import TRAITS


@answers({"families": "by name: rotations, methods with what each does there or why not, convert, export, layers"})
def families(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            callback=lambda model: model and a_model(model),
            help="A checkpoint, folder, GGUF file or hub id, to ask for its own sizes.",
        ),
    ] = None,
) -> CommandResult:
    """List the families of models that are known, and what works on them: rotations, methods, `convert` and `export`.

    Sizes are those of transformers' default configuration. Whether a transform fits also depends on sizes: one across
    heads needs a Hadamard matrix of their number. Name a MODEL to see its own. R1_attention and R1_mlp turn what q, k,
    v and gate, up read while the model runs, where norms after attention and MLP let no fused R1 pass. With `export`
    stand the formats that transformers runs, and the rotations that need nothing at run time; other engines may take
    fewer.

    Examples: `rotquant families`, `rotquant families HuggingFaceTB/SmolLM2-135M`
    """
    with task("starting"):
        from transformers import CONFIG_MAPPING

        from rotquant.models.architectures import FAMILIES
        from rotquant.models.checkpoints import config_of

    configs = [CONFIG_MAPPING[name]() for name in FAMILIES] if model is None else [config_of(model)]
    table, found = Table(*("family", *(key for key in _HEAD if key != "methods"))), {}
    for config in configs:
        name, *cells = _row(config)
        found[name] = dict(zip(_HEAD, cells, strict=True))
        shown = (value for key, value in found[name].items() if key != "methods")
        table.add_row(name, *(value if isinstance(value, str) else " ".join(value) for value in shown))
    return CommandResult({"families": found}, (table, *_methods_table(found)))


#: What is said of a family.
_HEAD = ("rotations", "methods", "convert", "export", "layers have")


def _row(config: Any) -> Iterator[Any]:
    """The family of a model of this configuration, and what is said of it."""
    from rotquant.models.architectures import architecture_of
    from rotquant.models.fitting import substitutes

    architecture, scheme = architecture_of(config), RotationScheme()
    missing = {one.field: one.value for one in substitutes(architecture, scheme.transforms)}
    yield architecture.family
    yield [one.name for one in scheme.model_copy(update=missing).transforms]
    yield {name: _method(name, architecture, config) for name in all_presets()}
    yield _convert(config)
    fused = [one.name for one in scheme.transforms if not one.online and ROTATION_FIELDS[one.name] not in missing]
    yield f"{_formats(architecture)}, with {', '.join(fused)}"
    yield ", ".join(TRAITS[trait] for trait in sorted(architecture.traits))


def _method(name: str, architecture: Any, config: Any) -> str:
    """What a preset does to such a model: `yes`, what it becomes there, or after `no: ` why it is refused."""
    from rotquant.models.fitting import fitted
    from rotquant.models.limits import ModelLimits
    from rotquant.weights.build import check_recipe_for

    limits = ModelLimits.of(config)
    try:
        recipe, changed = fitted(limits.shorten(preset(name)), architecture)
        check_recipe_for(recipe, architecture, limits)
    except RecipeError as error:
        return f"no: {error}"
    notes = [changed] if changed else []
    if recipe.prefix_tokens and limits.window is not None:
        notes.append(f"prefix and text have at most {limits.window} tokens together, the window of attention.")
    return f"yes: {' '.join(notes)}" if notes else "yes"


def _methods_table(found: dict[str, dict[str, Any]]) -> tuple[str, Table]:
    """A sentence on how many methods work, and those that are not simply there, of one kind together."""
    rows: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for family, about in found.items():
        kinds: dict[str, list[str]] = {}
        for name, what in about["methods"].items():
            kinds.setdefault(what.replace(f"this {family} model", "the model"), []).append(name)
        for what, names in kinds.items():
            rows.setdefault((tuple(names), what), []).append(family)
    table = Table("methods", "families", "what they do there")
    for (names, what), among in rows.items():
        if what != "yes" or len(found) == 1:
            table.add_row(", ".join(names), ", ".join(among), what.removeprefix("yes: "))
    refused = sum(what.startswith("no: ") for about in found.values() for what in about["methods"].values())
    every = sum(len(about["methods"]) for about in found.values())
    if len(found) == 1:
        return f"\n{every - refused} of {every} methods work:", table
    return f"\n{every - refused} of {every} pairs of a method and a family work; these in another way, or not:", table


def _formats(architecture: Any) -> str:
    """The formats of `export` in which transformers runs such a model, of 4-bit weights alone."""
    from rotquant.formats.engines import check_engine

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
    window = ModelLimits.of(config).window
    return "yes" if window is None else f"up to {window} tokens"
