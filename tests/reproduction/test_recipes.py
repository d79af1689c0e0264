"""Recipes and runs are validated data with one key per content; keys of the stages share what can be shared."""

import itertools
from typing import Any

import pytest

from reproduction.corpora import MODULES, Corpus
from reproduction.identity.run import Run, named
from rotquant.foundation.errors import RecipeError
from rotquant.recipes.presets import PRESETS, preset
from rotquant.recipes.recipe import Recipe, override

CORPORA = {
    "wikitext2": MODULES,
    "c4": Corpus(name="c4", source="hub", path="allenai/c4", subset="en"),
    "pile": Corpus(name="pile", source="local", path="pile"),
    "redpajama": Corpus(name="redpajama", source="local", path="redpajama"),
}


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


def test_equal_recipes_have_equal_hashes_whatever_the_order_of_their_methods():
    first, second = (
        Recipe.model_validate(preset("quarot").model_dump() | {"methods": dict(methods)})
        for methods in itertools.permutations({"gptq": {}, "smoothquant": {"alpha": 0.7}}.items())
    )
    assert first == second
    assert hash(first) == hash(second)
    assert len({first, second, preset("quarot")}) == 2


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
        {"methods": {"gptq": None}},
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


HARD = preset("spinquant-hard")
AT_8_BITS = {name: {"bits": 8} for name in ("activations", "attention_output")}


@pytest.mark.parametrize(
    "change",
    [
        {"methods": {"gptq": None}},
        {"weights": {"scheme": {"bits": 3}}},
        {"weights": {"clip_search": False}},
        {"weights": None, "methods": {"gptq": None}},
        {"calibration": {"samples": 64}},
    ],
)
def test_rotations_learned_before_the_weights_are_quantized_serve_all_weights(change):
    changed = run(override(HARD, change, "test"))
    assert changed.rotation_key == run(HARD).rotation_key
    assert changed.weights_key != run(HARD).weights_key


@pytest.mark.parametrize(
    "change",
    [
        AT_8_BITS,
        {"attention_output": None},
        {"keys": None, "values": None},
        {"rotation": {"mlp": False}},
        {"rotation": {"residual": "orthogonal"}},
        {"methods": {"spinquant": {"steps": 10}}},
        {"methods": {"spinquant": {"text": {"samples": 128}}}},
        {"methods": {"spinquant": {"text": {"corpus": "c4"}}}},
        {"methods": {"spinquant": {"network": "all"}}},
    ],
)
def test_what_changes_learned_rotations_changes_their_key_and_that_of_the_weights(change):
    changed = run(override(HARD, change, "test"))
    assert changed.rotation_key != run(HARD).rotation_key
    assert changed.weights_key != run(HARD).weights_key


def test_rotations_learned_with_quantized_weights_depend_on_their_scheme_and_not_on_gptq():
    everything = override(HARD, {"methods": {"spinquant": {"network": "all"}}}, "test")
    gptq = run(override(everything, {"methods": {"gptq": None}}, "test"))
    bits = run(override(everything, {"weights": {"scheme": {"bits": 3}}}, "test"))
    assert gptq.rotation_key == run(everything).rotation_key != bits.rotation_key


def test_learned_rotations_belong_to_a_seed_a_checkpoint_and_a_text():
    assert run(HARD, seed=0).rotation_key != run(HARD, seed=2).rotation_key
    assert run(HARD, checkpoint_digest="d1").rotation_key != run(HARD).rotation_key
    moved = CORPORA | {"wikitext2": Corpus(name="other", source="local", path="text")}
    assert run(HARD, corpora=moved).rotation_key == run(HARD).rotation_key
    read = {named(*portion): "another" for portion in run(HARD).portions if portion[1] == "train"}
    assert run(HARD, texts=read).rotation_key != run(HARD).rotation_key


def test_only_recipes_that_learn_have_a_rotation_key():
    drawn = override(HARD, {"methods": {"spinquant": None}}, "test")
    assert [name for name in PRESETS if run(preset(name)).rotation_key] == ["spinquant-easy", "spinquant-hard"]
    assert run(drawn).rotation_key is None
    assert run(drawn).weights_key == run(override(drawn, {"keys": None, "values": None}, "test")).weights_key


@pytest.mark.parametrize("name", ["rtn", "gptq", "spinquant-easy", "spinquant-hard"])
@pytest.mark.parametrize("learned", [True, False])
def test_every_bit_width_of_the_papers_tables_is_a_recipe(name, learned):
    keys = set()
    for weights, inputs, cache in itertools.product((3, 4, 16), (4, 8, 16), (4, 8, 16)):
        changes: dict[str, Any] = {
            "weights": {"scheme": {"bits": weights}} if weights < 16 else None,
            "methods": {} if weights < 16 else {"gptq": None},
            "activations": {"bits": inputs} if inputs < 16 else None,
            **{part: {"bits": cache} if cache < 16 else None for part in ("keys", "values")},
        }
        if preset(name).rotation:
            network = "activations" if min(inputs, cache) < 16 else "all"
            something = min(weights, inputs, cache) < 16
            changes["attention_output"] = changes["activations"]
            changes["methods"]["spinquant"] = {"network": network} if learned and something else None
        keys.add(run(override(preset(name), changes, "test")).key)
    assert len(keys) == 27


def test_the_seed_counts_only_where_something_is_random():
    assert run(preset("rtn"), seed=0).key == run(preset("rtn"), seed=2).key
    for name in ("quarot-rtn", "smoothquant", "llm-qat"):  # a rotation, a calibration sample, text of the model's own
        assert run(preset(name), seed=0).key != run(preset(name), seed=2).key


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
        ({"rotation": {"resid": "hadamard"}}, "rotation: unknown field 'resid'; nearest: residual"),
        ({"calibration": None}, "gptq needs a calibration section"),
        ({"methods": {"smoothquant": {}, "omniquant": {}}}, "smoothquant and omniquant both change the same weights"),
        ({"methods": {"awq": {}, "smoothquant": None}}, "awq and gptq both round the weights: choose one"),
        ({"methods": {"gptk": {}}}, "methods: unknown method 'gptk'; nearest: gptq"),
        ({"methods": {"gptq": {"dampin": 0.1}}}, "methods.gptq: unknown field 'dampin'; nearest: damping"),
        ({"weights": None}, "gptq rounds weights: it needs a weights section, or leave methods.gptq out too"),
        (
            {"methods": {"spinquant": {}, "outliers": {"features": 8}}},
            "spinquant cannot be combined with outliers",
        ),
        (
            {"methods": {"spinquant": {"network": "all"}, "gptq": None}, "weights": None},
            "network 'all' needs a weights section",
        ),
        (
            {"methods": {"spinquant": {}}, "activations": None, "keys": None, "values": None},
            "network 'activations' needs an activations, keys or values section",
        ),
    ],
)
def test_an_impossible_recipe_is_one_sentence_that_names_the_field(change, sentence):
    with pytest.raises(RecipeError, match=sentence) as error:
        override(preset("quarot"), change, "recipe")
    assert "\n" not in str(error.value)


def test_an_unknown_method_names_the_nearest():
    with pytest.raises(RecipeError, match=r"unknown method 'quarrot'; nearest: quarot"):
        preset("quarrot")


@pytest.mark.parametrize(
    "change", [{"calibration": {"corpus": "books"}}, {"methods": {"spinquant": {"text": {"corpus": "books"}}}}]
)
def test_an_undefined_corpus_is_named(change):
    recipe = override(HARD, change, "recipe")
    with pytest.raises(ValueError, match="corpus 'books' is not defined"):
        run(recipe)


def test_a_text_of_a_method_s_own_decides_the_weights_and_nothing_else_does_of_it() -> None:
    tuned = preset("prefixquant-tuned")
    on_it = override(tuned, {"methods": {"block_ap": {"text": {"corpus": "redpajama"}}}}, "test")
    other = {named(*portion): "another" for portion in run(on_it).portions if portion[0] == "redpajama"}
    assert run(tuned, texts=other).weights_key == run(tuned).weights_key  # it is not among its texts
    assert run(on_it, texts=other).weights_key != run(on_it).weights_key != run(tuned).weights_key
    assert run(on_it).rotation_key is None
    assert tuned.own_texts.keys() == {"block_ap"}
    assert not preset("spinquant-hard").own_texts  # whose text is the rotations'
