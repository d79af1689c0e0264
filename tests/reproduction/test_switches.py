"""Switches between what QuaRot's paper says and what its code does: each changes what it should, and its keys."""

import pytest
import torch

from reproduction.identity.run import Run
from rotquant.foundation.errors import RecipeError
from rotquant.methods.gptq import GPTQ
from rotquant.methods.outliers import OutlierFeatures
from rotquant.models.rotation.fusing import rotate
from rotquant.models.simulation.runtime import RuntimeQuantization
from rotquant.recipes.recipe import Recipe, override
from rotquant.recipes.schemes import Calibration, QuantizationScheme, RotationScheme, WeightQuantization
from rotquant.tensors.quantization import ColumnSplit
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.hessian import Hessian
from tests.helpers.cases import one_in
from tests.helpers.models import FAMILIES, tiny_model, tiny_tokens
from tests.helpers.weights import assert_gptq_by_hand

SAMPLES = tiny_tokens(batch=4, tokens=24, seed=5)
CACHE = QuantizationScheme(bits=4, symmetric=False, granularity="head", clip_ratio=0.95)
QUAROT = Recipe(
    rotation=RotationScheme(),
    methods={"gptq": GPTQ()},
    weights=WeightQuantization(scheme=QuantizationScheme(bits=4, granularity="channel")),
    activations=QuantizationScheme(bits=4, clip_ratio=0.9),
    keys=CACHE,
    values=CACHE,
    calibration=Calibration(samples=4, sequence_length=24),
)
QUANTIZED_INPUTS = {"methods": {"gptq": {"hessian_inputs": "quantized"}}}


CORPORA = {"wikitext2": {"name": "docstrings", "source": "docstrings"}}


def run(recipe: Recipe) -> Run:
    return Run(
        checkpoint="model", checkpoint_digest="d0", recipe=recipe, metric={"kind": "perplexity"}, corpora=CORPORA
    )


def changed(**fields: object) -> Recipe:
    return override(QUAROT, fields, "test")


@torch.no_grad()
def logits(recipe: Recipe) -> torch.Tensor:
    """Of a tiny model in float64 after the recipe, all of it."""
    stored = build_weights(tiny_model(dtype=torch.float64), None, recipe, 0, SAMPLES, progress=False)
    with quantized_forward(stored.model, recipe, stored.state):
        return stored.model(tiny_tokens(), use_cache=False).logits


@pytest.mark.parametrize("family", one_in(4, FAMILIES))
def test_gptq_on_quantized_inputs_sees_inputs_and_cache_of_the_quantized_network(family: str) -> None:
    recipe = override(QUAROT, QUANTIZED_INPUTS, "test")
    stored = build_weights(tiny_model(family, dtype=torch.float64), None, recipe, 3, SAMPLES, progress=False)
    model = tiny_model(family, dtype=torch.float64)
    rotate(model, recipe.rotation, seed=3)
    running = RuntimeQuantization(
        recipe.transforms, activations=recipe.activations, keys=recipe.keys, values=recipe.values
    )
    assert_gptq_by_hand(stored, model, running, SAMPLES)


def test_gptq_on_quantized_inputs_leaves_outlier_features_as_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    add = Hessian.add
    monkeypatch.setattr(Hessian, "add", lambda self, x: seen.append(x) or add(self, x))
    recipe = Recipe(
        methods={"outliers": OutlierFeatures(features=4), "gptq": GPTQ(hessian_inputs="quantized")},
        weights=QUAROT.weights,
        activations=QuantizationScheme(bits=4),
        calibration=QUAROT.calibration,
    )
    stored = build_weights(tiny_model(), None, recipe, 0, SAMPLES, progress=False)
    split = ColumnSplit(stored.state.tensors["outliers"]["0.attention_input"], 4)
    token = seen[0][0, 0]
    normal = token[split.normal_columns]
    assert len(normal.unique()) <= 16
    assert not torch.isin(token[split.outlier_columns], normal).any()


def test_weights_made_on_quantized_inputs_depend_on_how_inputs_are_quantized() -> None:
    unclipped = {"activations": {"clip_ratio": 1.0}}
    assert run(changed(**unclipped)).weights_key == run(QUAROT).weights_key
    on_quantized = override(QUAROT, QUANTIZED_INPUTS, "test")
    assert run(on_quantized).weights_key != run(QUAROT).weights_key
    assert run(override(on_quantized, unclipped, "test")).weights_key != run(on_quantized).weights_key


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"activations": None, "keys": None, "values": None}, "needs an activations, keys or values section"),
        ({"activations": {"granularity": "tensor", "dynamic": False}}, "needs dynamic activations"),
    ],
)
def test_gptq_on_quantized_inputs_needs_inputs_that_are_quantized_then(change: dict, sentence: str) -> None:
    with pytest.raises(RecipeError, match=f"hessian_inputs 'quantized' {sentence}"):
        override(QUAROT, {**change, **QUANTIZED_INPUTS}, "test")


def test_centring_embeddings_changes_the_function_of_an_rmsnorm_model() -> None:
    """RMSNorm does not subtract the mean that centring removes: no exact rotation makes up for it."""
    with torch.no_grad():
        expected = tiny_model(dtype=torch.float64)(tiny_tokens(), use_cache=False).logits
    rotated = logits(Recipe(rotation=RotationScheme()))
    centred = logits(Recipe(rotation=RotationScheme(center_embeddings=True)))
    # measured 7e-7 and 1.6, of logits around 1: the norms of transformers work in float32, all else in float64
    assert (rotated - expected).abs().max() < 1e-5
    assert (centred - expected).abs().max() > 0.1


@pytest.mark.parametrize(
    "change",
    [
        {"activations": {"clip_ratio": 1.0}},
        {"keys": {"clip_ratio": 1.0}, "values": {"clip_ratio": 1.0}},
        {"weights": {"clip_search": False}},
        {"weights": {"clip_norm": 2.4}},
        {"rotation": {"center_embeddings": True}},
        QUANTIZED_INPUTS,
    ],
    ids=["input clip", "KV clip", "no clip search", "clip norm", "centring", "hessian inputs"],
)
def test_every_switch_has_a_key_of_its_own_and_an_effect(change: dict) -> None:
    recipe = changed(**change)
    assert run(recipe).key != run(QUAROT).key
    assert (logits(recipe) - logits(QUAROT)).abs().max() > 1e-3  # far above float64's rounding


def test_half_precision_online_transforms_change_the_logits_by_their_rounding() -> None:
    """float64 networks transform in float64, so this is seen in float32: 11 bits of mantissa, without quantizers."""
    exact = Recipe(rotation=RotationScheme())
    half = Recipe(rotation=RotationScheme(online_dtype="float16"))
    outputs = []
    for recipe in (exact, half):
        stored = build_weights(tiny_model(), None, recipe, 0, progress=False)
        with torch.no_grad(), quantized_forward(stored.model, recipe, stored.state):
            outputs.append(stored.model(tiny_tokens(), use_cache=False).logits)
    difference = (outputs[0] - outputs[1]).abs().max()
    assert 1e-5 < difference < 1e-2  # measured 1.4e-3; float32's own rounding is 1e-6
