"""WUSH: inputs and weights have equal second moments behind its matrices, and the network stays what it was."""

from pathlib import Path

import pytest
import torch

from rotquant.foundation.errors import RecipeError
from rotquant.methods.wush import WUSH
from rotquant.methods.wush.second_moments import block_matrices
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, check_widths, override
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.storage import load_quantized, save_quantized
from tests.helpers.bounds import FLOAT64_BOUND
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import tiny_model, tiny_tokens


def test_inputs_given_those_before_and_weights_have_equal_second_moments() -> None:
    """The slow reference: Schur complements of the damped moment by an explicit inverse."""
    features, block, rows = 48, 16, 40
    x = torch.randn(300, features, dtype=torch.float64) @ torch.randn(features, features, dtype=torch.float64)
    weight, settings = torch.randn(rows, features, dtype=torch.float64), WUSH(spectrum_damping=0.0)
    moment = x.T @ x / len(x)
    matrices = block_matrices(moment, weight, settings)
    damped = moment + settings.damping * moment.diagonal().mean() * torch.eye(features, dtype=torch.float64)
    for number, matrix in enumerate(matrices):
        own, before = slice(number * block, (number + 1) * block), slice(0, number * block)
        given = damped[own, before] @ torch.linalg.inv(damped[before, before]) @ damped[before, own]
        inputs = matrix.T @ (damped[own, own] - given) @ matrix
        seen = weight[:, own] @ torch.linalg.inv(matrix).T
        torch.testing.assert_close(inputs, seen.T @ seen / rows, rtol=1e-8, atol=1e-8)  # of float64 products
        torch.testing.assert_close(inputs.diagonal(), inputs.diagonal().mean().expand(block), rtol=1e-8, atol=1e-8)


def test_the_network_stays_what_it_was() -> None:
    recipe = Recipe.model_validate({"methods": {"wush": {"block": 8}}, "calibration": {}})
    model = tiny_model(dtype=torch.float64)
    with torch.no_grad():
        expected = model(tiny_tokens()).logits
        built = build_weights(model, tiny_tokenizer(), recipe, 0, tiny_tokens(4, 16, seed=1), progress=False)
        with quantized_forward(model, recipe, built.state):
            found = model(tiny_tokens()).logits
    # its inverses are of matrices with condition numbers of some hundreds
    torch.testing.assert_close(found, expected, rtol=0, atol=1e3 * FLOAT64_BOUND)


def test_a_stored_model_is_the_made_one(tmp_path: Path) -> None:
    recipe, model = preset("wush"), tiny_model()
    built = build_weights(model, tiny_tokenizer(), recipe, 0, tiny_tokens(4, 16, seed=1), progress=False)
    save_quantized(tmp_path, built)
    loaded, _, state = load_quantized(tmp_path)
    with torch.no_grad(), quantized_forward(model, recipe, built.state), quantized_forward(loaded, recipe, state):
        assert torch.equal(model(tiny_tokens()).logits, loaded(tiny_tokens()).logits)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"set rotation\.inputs to none"):
        override(preset("mr-gptq"), {"methods": {"wush": {}}}, "test")
    with pytest.raises(RecipeError, match="blocks of 16 do not divide the 40 features of mlp_output"):
        check_widths(preset("wush"), {"mlp_output": 40})
    with pytest.raises(RecipeError, match="no Hadamard matrix of size 6"):
        check_widths(override(preset("wush"), {"methods": {"wush": {"block": 6}}}, "test"), {"mlp_output": 48})
