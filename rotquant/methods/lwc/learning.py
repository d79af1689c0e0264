"""Learnable weight clipping (OmniQuant, Shao et al. 2023, Eq. 2) without its equivalent transformation.

Block by block, the shares gamma and beta of every scale's range are trained so that the quantized block, on what the
quantized network so far feeds it, gives the outputs of the full-precision block on its own inputs (Eq. 1). The block
with its clipped weights, its rounding and their gradients are OmniQuant's (`methods.omniquant.learning`).
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from rotquant.methods.lwc import LearnedClipping
from rotquant.methods.omniquant.learning import (
    INITIAL_CLIPPING,
    Block,
    Learned,
    Parameters,
    fuse,
    quantized_parameters,
)
from rotquant.models.batches import shuffled_batches
from rotquant.models.simulation.runtime import wrap
from rotquant.models.stream import as_type
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import choose_qparams
from rotquant.training import loop
from rotquant.training.loop import GradientStep
from rotquant.weights import actions
from rotquant.weights.context import QuantizationContext, runtime_schemes
from rotquant.weights.rtn import QuantizedWeight


def initial(parameters: Parameters, linears: tuple[str, ...], scheme: QuantizationScheme) -> Learned:
    """Where training starts: 0.98 of every range, and no transformation."""
    clipping = {}
    for name in linears:
        weight = parameters[f"{name}.weight"]
        shape = choose_qparams(weight, scheme).scale.shape
        clipping[name] = tuple(weight.new_full(shape, INITIAL_CLIPPING).requires_grad_() for _ in range(2))
    return Learned({}, clipping)


def train(
    block: Block,
    parameters: Parameters,
    learned: Learned,
    inputs: Tensor,
    targets: Tensor,
    scheme: QuantizationScheme,
    settings: LearnedClipping,
    seed: int,
) -> None:
    """Train the clipping in place: AdamW without weight decay on the mean squared error of the block's output (Eq. 1).

    The block must be wrapped by its quantizers. Samples are drawn in random order, every one before any comes again.

    Args:
        block, parameters: the decoder layer and its parameters before rounding.
        inputs: what the quantized model so far feeds the block, [n, tokens, hidden].
        targets: what the full-precision model's block gives, [n, tokens, hidden].
        scheme: of the weights.
        seed: decides the order of the samples.

    Raises:
        RotquantError: the loss is not finite.
    """
    like = next(iter(parameters.values()))
    logits = [logit for pair in learned.clipping.values() for logit in pair]
    optimizer = torch.optim.AdamW(logits, lr=settings.learning_rate, weight_decay=0.0)
    batches = shuffled_batches(len(inputs), settings.batch_size, settings.steps, seed)

    def loss(batch: Tensor) -> Tensor:
        quantized = quantized_parameters(parameters, block.architecture, scheme, learned, block.rotary_dim)
        return nn.functional.mse_loss(block(quantized, inputs[batch].to(like)), targets[batch].to(like))

    not_finite = "the loss of a block of LWC is {loss} after {step} steps: lower methods.lwc.learning_rate."
    gradient = GradientStep(lambda step: [batches[step]], loss, [optimizer])
    loop.train(gradient, settings.steps, "training", noted={}, not_finite=not_finite)


def quantize_block(
    context: QuantizationContext,
    block: Block,
    clean: Tensor,
    noisy: Tensor,
    settings: LearnedClipping,
    seed: int,
    batch_size: int,
) -> tuple[dict[str, QuantizedWeight], Tensor, Tensor]:
    """Train, clip and round one block, in place.

    Args:
        context: of the model that the block belongs to, not wrapped.
        block: a decoder layer on its device.
        clean: what the full-precision model feeds it, [n, tokens, hidden].
        noisy: what the quantized model so far feeds it, of the same shape.
        seed: decides the order of the samples.
        batch_size: samples at once where nothing is trained.

    Returns:
        The integer weights by name, and what the next block is fed by the full-precision and by the quantized model.
    """
    recipe, scheme = context.recipe, context.recipe.rounded.scheme
    parameters = exact_parameters(block.layer)
    with wrap(context.model, context.online):
        targets = block.map(parameters, clean, batch_size)
    learned = initial(parameters, context.architecture.linears, scheme)
    # As in OmniQuant's code: the clipping of one weight changes the ranges of what later ones of the block read.
    quantizers = replace(context.online, scale_gradients=True, **runtime_schemes(recipe))
    with wrap(context.model, quantizers) as handle:
        for method in recipe.methods.values():
            actions.attach(method, context.model, recipe, handle)
        train(block, parameters, learned, noisy, targets, scheme, settings, seed)
        weights = fuse(block, learned, scheme)
        return weights, targets, block.map(exact_parameters(block.layer), noisy, batch_size)


def quantize_model(context: QuantizationContext, settings: LearnedClipping) -> Iterator[dict[str, QuantizedWeight]]:
    """Quantize all weights of the context's model, in place, one decoder layer at a time on the context's device.

    Yields:
        For each layer its integer weights by name; the layer holds their values.
    """
    stream = context.capture()
    clean = noisy = stream.hidden
    for index, layer in stream.layers(settings.title):
        exact = torch.promote_types(stream.hidden.dtype, torch.float32)
        block = Block(layer, context.architecture, as_type(stream.kwargs[index], exact))
        weights, clean, noisy = quantize_block(
            context, block, clean, noisy, settings, context.seed + index, stream.batch_size
        )
        yield weights


def exact_parameters(layer: nn.Module) -> dict[str, Tensor]:
    """A decoder layer's parameters by name, in at least float32, outside the graph."""
    return {
        name: parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
        for name, parameter in layer.named_parameters()
    }


def apply(settings: LearnedClipping, context: QuantizationContext) -> None:
    """Train and round block by block, along a full-precision and a quantized stream of hidden states."""
    context.keep_layers(quantize_model(context, settings))
