"""Small models whose weights are built by a recipe."""

from pathlib import Path

import torch
from torch import nn

from rotquant.methods.gptq import GPTQ
from rotquant.methods.gptq.columns import quantize_gptq
from rotquant.methods.omniquant import OmniQuant
from rotquant.methods.outliers import OutlierFeatures
from rotquant.methods.smoothquant import SmoothQuant
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import Calibration, QuantizationScheme, RotationScheme, WeightQuantization
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.context import QuantizationContext
from rotquant.weights.hessian import Hessian
from rotquant.weights.packing import Weight
from rotquant.weights.storage import StoredModel, load_quantized, save_quantized
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import tiny_model, tiny_tokens

CHANNEL = QuantizationScheme(bits=4, granularity="channel")


GROUPS = QuantizationScheme(bits=4, granularity="group", group_size=8)


INPUTS = QuantizationScheme(bits=4, clip_ratio=0.9)


CACHE = QuantizationScheme(bits=4, symmetric=False, granularity="head")


CALIBRATION = Calibration(samples=6, sequence_length=24)


SAMPLES = tiny_tokens(batch=6, tokens=24, seed=5)


def weights_by_layer(context: QuantizationContext) -> list[dict[str, Weight]]:
    """The integers that a method left in its context, by the name of the linear layer, for each decoder layer."""
    names, layers = context.architecture.linears, range(context.architecture.num_layers)
    return [{name: context.weights[f"model.layers.{index}.{name}.weight"] for name in names} for index in layers]


def weights(scheme: QuantizationScheme = CHANNEL, **options: object) -> WeightQuantization:
    return WeightQuantization(scheme=scheme, **options)


BY_GPTQ = {"gptq": GPTQ()}


ROTATED_GPTQ = Recipe(
    rotation=RotationScheme(),
    methods=BY_GPTQ,
    weights=weights(),
    activations=INPUTS,
    keys=CACHE,
    values=CACHE,
    calibration=CALIBRATION,
)


RECIPES = {
    "rotation": Recipe(rotation=RotationScheme()),
    "rtn": Recipe(weights=weights(), activations=INPUTS, keys=CACHE, values=CACHE),
    "rtn-8-bit": Recipe(weights=weights(QuantizationScheme(bits=8, granularity="channel"))),
    "asymmetric-3-bit": Recipe(
        rotation=RotationScheme(),
        methods=BY_GPTQ,
        weights=weights(QuantizationScheme(bits=3, granularity="group", group_size=16, symmetric=False)),
        calibration=CALIBRATION,
    ),
    "per-tensor": Recipe(weights=weights(QuantizationScheme(bits=4, granularity="tensor"))),
    "quarot": ROTATED_GPTQ,
    "act-order": Recipe(methods={"gptq": GPTQ(act_order=True)}, weights=weights(GROUPS), calibration=CALIBRATION),
    "smoothquant": Recipe(
        methods={"smoothquant": SmoothQuant()}, weights=weights(), activations=INPUTS, calibration=CALIBRATION
    ),
    "omniquant": Recipe(
        methods={"omniquant": OmniQuant(steps=3)},
        weights=weights(clip_search=False),
        activations=INPUTS,
        calibration=CALIBRATION,
    ),
    "quik": Recipe(
        methods={"outliers": OutlierFeatures(features=5), **BY_GPTQ},
        weights=weights(),
        activations=INPUTS,
        calibration=CALIBRATION,
    ),
    "atom": Recipe(
        methods={"outliers": OutlierFeatures(features=8, bits=8, statistic="square"), **BY_GPTQ},
        weights=weights(GROUPS),
        activations=QuantizationScheme(bits=4, granularity="group", group_size=8),
        keys=CACHE,
        values=CACHE,
        calibration=CALIBRATION,
    ),
    "static": Recipe(
        rotation=RotationScheme(),
        weights=weights(),
        activations=QuantizationScheme(bits=8, granularity="tensor", dynamic=False, clip_ratio=0.9),
        calibration=CALIBRATION,
    ),
    "static-cache": Recipe(
        rotation=RotationScheme(),
        weights=weights(),
        keys=QuantizationScheme(bits=4, granularity="head", dynamic=False),
        values=QuantizationScheme(bits=8, granularity="tensor", dynamic=False),
        calibration=CALIBRATION,
    ),
}


def build(recipe: Recipe, family: str = "llama", seed: int = 3, **model: object):
    return build_weights(tiny_model(family, **model), tiny_tokenizer(), recipe, seed, SAMPLES, progress=False)


def assert_gptq_by_hand(
    stored: StoredModel, model: nn.Module, running: RuntimeQuantization, samples: torch.Tensor
) -> None:
    """The whole stage, done by hand: ordinary forward passes of the network, one linear layer at a time, no stream.

    model: float64, rotated, weights as they were; running: what acts on the inputs that GPTQ sees.
    """
    recipe = stored.manifest.recipe
    with wrap(model, running), torch.no_grad():
        for index, layer in enumerate(decoder_layers(model)):
            for site in architecture_of(model).sites:
                linears = [layer.get_submodule(name) for name in site.linears]
                hessian = Hessian(site.features, dtype=torch.float64)
                hook = linears[0].register_forward_pre_hook(lambda _, x, hessian=hessian: hessian.add(x[0]))
                model(samples, use_cache=False)
                hook.remove()
                for name, linear in zip(site.linears, linears, strict=True):
                    quantized = quantize_gptq(linear.weight, hessian.matrix, recipe.rounded, GPTQ.of(recipe))
                    linear.weight.copy_(quantized.dequantize(torch.float64))
                    # float64: sums in another order differ by 1e-15, no weight lies that close to a tie
                    assert torch.equal(stored.weights[f"model.layers.{index}.{name}.weight"].codes, quantized.codes)


def check_loaded_is_stored(stored: StoredModel, recipe: Recipe, tokens: torch.Tensor, folder: Path) -> None:
    """Save a quantized model and load it again: both give the same logits, which differ without its quantizers."""
    save_quantized(folder, stored)
    loaded, _, state = load_quantized(folder)
    with quantized_forward(stored.model, recipe, stored.state):
        expected = stored.model(tokens, use_cache=False).logits
    with quantized_forward(loaded, recipe, state):
        assert torch.equal(loaded(tokens, use_cache=False).logits, expected)
    assert not torch.allclose(loaded(tokens, use_cache=False).logits, expected)
