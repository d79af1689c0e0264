"""Learnable weight clipping (OmniQuant, Shao et al. 2023, Eq. 2) without its equivalent transformation.

Block by block, the shares gamma and beta of every scale's range are trained so that the quantized block, on what the
quantized network so far feeds it, gives the outputs of the full-precision block on its own inputs (Eq. 1). All of it is
OmniQuant's (`methods.omniquant.block_reconstruction`), with nothing but clipping to learn.
"""

from collections.abc import Iterator

from rotquant.methods.lwc import LearnedClipping
from rotquant.methods.omniquant.block_reconstruction import (
    BlockTraining,
    LearnedTransformation,
    initial_clipping,
    quantize_blocks,
)
from rotquant.weights.context import QuantizationContext
from rotquant.weights.rtn import QuantizedWeight


def training_of(settings: LearnedClipping) -> BlockTraining:
    """How blocks are trained."""
    return BlockTraining(
        settings.title,
        settings.steps,
        settings.batch_size,
        clipping_lr=settings.learning_rate,
        transformation_lr=settings.learning_rate,
        remedy="methods.lwc.learning_rate",
    )


def quantize_model(context: QuantizationContext, settings: LearnedClipping) -> Iterator[dict[str, QuantizedWeight]]:
    """Quantize all weights of the context's model, in place; for each layer its integer weights by name."""
    linears, scheme = context.architecture.linears, context.recipe.rounded.scheme
    return quantize_blocks(
        context,
        training_of(settings),
        lambda _block, parameters, _maxima: LearnedTransformation({}, initial_clipping(parameters, linears, scheme)),
    )


def apply(settings: LearnedClipping, context: QuantizationContext) -> None:
    """Train and round block by block, along a full-precision and a quantized stream of hidden states."""
    context.keep_layers(quantize_model(context, settings))
