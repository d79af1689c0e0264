"""Learnable weight clipping (OmniQuant, Shao et al. 2023, Eq. 2) without its equivalent transformation.

Block by block, the shares gamma and beta of every scale's range are trained so that the quantized block, on what the
quantized network so far feeds it, gives the outputs of the full-precision block on its own inputs (Eq. 1). All of it is
OmniQuant's (`methods.omniquant.block_reconstruction`), with nothing but clipping to learn.
"""

from rotquant.methods.lwc import LearnedClipping
from rotquant.methods.omniquant.block_reconstruction import (
    DecoderBlock,
    LearnedTransformation,
    Parameters,
    initial_clipping,
    quantize_blocks,
)
from rotquant.weights.context import QuantizationContext


def apply(settings: LearnedClipping, context: QuantizationContext) -> None:
    """Train and round block by block, along a full-precision and a quantized stream of hidden states."""
    linears, scheme = context.architecture.linears, context.recipe.rounded.scheme

    def start(_block: DecoderBlock, parameters: Parameters, _maxima: Parameters) -> LearnedTransformation:
        return LearnedTransformation({}, initial_clipping(parameters, linears, scheme))

    context.keep_layers(quantize_blocks(context, settings, start))
