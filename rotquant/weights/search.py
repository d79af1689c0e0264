"""Grid searches: of candidates the one of least error, and of clip ratios those of least error of a layer's outputs.

AWQ, QoQ and PrefixQuant search so, each with its own way to round and its own ratios.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.devices import tensor_core_products
from rotquant.tensors.quantization import choose_qparams, fake_quantize

Candidate = TypeVar("Candidate", float, Tensor)


@torch.no_grad()
def search_grid(
    candidates: Iterable[Candidate],
    error: Callable[[Candidate], Tensor],
    start: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The candidates of least error and these errors, each element by itself.

    Args:
        candidates: numbers, or tensors that broadcast with the errors; of equally good ones the first wins.
        error: of a candidate, of any shape.
        start: what another search found, which wins unless a candidate is better; else there is a candidate.

    Raises:
        ValueError: there is neither.
    """
    best, least = start or (None, None)
    for candidate in candidates:
        found = error(candidate)
        if best is None or least is None:
            best, least = torch.zeros_like(found) + candidate, torch.full_like(found, torch.inf)
        best, least = torch.where(found < least, candidate, best), torch.minimum(found, least)
    if best is None or least is None:
        raise ValueError("a search needs at least one candidate")
    return best, least


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
