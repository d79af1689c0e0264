"""OmniQuant's hooks, and where its training starts (Shao et al. 2023); `weights.reconstruction` trains and rounds."""

import torch
from torch import nn

from rotquant.methods.omniquant import OmniQuant
from rotquant.models.architectures import Architecture
from rotquant.models.equivalent import key_scales, per_kv_head, smoothing_scale
from rotquant.models.simulation.queries import quantized_queries
from rotquant.models.simulation.runtime import Handle
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.transforms import at_site
from rotquant.weights.context import QuantizationContext
from rotquant.weights.reconstruction import (
    SMALLEST_SCALE,
    DecoderBlock,
    LearnedTransformation,
    Parameters,
    initial_clipping,
    quantize_blocks,
)


def initial(
    parameters: Parameters, architecture: Architecture, maxima: Parameters, recipe: Recipe, rotary_dim: int
) -> LearnedTransformation:
    """Where training starts: LET at SmoothQuant's scales (ones between queries and keys), LWC at 0.98 of the range.

    Between v_proj and o_proj a scale is shared by the query heads of one kv head; it is left out where an online
    transform across heads stands between the two (QuaRot stage 1c), which does not commute with it. Where linear layers
    read the residual stream as it is (OLMo2) no norm can take a scale.

    Args:
        parameters: of one decoder layer, by name.
        maxima: max |x| per feature by site name, of the full-precision block.
        recipe: its method, `weights` and `rotation`.
    """
    scales = {}
    for site in architecture.sites:
        weights = torch.stack([parameters[f"{name}.weight"].abs().amax(dim=0) for name in site.linears]).amax(dim=0)
        activations = maxima[site.name].to(weights)
        if site.name == "attention_output":
            if at_site(recipe.transforms, site.name):
                continue
            weights, activations = per_kv_head(weights, architecture), per_kv_head(activations, architecture)
        elif site.norm is None:
            continue
        name = "value" if site.name == "attention_output" else site.name
        scales[name] = smoothing_scale(activations, weights, OmniQuant.of(recipe).smoothing_alpha)
    like = parameters[f"{architecture.attention_output}.weight"]
    scales["query_key"] = like.new_ones(key_scales(architecture), architecture.head_dim - rotary_dim // 2)
    scales = {name: scale.clamp(min=SMALLEST_SCALE).requires_grad_() for name, scale in scales.items()}
    return LearnedTransformation(scales, initial_clipping(parameters, architecture.linears, recipe.rounded.scheme))


def apply(settings: OmniQuant, context: QuantizationContext) -> None:
    """Train and round block by block, along a full-precision and a quantized stream of hidden states."""

    def start(block: DecoderBlock, parameters: Parameters, maxima: Parameters) -> LearnedTransformation:
        return initial(parameters, block.architecture, maxima, context.recipe, block.rotary_dim)

    context.keep_layers(quantize_blocks(context, settings, start))


def attach(settings: OmniQuant, model: nn.Module, recipe: Recipe, handle: Handle) -> None:
    """Queries are quantized where keys are."""
    if settings.queries and recipe.keys is not None:
        handle.add(quantized_queries(model, recipe.keys))
