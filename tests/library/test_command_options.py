"""A result is what its command said: an option that was not given changes nothing, and Python does the same."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rotquant import api, comparison
from rotquant.commands import compare, convert, diagnose, distil, formats, models, plan
from rotquant.commands.options import changes_of
from rotquant.costs import plan as costs
from rotquant.foundation.errors import RecipeError
from rotquant.recipes.presets import all_presets, preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.tensors.devices import torch_dtype
from rotquant.text import WIKITEXT2
from tests.helpers.cases import one_in
from tests.helpers.checkpoints import save_words, tiny_tokenizer
from tests.helpers.commands import rotquant
from tests.helpers.models import tiny_model

PRESETS = [name for name in all_presets() if name != "baseline"]


class Asked(Exception):  # noqa: N818 - it ends a command that has said what it would do
    """What a function was called with, in place of its work."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a longer context than the papers' texts, with 256 features, so that every preset fits."""
    folder = tmp_path_factory.mktemp("options") / "model"
    tiny_model(hidden_size=512, intermediate_size=512, num_layers=1, max_position_embeddings=4096).save_pretrained(
        folder
    )
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run a command as far as the function that does its work, and give the arguments of that."""

    def run(module: Any, function: str, *arguments: str) -> dict[str, Any]:
        signature = inspect.signature(getattr(module, function))

        def stop(*given: Any, **named: Any) -> None:
            bound = signature.bind(*given, **named)
            bound.apply_defaults()
            raise Asked(bound.arguments)

        with monkeypatch.context() as patched:
            patched.setattr(module, function, stop)
            with pytest.raises(Asked) as stopped:
                rotquant(patched, *arguments)
        return stopped.value.args[0]

    return run


def in_python(model: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The recipe by which `api.quantize` makes the weights of a preset."""

    def stop(network: Any, recipe: Recipe, *_: Any) -> None:
        raise Asked(recipe)

    monkeypatch.setattr(api, "check_recipe", stop)
    monkeypatch.setattr(api, "calibration_tokens", lambda *_: None)
    with pytest.raises(Asked) as stopped:
        api.quantize(model, name, corpus=WIKITEXT2)
    return stopped.value.args[0]


@pytest.mark.parametrize("name", one_in(4, PRESETS))
def test_a_presets_name_means_one_recipe_on_the_command_line_in_a_plan_and_in_python(
    name: str, model: str, asked: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--method", name]
    text = ["--corpus", "wikitext2"]
    quantized = asked(api, "quantize", "quantize", model, "-o", str(tmp_path / "out"), *given, *text)
    planned = asked(costs, "costs_of", "plan", model, *given)["work"]
    assert quantized["recipe"] == planned.recipe == in_python(model, name, monkeypatch) == preset(name)


def test_no_default_of_an_option_is_another_than_that_of_python() -> None:
    """Of those that both have: what is not given is the same on both sides."""
    same: dict[str, Callable[[Any], Any]] = {"dtype": lambda name: name and torch_dtype(name)}
    pairs = [(models.quantize, api.quantize), (compare.compare, comparison.compare)]
    for command, function in pairs:
        options, parameters = inspect.signature(command).parameters, inspect.signature(function).parameters
        shared = [
            name for name in options if name in parameters and options[name].default is not inspect.Parameter.empty
        ]
        assert {"dtype"} < set(shared)
        for name in set(shared) - {"device", "check"}:  # where it runs, and what is read beside it: no result
            assert same.get(name, lambda value: value)(options[name].default) == parameters[name].default, name
    for command in (models.quantize, plan.plan):
        options = inspect.signature(command).parameters
        assert options["samples"].default is options["sequence_length"].default is options["changes"].default is None


#: What a user wrote, unlike every default.
WRITTEN = {"calibration": {"samples": 3, "sequence_length": 48, "seed": 5}, "rotation": {"heads": False}}


def test_a_recipe_in_a_file_runs_as_it_is_written(
    model: str, asked: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    recipe = override(preset("spinquant-hard"), {**WRITTEN, "methods": {"spinquant": {"text": {"samples": 7}}}}, "test")
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    command = ["quantize", model, "-o", str(tmp_path / "out"), "--method", str(file), "--corpus", "wikitext2"]
    assert asked(api, "quantize", *command)["recipe"] == recipe
    changed = asked(api, "quantize", *command, "--samples", "9", "--set", "weights.scheme.bits=3")["recipe"]
    assert changed == override(
        recipe, {"calibration": {"samples": 9}, "weights": {"scheme": {"bits": 3}}}, "what the options name"
    )


def test_a_recipe_in_a_file_is_fitted_as_its_preset_and_what_an_option_names_is_not(
    tmp_path: Path, asked: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    folder, file = tmp_path / "model", tmp_path / "mine.yaml"
    tiny_model(hidden_size=48, num_heads=6, num_kv_heads=2, max_position_embeddings=64).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    file.write_text(yaml.safe_dump(preset("quarot").model_dump(mode="json")))
    command = ["quantize", str(folder), "-o", str(tmp_path / "out"), "--method"]
    text = ["--corpus", str(save_words(tmp_path / "words.txt", 2000))]
    of_preset = asked(api, "quantize", *command, "quarot", *text)["recipe"]
    note = capsys.readouterr().out
    assert (of_preset.rotation.heads, of_preset.calibration.sequence_length) == (False, 64)
    assert "6 (number of attention heads)" in note
    assert asked(api, "quantize", *command, str(file), *text)["recipe"] == of_preset
    assert capsys.readouterr().out == note
    for options, said in (
        (["--set", "rotation.heads=true"], "change the recipe, --set rotation.heads=false"),
        (["--sequence-length", "2048"], "samples of 2048 tokens exceed the model's context of 64 tokens"),
    ):
        assert rotquant(monkeypatch, *command, str(file), *options, *text) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(RecipeError, match="exceed the model's context"):
        api.quantize(folder, override(preset("quarot"), {"rotation": {"heads": False}}, "test"), corpus=WIKITEXT2)


def test_an_evaluation_runs_in_the_type_that_is_asked_for(
    model: str, asked: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    text = str(save_words(tmp_path / "words.txt", 2000))
    for options, dtype in (([], None), (["--dtype", "bfloat16"], torch.bfloat16)):
        assert asked(api, "load", "evaluate", model, "--corpus", text, *options)["dtype"] == dtype


def test_every_command_that_loads_a_network_has_the_option_dtype() -> None:
    """But for text from a decoder, whose type was chosen when it was converted."""
    for command in (
        models.quantize,
        models.evaluate,
        formats.export,
        plan.plan,
        compare.compare,
        diagnose.diagnose,
        distil.train_quantized,
        convert.convert,
    ):
        assert "dtype" in inspect.signature(command).parameters


def test_a_long_option_is_named_by_its_beginning() -> None:
    with pytest.raises(RecipeError, match=r"^--set x{100}\.\.\.: write it as field\.subfield=value"):
        changes_of(["x" * 5000])
