"""Scales of weights by the error of a layer's outputs: the grid search of AWQ and PrefixQuant, from X^T X."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import QParams, choose_qparams, fake_quantize, grouped


@torch.no_grad()
def qparams_for_outputs(
    weight: Tensor, hessian: Tensor, scheme: QuantizationScheme, ratios: Sequence[float]
) -> QParams:
    """Scales of a weight under the clip ratios by which X W^T changes least, in squares.

    With granularity `group` each group is judged by its own part of the output, the sum over its features alone.

    Args:
        weight: [out, in], float32 or float64.
        hessian: X^T X, [in, in], of the same type.
        ratios: at least one, to choose among; of equally good ones the first wins.
    """
    best = least = None
    blocks = _diagonal_blocks(hessian, scheme)
    for ratio in ratios:
        rounded = fake_quantize(weight, scheme, choose_qparams(weight, scheme, ratio))
        cost = _cost(rounded.sub_(weight), blocks, scheme)
        if best is None or least is None:
            best, least = torch.full_like(cost, ratio), cost
        best, least = torch.where(cost < least, ratio, best), torch.minimum(cost, least)
    return choose_qparams(weight, scheme, best)


def _cost(error: Tensor, blocks: Tensor, scheme: QuantizationScheme) -> Tensor:
    """tr(E H E^T) in parts, one for each scale, of an error E [out, in]."""
    if scheme.granularity != "group":
        cost = ((error @ blocks) * error).sum(-1, keepdim=True)
        return cost.sum() if scheme.granularity == "tensor" else cost
    parts = grouped(error, scheme)
    return (torch.einsum("ogi,gij->ogj", parts, blocks) * parts).sum(-1, keepdim=True)


def _diagonal_blocks(hessian: Tensor, scheme: QuantizationScheme) -> Tensor:
    """For groups the blocks of X^T X on its diagonal, [groups, size, size]; else itself."""
    size = scheme.group_size
    if scheme.granularity != "group" or size is None:
        return hessian
    return torch.stack([hessian[start : start + size, start : start + size] for start in range(0, len(hessian), size)])
