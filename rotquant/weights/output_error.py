"""The error of a layer's outputs by the rounding of its weights, from X^T X, and the clip ratios of least error.

AWQ, QoQ and PrefixQuant search so, each with its own way to round and its own ratios.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.devices import tensor_core_products
from rotquant.tensors.quantization import choose_qparams, fake_quantize
from rotquant.weights.grid_search import search_grid


def output_error(difference: Tensor, moment: Tensor) -> Tensor:
    """The squared norm of X dW^T of each row, from X^T X: dW [..., rows, n], moment [..., n, n] give [..., rows]."""
    return ((difference @ moment) * difference).sum(-1)


def group_moments(moment: Tensor, size: int) -> Tensor:
    """X^T X of the inputs of each group of `size` features, [groups, size, size], from that of all, [in, in].

    Zeros fill a last group of fewer features.
    """
    if missing := -len(moment) % size:
        moment = nn.functional.pad(moment, (0, missing, 0, missing))
    blocks = moment.unflatten(0, (-1, size)).unflatten(2, (-1, size))
    return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)


@torch.no_grad()
def search_ratios(
    weight: Tensor,
    moment: Tensor,
    scheme: QuantizationScheme,
    ratios: Sequence[float],
    rounded: Callable[[float], Tensor] | None = None,
) -> Tensor:
    """The clip ratio of every scale with the least error of what its elements add to the output.

    On a GPU products of float32 are its tensor cores': of ratios whose errors differ by some 1e-4 any may win there.

    Args:
        weight: [out, in], float32 or float64, columns in the order of groups. moment: X^T X in the same order.
        scheme: of granularity tensor, channel or group.
        ratios: at least one, to choose among; of equally good ones the first wins.
        rounded: the weight under a ratio, [out, in]; default, to nearest by the scheme.

    Returns:
        In the shape of the scheme's scales, [], [out, 1] or [out, groups, 1].
    """
    size = scheme.group_size or weight.shape[1]
    blocks = group_moments(moment, size)
    shape = choose_qparams(weight, scheme).scale.shape

    def error(ratio: float) -> Tensor:
        values = rounded(ratio) if rounded else fake_quantize(weight, scheme, choose_qparams(weight, scheme, ratio))
        with tensor_core_products():
            difference = nn.functional.pad(values - weight, (0, -weight.shape[1] % size))
            errors = output_error(difference.unflatten(1, (-1, size)).transpose(0, 1), blocks)  # [groups, out]
        return errors.sum() if scheme.granularity == "tensor" else errors.T.reshape(shape)

    return search_grid(ratios, error)[0]
