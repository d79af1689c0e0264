"""WUSH's matrices (Chen et al. 2025, and the order of its authors' code), from second moments of inputs and weights.

For a block of features let A be the inputs' second moment given the features before it, A = C^T C, and W [out, block]
the weights. With the singular values C W^T = V S U^T, inputs become x M, M = C^-1 V S^1/2 H, with a Hadamard matrix H,
and weights W M^-T. Then both have the second moment H^T S H, whose diagonal is constant.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rotquant.methods.wush import WUSH
from rotquant.models.architectures import Architecture, decoder_layers, linear_of
from rotquant.models.rotation.fusing import fuse_inverse
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.models.stream import on_device
from rotquant.models.transforms import Chain, of_layer
from rotquant.tensors.hadamard import hadamard_matrix
from rotquant.weights.context import QuantizationContext
from rotquant.weights.hessian import Hessian, inverse_factor


@torch.no_grad()
def block_matrices(moment: Tensor, weight: Tensor, settings: WUSH) -> Tensor:
    """M of every block, float64 [features / block, block, block].

    Args:
        moment: E[x x^T] of the inputs, [features, features]. weight: [out, features], of all that read them.

    Raises:
        RotquantError: the moment is not finite, or not positive definite after damping.
    """
    # With features in reverse order the factor of the inverse is that of the moment itself, inverted: the blocks on its
    # diagonal are C^-1 of each block given those before.
    inverses = inverse_factor(moment.flip(0, 1), settings.damping).flip(0, 1).mT
    block = settings.block
    count = len(moment) // block
    inverse = (
        inverses.unflatten(0, (count, block)).unflatten(-1, (count, block)).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    )
    rows = weight.double().unflatten(1, (count, block)).permute(1, 2, 0)  # W^T of each block
    left, values, _ = torch.linalg.svd(torch.linalg.solve(inverse, rows), full_matrices=False)
    left = torch.where(left.sum(-2, keepdim=True) < 0, -left, left)  # whose signs are the machine's choice
    values = values / len(weight) ** 0.5
    values = values + settings.spectrum_damping * values.mean(-1, keepdim=True)
    hadamard = hadamard_matrix(block, dtype=torch.float64, device=moment.device) / block**0.5
    return (inverse @ left * values.sqrt().unsqueeze(-2)) @ hadamard


def apply(settings: WUSH, context: QuantizationContext) -> None:
    """The matrices of all sites of the model as it is now, then their inverses into the weights."""
    sites = context.architecture.sites
    found: dict[str, list[Tensor]] = {site.name: [] for site in sites}
    with wrap(context.model, context.online):
        stream = context.capture()
        for index, layer, site in stream.sites_of_layers(settings.title):
            hessian = Hessian(site.features, context.device, torch.promote_types(stream.hidden.dtype, torch.float32))
            stream.feed(index, site, hessian.add)
            weight = torch.cat([linear_of(layer, name).weight.detach() for name in site.linears])
            matrices = block_matrices(hessian.matrix.double() / hessian.tokens, weight, settings)
            found[site.name].append(matrices.to(hessian.matrix.dtype).cpu())
    context.tensors.update({name: torch.stack(layers) for name, layers in found.items()})
    for index, layer in enumerate(decoder_layers(context.model)):
        tensors = of_layer(context.tensors, index)
        with on_device(layer, context.device):
            for site in sites:
                fuse_inverse(layer, site, Chain([settings.transform_at(site.name)], tensors))
    context.online = runtime(settings, context.online, context.tensors)


def tensors(settings: WUSH, architecture: Architecture) -> Mapping[str, tuple[int, ...]]:
    """The matrices of every site, [layers, blocks, block, block]."""
    layers, block = architecture.num_layers, settings.block
    return {site.name: (layers, site.features // block, block, block) for site in architecture.sites}


def runtime(settings: WUSH, quantization: RuntimeQuantization, tensors: Mapping[str, Tensor]) -> RuntimeQuantization:
    """Every site's input is transformed."""
    found = [settings.transform_at(name) for name in tensors]  # pyright: ignore[reportArgumentType]
    return quantization.with_transforms(found, tensors)
