"""Recipes and runs are validated data with one key per content; two-stage keys share what can be shared."""

import pytest

from rotquant.corpora import CorpusSpec
from rotquant.errors import RecipeError
from rotquant.presets import PRESETS, preset
from rotquant.recipes import Recipe, Run, override, parse_recipe

CORPORA = {"wikitext2": CorpusSpec(), "c4": CorpusSpec(name="c4", source="hub", path="allenai/c4", subset="en")}


def run(recipe: Recipe, **changes) -> Run:
    values = {
        "checkpoint": "model",
        "checkpoint_digest": "d0",
        "recipe": recipe,
        "metric": {"kind": "perplexity"},
        "corpora": CORPORA,
        "seed": 1,
    }
    return Run.model_validate({**values, **changes})


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_json_with_the_same_key(name):
    first = run(preset(name))
    again = Run.model_validate_json(first.model_dump_json())
    assert again == first
    assert again.key == first.key
    assert again.weights_key == first.weights_key


def test_all_presets_have_different_keys():
    keys = {run(preset(name)).key for name in PRESETS}
    assert len(keys) == len(PRESETS)


def test_the_key_ignores_where_a_checkpoint_lies_but_not_what_it_is():
    here, there = run(preset("quarot")), run(preset("quarot"), checkpoint="/elsewhere")
    other = run(preset("quarot"), checkpoint_digest="d1")
    assert here.key == there.key
    assert other.key != here.key
    assert other.weights_key != here.weights_key


def test_runs_that_differ_only_at_run_time_share_their_weights():
    quarot = preset("quarot")
    variants = [
        quarot,
        override(quarot, {"activations": {"clip_ratio": 1.0}}, "test"),
        override(quarot, {"activations": None}, "test"),
        override(quarot, {"keys": {"bits": 3}, "values": {"bits": 2}}, "test"),
    ]
    assert len({run(recipe).weights_key for recipe in variants}) == 1
    assert len({run(recipe).key for recipe in variants}) == len(variants)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": {"scheme": {"bits": 3}}},
        {"weights": {"gptq": None}},
        {"weights": {"clip_norm": 2.4}},
        {"rotation": {"residual": "orthogonal"}},
        {"calibration": {"samples": 64}},
        {"calibration": {"corpus": "c4"}},
    ],
)
def test_what_changes_the_weights_changes_their_key(change):
    quarot = preset("quarot")
    assert run(override(quarot, change, "test")).weights_key != run(quarot).weights_key


def test_weights_that_are_trained_against_activations_depend_on_them():
    omniquant = preset("omniquant")
    changed = override(omniquant, {"activations": {"bits": 8}}, "test")
    assert run(changed).weights_key != run(omniquant).weights_key


def test_the_seed_counts_only_where_something_is_random():
    assert run(preset("smoothquant"), seed=0).key == run(preset("smoothquant"), seed=2).key
    assert run(preset("quarot"), seed=0).key != run(preset("quarot"), seed=2).key


def test_the_baseline_needs_no_weights_stage():
    assert run(preset("baseline")).weights_key is None


def test_only_the_corpora_in_use_enter_the_key():
    fewer = run(preset("quarot"), corpora={"wikitext2": CORPORA["wikitext2"]})
    assert fewer.key == run(preset("quarot")).key


def test_calibration_text_does_not_matter_to_a_recipe_that_does_not_calibrate():
    rtn = preset("rtn")
    assert run(rtn).key == run(override(rtn, {"calibration": None}, "test")).key
    assert set(run(rtn).corpora) == {"wikitext2"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"weights": {"scheme": {"bits": 1}}}, "weights.scheme.bits.*greater than or equal to 2.*given 1"),
        ({"weights": {"scheme": {"bits": 9}}}, "weights.scheme.bits.*less than or equal to 8"),
        ({"activations": {"clip_ratio": 0.0}}, "activations.clip_ratio.*greater than 0"),
        ({"activations": {"clip_ratio": 1.5}}, "activations.clip_ratio.*less than or equal to 1"),
        ({"activations": {"granularity": "group"}}, "needs a group_size"),
        ({"activations": {"group_size": 8}}, "group_size has no meaning for granularity 'token'"),
        ({"weights": {"scheme": {"granularity": "token"}}}, "weights take granularity"),
        ({"rotation": {"resid": "hadamard"}}, "rotation.resid.*not permitted"),
        ({"calibration": None}, "need a calibration section"),
        ({"smoothing": {}, "omniquant": {}}, "choose one"),
    ],
)
def test_an_impossible_recipe_is_one_sentence_that_names_the_field(change, sentence):
    with pytest.raises(RecipeError, match=sentence) as error:
        override(preset("quarot"), change, "recipe")
    assert "\n" not in str(error.value)


def test_an_unknown_method_names_the_nearest():
    with pytest.raises(RecipeError, match=r"unknown method 'quarrot'; nearest: quarot"):
        preset("quarrot")


def test_an_undefined_corpus_is_named():
    recipe = preset("quarot").model_dump(mode="json")
    recipe["calibration"]["corpus"] = "pile"
    with pytest.raises(ValueError, match="corpus 'pile' is not defined"):
        run(parse_recipe(recipe, "recipe"))
