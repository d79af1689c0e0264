"""`rotquant methods` and `rotquant recipe` show everything that a method is, each field with its documentation."""

import json
from typing import get_args

import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from rotquant.commands.root import cli
from rotquant.foundation.data import Frozen, field_meanings
from rotquant.recipes.presets import all_presets, preset
from rotquant.recipes.recipe import Recipe, find_method
from rotquant.recipes.registry import method_names
from tests.helpers.cases import one_in

PRESETS = all_presets()


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments, env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    return result.output


def paths(data: dict, prefix: str = "") -> set[str]:
    """Every field of a recipe, as --set names it."""
    inside = (paths(value, f"{prefix}{name}.") for name, value in data.items() if isinstance(value, dict))
    return {prefix + name for name in data}.union(*inside)


def sections(model: type[BaseModel]) -> set[type[BaseModel]]:
    """A model and all models inside of it."""
    fields = [field.annotation for field in model.model_fields.values()]
    kinds = {kind for field in fields for kind in (field, *get_args(field))}
    return {model}.union(*(sections(kind) for kind in kinds if isinstance(kind, type) and issubclass(kind, Frozen)))


def test_every_method_is_listed_with_its_bits():
    lines = shown("methods").splitlines()
    for name in PRESETS:
        assert any(line.split()[1:2] == [name] for line in lines)
    assert any("quip-sharp" in line and "4-16-16" in line for line in lines)


def test_every_field_of_a_recipe_is_documented_where_it_is_declared():
    found = sections(Recipe).union(*(sections(find_method(name)) for name in method_names()))
    assert len(found) == 32
    for model in found:
        assert set(field_meanings(model)) == set(model.model_fields), model


@pytest.mark.parametrize("method", one_in(4, PRESETS))
def test_a_recipe_is_shown_whole_and_can_be_copied(method):
    recipe = preset(method)
    table = shown("recipe", method)
    words = {line.split()[1] for line in table.splitlines() if line.startswith("│")}
    assert paths(recipe.model_dump(mode="json")) <= words
    assert Recipe.model_validate(yaml.safe_load(shown("recipe", method, "--format", "yaml"))) == recipe
    assert Recipe.model_validate(json.loads(shown("recipe", method, "--json"))) == recipe


def test_a_recipe_shows_changes_beside_the_defaults():
    lines = shown("recipe", "spinquant-hard", "--set", "methods.spinquant.text.samples=7").splitlines()
    (line,) = (line for line in lines if "methods.spinquant.text.samples" in line)
    assert line.split("│")[2].strip() == "7"
    assert line.split("│")[3].strip() == "800"
    (bits,) = (line for line in lines if " weights.scheme.bits " in line)
    assert bits.split("│")[3].strip() == ""  # it has none: every recipe says it
