"""W4A4 and W4A8 products of many rows on tensor cores."""

from torch import Tensor

from rotquant.errors import KernelError


def launch_gemm(
    codes: Tensor, row_scale: Tensor, weight: Tensor, column_scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Fill `out` [rows, out_features]; arguments as in `linear.w4_linear`, already checked."""
    raise KernelError("not built yet.")
