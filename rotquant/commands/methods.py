"""`rotquant methods` and `rotquant recipe`: the presets, and every field of one with what it means.

All that is shown is read from `rotquant.recipes` and from the documentation of the fields where they are declared.
"""

import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from rich.table import Column, Table

from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.options import Changes, MethodName, changed
from rotquant.foundation.data import field_meanings
from rotquant.recipes.presets import all_presets, preset
from rotquant.recipes.recipe import ROLES, Recipe, find_method
from rotquant.recipes.registry import method_names


@answers({"methods": "by name: bits of weights, inputs, KV cache; what it is", "parts": "of recipes: roles, source"})
def methods() -> CommandResult:
    """List the methods that `rotquant quantize --method` takes: weights, inputs and KV cache in bits, what it is.

    Below them, what recipes are made of: `--set methods.NAME={}` adds one to a recipe, null takes it out.

    Example: `rotquant methods`, then `rotquant recipe quarot` for one of them
    """
    table = Table("method", "W-A-KV", "what it is")
    named = {name: (_widths(make()), _first_paragraph(make)) for name, make in all_presets().items()}
    for name, (widths, words) in named.items():
        table.add_row(name, widths, words)
    lower, parts = Table(Column("in a recipe", no_wrap=True), "does", "what it is"), {}
    for method in map(find_method, method_names()):
        roles, words = [role for role in ROLES if role in method.roles], _first_paragraph(method)
        lower.add_row(f"methods.{method.name}", ", ".join(roles), f"{words} [{method.source}]")
        parts[method.name] = {"roles": roles, "what": words, "source": method.source}
    found = {
        name: {"bits": list(map(int, widths.split("-"))), "what": words} for name, (widths, words) in named.items()
    }
    return CommandResult({"methods": found, "parts": parts}, (table, lower))


@answers({"every field of the recipe": "its value, to be copied"})
def recipe(
    method: MethodName,
    changes: Changes = None,
    format: Annotated[
        Literal["table", "yaml"],
        typer.Option(help="table: each field with value, default and meaning; yaml: the values, to be copied."),
    ] = "table",
) -> CommandResult:
    """Show what a METHOD does: every field of its recipe with value, default and meaning, as `--set` changes them.

    A section that the method leaves at null shows its fields with `--set SECTION={}`.

    Examples: `rotquant recipe spinquant-hard`, `rotquant recipe quarot --set weights.scheme.bits=3 --format yaml`
    """
    chosen = changed(preset(method), changes)
    data = chosen.model_dump(mode="json")
    if format == "yaml":
        return CommandResult(data, (yaml.safe_dump(data, sort_keys=False),))
    table = Table("field", "value", "default", "meaning")
    for path, value, default, meaning in _rows(Recipe, data):
        table.add_row(path, value, default, meaning)
    return CommandResult(data, (f"{method}: {_first_paragraph(all_presets()[method])}", "", table))


def _widths(recipe: Recipe) -> str:
    """Bits of weights, inputs and KV cache, 16 where they stay floating point."""
    schemes = (recipe.weights and recipe.weights.scheme, recipe.activations, recipe.keys)
    return "-".join(str(scheme.bits if scheme else 16) for scheme in schemes)


def _first_paragraph(documented: Any) -> str:
    return " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())


def _rows(
    section: type[BaseModel], values: dict[str, Any], default: BaseModel | None = None, path: str = ""
) -> Iterator[tuple[str, str, str, str]]:
    """Path, value, default and meaning of each field of a section, in order and with the sections inside of it."""
    meanings = field_meanings(section)
    for name, field in section.model_fields.items():
        value, inner = values.get(name, field.default), _section(field.annotation)  # some leave out their default
        usual = field.default if default is None else getattr(default, name)
        if get_origin(field.annotation) is Mapping:  # of methods, the only one in a recipe
            yield path + name, "", "", meanings[name]
            yield from _method_rows(values[name])
        elif inner:
            yield path + name, "" if value else "null", "", f"{meanings[name]} {_first_paragraph(inner)}"
            if value:
                usual = usual if isinstance(usual, BaseModel) else None
                yield from _rows(inner, value, usual, f"{path}{name}.")
        else:
            yield path + name, _shown(value), "" if usual is PydanticUndefined else _shown(usual), meanings[name]


def _method_rows(values: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """The rows of the methods of a recipe, each with its fields, and of those that it could have too."""
    for name in [*values, *(name for name in method_names() if name not in values)]:
        method = find_method(name)
        yield f"methods.{name}", "" if name in values else "null", "", _first_paragraph(method)
        if name in values:
            yield from _rows(method, values[name], path=f"methods.{name}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, which may be optional; None where it holds a value."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _shown(value: Any) -> str:
    """A value as `--set` takes it."""
    return json.dumps(value).strip('"')
