"""Learnable weight clipping alone: it lowers a block's error, and the weights are clipped by what it learned."""

from typing import Any

import pytest
import torch

from rotquant.foundation.errors import RecipeError, RotquantError
from rotquant.methods.lwc import LearnedClipping
from rotquant.models.architectures import architecture_of
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.models.stream import capture_layer_inputs
from rotquant.recipes.recipe import Recipe, parse_recipe
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import quantize
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.reconstruction import (
    DecoderBlock,
    LearnedTransformation,
    clipped_qparams,
    exact_parameters,
    fuse,
    initial_clipping,
    quantized_parameters,
    train,
)
from tests.helpers.cases import one_in
from tests.helpers.models import FAMILIES, outlier_model, tiny_model, tiny_tokens

WEIGHTS = QuantizationScheme(bits=3, symmetric=False, granularity="channel")
INPUTS = QuantizationScheme(bits=4, symmetric=False, granularity="token")


def recipe(sections: dict[str, Any] | None = None, **settings: Any) -> Recipe:
    """A recipe with the method and further sections."""
    lwc = {"steps": 24, "batch_size": 2, "learning_rate": 0.1, **settings}
    data: dict[str, Any] = {
        "weights": {"scheme": WEIGHTS.model_dump(), "clip_search": False},
        "activations": INPUTS.model_dump(),
        "keys": {"bits": 4, "symmetric": False, "granularity": "head"},
        "calibration": {"samples": 4, "sequence_length": 24},
        **(sections or {}),
    }
    methods = {"lwc": lwc, **data.pop("methods", {})}
    return parse_recipe({**data, "methods": methods}, "the test")


def first_block(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[DecoderBlock, torch.Tensor]:
    """The first decoder layer and what it is fed."""
    stream = capture_layer_inputs(model, tokens)
    return DecoderBlock(stream.modules[0], architecture_of(model), stream.kwargs[0]), stream.hidden


@torch.no_grad()
def error(block: DecoderBlock, learned: LearnedTransformation, hidden: torch.Tensor, targets: torch.Tensor) -> float:
    """Of the output of the block with clipped and rounded weights."""
    parameters = exact_parameters(block.layer, block.architecture)
    rounded = quantized_parameters(parameters, block.architecture, WEIGHTS, learned, block.rotary_dim)
    return float((block.map(rounded, hidden, 8) - targets).square().mean())


def test_training_lowers_the_error_of_the_blocks_output() -> None:
    """By a tenth and more from where it starts; the mean over seeds was a third."""
    shares = []
    for seed in range(3):
        model = outlier_model(seed=seed)
        block, hidden = first_block(model, tiny_tokens(8, seed=seed))
        parameters = exact_parameters(block.layer, block.architecture)
        targets = block.map(parameters, hidden, 8)
        learned = LearnedTransformation({}, initial_clipping(parameters, block.architecture.linears, WEIGHTS))
        settings = LearnedClipping(steps=60, batch_size=4, learning_rate=0.1)

        with wrap(model, RuntimeQuantization(activations=INPUTS, scale_gradients=True)):
            before = error(block, learned, hidden, targets)
            train(block, parameters, learned, hidden, targets, WEIGHTS, settings, seed)
            shares.append(error(block, learned, hidden, targets) / before)
    assert sum(shares) / 3 < 0.9, shares


def test_the_weights_are_those_that_were_clipped_by_what_was_learned() -> None:
    model = outlier_model()
    block, hidden = first_block(model, tiny_tokens(8))
    parameters = {name: value.clone() for name, value in exact_parameters(block.layer, block.architecture).items()}
    learned = LearnedTransformation({}, initial_clipping(parameters, block.architecture.linears, WEIGHTS))
    settings = LearnedClipping(steps=24, batch_size=4, learning_rate=0.1)
    train(block, parameters, learned, hidden, block.map(parameters, hidden, 8), WEIGHTS, settings, 0)
    found = fuse(block, learned, WEIGHTS)
    for name, (upper, lower) in learned.clipping.items():
        weight = parameters[f"{name}.weight"]
        assert torch.equal(found[name].codes, quantize(weight, clipped_qparams(weight, WEIGHTS, upper, lower), WEIGHTS))
        assert (torch.sigmoid(upper) < 0.9).any()  # from 0.98


@torch.no_grad()
@pytest.mark.parametrize("family", one_in(2, FAMILIES))
def test_it_works_on_weights_that_a_transformation_turned(family: str) -> None:
    """With queries and online transforms in the network that it trains; every family's parameters have their places."""
    tokens = tiny_tokens(4)
    exact = tiny_model(family)(tokens, use_cache=False).logits
    errors = {}
    for name, lwc in (("rounded", {"lwc": None}), ("learned", {})):
        chosen = recipe({"methods": {"duquant": {"block_size": 32, "search_steps": 16}, **lwc}}, steps=40)
        stored = build_weights(tiny_model(family), None, chosen, 0, tokens, progress=False)
        with quantized_forward(stored.model, chosen, stored.state):
            errors[name] = float((stored.model(tokens, use_cache=False).logits - exact).square().mean())
    assert errors["learned"] < errors["rounded"], errors


def test_equal_seeds_learn_equal_weights() -> None:
    codes = []
    for seed in (0, 0, 1):
        stored = build_weights(tiny_model(), None, recipe(steps=6), seed, tiny_tokens(4), progress=False)
        codes.append(torch.cat([weight.codes.flatten() for weight in stored.weights.values()]))  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[0], codes[2])


def test_what_does_not_fit_is_refused_in_one_sentence() -> None:
    with pytest.raises(RecipeError, match=r"lwc rounds weights in its own way: set weights\.clip_search to false"):
        recipe({"weights": {"scheme": WEIGHTS.model_dump()}})
    static = {"bits": 4, "granularity": "tensor", "dynamic": False}
    with pytest.raises(RecipeError, match="lwc needs dynamic activations"):
        recipe({"activations": static})
    with pytest.raises(RecipeError, match="lwc cannot be combined with outliers"):
        recipe({"methods": {"outliers": {"features": 4}}})


def test_a_loss_that_is_not_finite_is_reported() -> None:
    model = tiny_model()
    block, hidden = first_block(model, tiny_tokens(4))
    parameters = exact_parameters(block.layer, block.architecture)
    learned = LearnedTransformation({}, initial_clipping(parameters, block.architecture.linears, WEIGHTS))
    training = LearnedClipping(steps=2)
    with pytest.raises(RotquantError, match=r"a block of LWC is nan after 0 steps: lower methods\.lwc\.learning_rate"):
        train(block, parameters, learned, hidden, hidden * torch.nan, WEIGHTS, training, 0)
