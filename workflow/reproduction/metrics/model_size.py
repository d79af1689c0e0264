"""The size of a model: its parameters, and its bits where some weights are quantized (RCP Figure 1)."""

from typing import TYPE_CHECKING

from rotquant.models.architectures import architecture_of, decoder_layers, linear_of
from rotquant.recipes.schemes import UNQUANTIZED_BITS, WeightQuantization

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_size(model: "PreTrainedModel", weights: WeightQuantization | None) -> dict[str, float]:
    """Count a checkpoint's parameters, shared ones once, and the bits that they take.

    Args:
        weights: how the weights of all linear layers but lm_head are quantized; None for not at all.

    Returns:
        `megabits` and `parameters`, both in millions. Scales, zero points and tables of levels are not counted.
    """
    architecture = architecture_of(model)
    names = [name for site in architecture.sites for name in site.linears]
    linear = sum(linear_of(layer, name).weight.numel() for layer in decoder_layers(model) for name in names)
    every = sum(parameter.numel() for parameter in model.parameters())
    bits = UNQUANTIZED_BITS if weights is None else weights.scheme.bits
    return {"megabits": (linear * bits + (every - linear) * UNQUANTIZED_BITS) / 1e6, "parameters": every / 1e6}
