"""Signal-to-noise ratio of quantized tensors, by sums of squares (SpinQuant Sec. B.2). Nothing here quantizes."""

import torch
from torch import Tensor


def square_sum(x: Tensor) -> Tensor:
    """sum x^2 over all elements, a float64 scalar, added up in at least float32."""
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).double().square()


def decibel(signal: Tensor, noise: Tensor) -> Tensor:
    """10 log10(signal / noise) of sums of squares, float64; inf without noise, nan where one is not a number."""
    return 10 * torch.log10(signal.double() / noise.double())
