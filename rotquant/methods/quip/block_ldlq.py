"""QuIP# (Tseng et al. 2024) without its fine-tuning: incoherent weights, rounded eight at a time to a lattice codebook.

Randomized Hadamard transforms of both sides make the entries of a weight nearly Gaussian (Sec. 3), which the codebook
E8P of `rotquant.tensors.lattice` suits (Sec. 4.2); 4 bits are two of its codes. Errors of a block of eight columns are
spread over the columns to come, as GPTQ does column by column (block LDLQ, Sec. 4.1); as in the authors' code, blocks
can be rounded again with all others given. Weights alone are quantized.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rotquant.foundation.errors import RecipeError
from rotquant.methods.quip import QuIP
from rotquant.models.architectures import Architecture
from rotquant.models.limits import ModelLimits
from rotquant.recipes.recipe import Recipe
from rotquant.tensors import hadamard
from rotquant.tensors.lattice import DEVIATION, WIDTH, LatticeWeight, incoherent, refine, refined
from rotquant.weights.context import QuantizationContext
from rotquant.weights.error_feedback import round_blocks
from rotquant.weights.hessian import inverse_factor


@torch.no_grad()
def quantize_quip_site(
    weights: Sequence[Tensor], hessian: Tensor, bits: int, settings: QuIP, generator: torch.Generator
) -> list[LatticeWeight]:
    """Quantize the weights of all linear layers that read one input.

    Args:
        weights: each [out_i, in], any floating-point type, on the hessian's device.
        hessian: X^T X, [in, in], unscaled and undamped.
        bits: 2 or 4.
        settings: damping and iterations.
        generator: on the host, of the signs of the transforms.

    Raises:
        RotquantError: when the hessian is not finite, or not positive definite after damping.
    """
    columns = hadamard.random_signs(hessian.shape[0], generator, torch.int8).to(hessian.device)
    factor = inverse_factor(incoherent(hessian.double(), columns, columns), settings.damping)
    rows = [hadamard.random_signs(len(weight), generator, torch.int8).to(hessian.device) for weight in weights]
    transformed = [incoherent(weight.double(), own, columns) for weight, own in zip(weights, rows, strict=True)]
    stages = bits // 2
    scales = [(one.square().mean().sqrt() / DEVIATION[stages]).float() for one in transformed]
    target = torch.cat([one / scale.double() for one, scale in zip(transformed, scales, strict=True)])
    codes = tuned(target, block_ldlq(target, factor, stages), factor, settings.tune_iterations)
    parts = codes.split([len(weight) for weight in weights], dim=1)
    return [
        LatticeWeight(part.contiguous(), scale, own, columns.clone())
        for part, scale, own in zip(parts, scales, rows, strict=True)
    ]


def block_ldlq(weight: Tensor, factor: Tensor, stages: int) -> Tensor:
    """Codes of a weight [out, in], block by block of eight columns; each block's error is spread over those to come.

    Args:
        weight: in units of the codebook, float64.
        factor: the upper triangular U with U^T U = H^-1, [in, in]. An error E of the columns B takes
            E U_BB^-1 U_BC off the columns C after them.
        stages: codes for each eight weights.

    Returns:
        int16 [stages, out, in / 8].
    """
    weight, codes = weight.clone(), []
    bands = factor.unflatten(0, (-1, WIDTH))  # [in / 8, 8, in]
    blocks = bands.unflatten(-1, (-1, WIDTH)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    spread = torch.linalg.solve_triangular(blocks, bands, upper=True)

    def round_block(start: int, stop: int) -> Tensor:
        found, values = refine(weight[:, start:stop], stages)
        codes.append(found)
        return (weight[:, start:stop] - values).T

    round_blocks(weight.T, spread.flatten(0, 1), range(len(factor)), WIDTH, round_block, fused=False)
    return torch.stack(codes, dim=-1)


def tuned(weight: Tensor, codes: Tensor, factor: Tensor, iterations: int) -> Tensor:
    """Codes found anew, block by block: each is rounded where the output's error would be least, all others given.

    With V the rounded weight and H the damped Hessian, that is V_B + (W - V) H_:B H_BB^-1 for the columns B.

    Args:
        weight: in units of the codebook, float64 [out, in].
        codes: of block LDLQ, int16 [stages, out, in / 8].
        factor: as for `block_ldlq`.
        iterations: how often all blocks are gone through.
    """
    if not iterations:
        return codes
    codes, values = codes.clone(), refined(codes, weight.dtype).flatten(-2)
    hessian = torch.cholesky_inverse(factor, upper=True)
    for _ in range(iterations):
        for start in range(0, weight.shape[1], WIDTH):
            block = slice(start, start + WIDTH)
            pull = (weight - values) @ hessian[:, block]
            wanted = values[:, block] + torch.linalg.solve(hessian[block, block], pull.T).T
            codes[..., start // WIDTH], values[:, block] = refine(wanted, len(codes))
    return codes


def check_model(settings: QuIP, recipe: Recipe, architecture: Architecture, limits: ModelLimits) -> None:
    """Every weight has a Hadamard transform and is a whole number of codes."""
    rows = {architecture.hidden_size, architecture.intermediate_size}
    for size in {site.features for site in architecture.sites} | rows:
        if not hadamard.is_supported(size) or size % WIDTH:
            raise RecipeError(
                f"quip needs a Hadamard matrix of the order of every weight and columns in eights, and {size}, a "
                f"width of this {architecture.family} model, has none or is no multiple of {WIDTH}."
            )


def apply(settings: QuIP, context: QuantizationContext) -> None:
    """Round site by site, on inputs of layers that are rounded already; one generator draws all signs."""
    bits, generator = context.recipe.rounded.scheme.bits, torch.Generator().manual_seed(settings.seed + context.seed)
    context.round_by_site(
        settings.title, lambda weights, hessian, _: quantize_quip_site(weights, hessian, bits, settings, generator)
    )
