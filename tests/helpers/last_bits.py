"""Arithmetic whose last bits are others than this machine's, as every machine's are."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

#: What processors, libraries and numbers of threads compute differently: sums, and functions by polynomials.
INEXACT = {
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten.sum,
    aten.mean,
    aten.var,
    aten.linalg_vector_norm,
    aten._softmax,
    aten._log_softmax,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten.exp,
    aten.silu,
    aten.rsqrt,
    aten.sin,
    aten.cos,
    aten.linalg_cholesky_ex,
    aten.linalg_solve_triangular,
    aten.cholesky_inverse,
}
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


class FlippedLastBits(TorchDispatchMode):
    """While open, the results of `INEXACT` operators on a CPU differ in their last bit from what torch computes.

    Equal operands still give equal results. What every machine computes alike stays: products of matrices without a
    sum in them, and results whose last eight bits are zeros, such as a sum of small whole numbers.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Called by torch for each of its operators; those of this project consist of others, which it then sees."""
        tensors = [argument for argument in args if isinstance(argument, Tensor)]
        if func.namespace == "rotquant" and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        outer = func.overloadpacket in (aten.mm, aten.bmm) and args[0].shape[-1] == 1
        if (func.overloadpacket in INEXACT and not outer) or func.namespace == "mkldnn":
            for tensor in result if isinstance(result, tuple) else (result,):
                _flip(tensor)
        return result


def _flip(tensor: Tensor) -> None:
    if tensor.device.type == "cpu" and tensor.dtype in _INTEGERS:
        bits = tensor.view(_INTEGERS[tensor.dtype])
        bits.bitwise_xor_((bits & 0xFF != 0).to(bits.dtype))
