"""Distortion of a tensor by quantization, as numbers: relative squared error and kurtosis.

SpinQuant measures outliers by the kurtosis (Sec. 2.1); RCP takes the excess kurtosis of groups of weights (Eq. 2). Pure
functions of tensors; nothing here quantizes or knows a model.
"""

from torch import Tensor

from rotquant.tensors.quantization import square_sum


def relative_error(exact: Tensor, rounded: Tensor) -> float:
    """sum (rounded - exact)^2 / sum exact^2, of two tensors of one shape."""
    return (square_sum(rounded - exact) / square_sum(exact)).item()


def kurtosis(x: Tensor) -> float:
    """E (x - E x)^4 / (E (x - E x)^2)^2 over all elements: 3 for a normal distribution, more for heavier tails."""
    return _fourth_moment(x.flatten()).item()


def excess_kurtosis(x: Tensor) -> Tensor:
    """E (x - E x)^4 / (E (x - E x)^2)^2 - 3 over the last axis (RCP Eq. 2): [..., n] gives [...] in float64.

    Moments of the n numbers as they are, without a correction for their being few: n normal numbers have -6 / (n + 1)
    on average, and no n numbers more than n - 5 + 1 / (n - 1). Equal numbers have none, nan.
    """
    return _fourth_moment(x) - 3


def _fourth_moment(x: Tensor) -> Tensor:
    """Fourth moment of the numbers of the last axis less their mean, over their variance squared; float64."""
    centred = x.double() - x.double().mean(-1, keepdim=True)
    square = centred.square()
    return square.square().mean(-1) / square.mean(-1).square()
