"""W4A4 and W4A8 products of few rows: weights stream from memory once."""

from torch import Tensor

from rotquant.errors import KernelError

#: Up to so many rows this kernel is faster than `gemm`.
MAX_ROWS = 64


def launch_gemv(
    codes: Tensor, row_scale: Tensor, weight: Tensor, column_scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Fill `out` [rows, out_features]; arguments as in `linear.w4_linear`, already checked."""
    raise KernelError("not built yet.")
