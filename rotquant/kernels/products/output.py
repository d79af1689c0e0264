"""Output types and checks that all products share: the types that they write, and checks of what is applied to sums.

Nothing here launches.
"""

import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.launch.operators import check_tensor

#: Types of outputs, and the kernels' numbers for them.
OUTPUTS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
#: `Dtype` of kernels/include/epilogue/output.cuh.
DTYPE = dict(zip(("kFloat16", "kBfloat16", "kFloat32"), OUTPUTS.values(), strict=True))


def check_output(
    rows: int, out_features: int, dtype: torch.dtype, row_scale: Tensor | None, bias: Tensor | None
) -> None:
    """Raise one sentence unless a product [rows, out_features] can be scaled and written in a type.

    Args:
        row_scale: float32 [rows], or [1] for all.
        bias: [out_features] of `dtype`.

    Raises:
        KernelError: a tensor of another type or shape, or a type that no kernel writes.
    """
    if row_scale is not None:
        check_tensor(row_scale, "row scale", dtypes=(torch.float32,), shape=(None,))
        if row_scale.shape[0] not in (1, rows):
            raise KernelError(f"row scale has {row_scale.shape[0]} elements; {rows} rows take {rows}, or 1.")
    if dtype not in OUTPUTS:
        raise KernelError(f"the output can be float16, bfloat16 or float32, not {dtype}.")
    if bias is not None:
        check_tensor(bias, "bias", dtypes=(dtype,), shape=(out_features,))
