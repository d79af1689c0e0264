"""Rows after a Hadamard transform as floats of low bits, and RMSNorm, transform and quantization in one kernel.

The formats are FP8, MXFP4 and NVFP4; codes and scales follow `tensors.quantization` and `tensors.fp4`. A norm stands
before the transform where no rotation is fused: in families with norms after blocks, inputs of q, k, v, gate and up are
normed, transformed online and quantized.

Common to the operators: x is [rows, n], float16, bfloat16 or float32, on a GPU contiguous. Rows are padded with zeros
to a multiple of 64, and neither the normed nor the transformed row is written to memory. Operators to integers return
what those of `activations` return, the others what `layouts.codes.RowFloats` describes. All raise `KernelError` for
anything else.
"""

from torch import Tensor
from torch.nn.functional import pad

from rotquant.kernels.arguments import TYPES
from rotquant.kernels.hadamard.launch import RowNorm, launch_transform
from rotquant.kernels.hadamard.operator import check_heads, transform_reference
from rotquant.kernels.launch.operators import check_tensor, operator
from rotquant.kernels.layouts.codes import FloatRounding, Rounding, RowCodes, RowFloats, pack_pairs
from rotquant.kernels.layouts.weights import K_BLOCK, padded
from rotquant.kernels.rows.activations import codes_room, norm_reference, quantize_reference
from rotquant.kernels.rows.elementwise import check_norm, gated
from rotquant.tensors import fp4
from rotquant.tensors.quantization import choose_qparams, quantize


def float_reference(x: Tensor, rounding: FloatRounding) -> tuple[Tensor, Tensor]:
    """Quantize x [rows, n] as it is: codes and scales as `RowFloats` has them."""
    scheme, columns = rounding.scheme, padded(x.shape[1], K_BLOCK)
    x = pad(x, (0, columns - x.shape[1]))
    qparams = choose_qparams(x, scheme, global_scale=rounding.global_scale)
    codes = quantize(x, qparams, scheme)
    if rounding.format == "FP8":
        return codes, qparams.scale.flatten()
    return pack_pairs(codes), fp4.pack_scales(qparams.scale, qparams.global_scale).squeeze(-1)


def _float_room(x: Tensor, rounding: FloatRounding, *, gated: bool = False) -> tuple[Tensor, Tensor]:
    room = RowFloats.empty(x, rounding, gated=gated)
    return room.codes, room.scale


def _hadamard_reference(
    x: Tensor, heads: int, half: bool, swiglu: bool, rounding: FloatRounding
) -> tuple[Tensor, Tensor]:
    """The Hadamard transform of x [rows, n], or with `swiglu` of silu(gate) * up, x being (gate | up) [rows, 2n].

    heads: 0 for the whole row, or a number of heads to mix; half: float16 arithmetic. The transformed row stays
    float32. A kernel's sums, in another order, move few codes to a neighbour; and where they move a group's largest
    value across the border of two scales, few groups.
    """
    rounding.check(x)
    return float_reference(transform_reference(gated(x) if swiglu else x, heads, False, half), rounding)


def _hadamard_cuda(x: Tensor, heads: int, half: bool, swiglu: bool, rounding: FloatRounding) -> tuple[Tensor, Tensor]:
    out = RowFloats.empty(x, rounding, gated=swiglu)
    check_tensor(x, "activations", dtypes=tuple(TYPES))
    check_heads(x.shape[1] // (2 if swiglu else 1), heads)
    launch_transform(x, out, heads=heads, half=half, gated=swiglu)
    return out.codes, out.scale


hadamard_quantize_float = operator(
    "hadamard_quantize_float",
    reference=_hadamard_reference,
    cuda=_hadamard_cuda,
    fake=lambda x, heads, half, swiglu, rounding: _float_room(x, rounding, gated=swiglu),
)


def _norm_reference(x: Tensor, weight: Tensor | None, eps: float, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """The Hadamard transform of the RMSNorm of x [rows, n], with a weight [n] or none, over the whole row.

    The norm is that of `rms_norm_quantize`, rounded to the type of x before and after the weight; the transformed row
    stays float32.
    """
    rounding.check(x)
    return quantize_reference(transform_reference(norm_reference(x, weight, eps), 0, False, False), rounding)


def _norm_cuda(x: Tensor, weight: Tensor | None, eps: float, out: RowCodes | RowFloats) -> tuple[Tensor, Tensor]:
    """Codes and scales in the room for them, of either kind."""
    check_norm(x, None, weight, tuple(TYPES))
    check_heads(x.shape[1], 0)
    launch_transform(x, out, heads=0, norm=RowNorm(weight, eps))
    return out.codes, out.scale


rms_norm_hadamard_quantize = operator(
    "rms_norm_hadamard_quantize",
    reference=_norm_reference,
    cuda=lambda x, weight, eps, rounding: _norm_cuda(x, weight, eps, RowCodes.empty(x, rounding)),
    fake=lambda x, weight, eps, rounding: codes_room(x, rounding),
)


def _float_norm_reference(
    x: Tensor, weight: Tensor | None, eps: float, rounding: FloatRounding
) -> tuple[Tensor, Tensor]:
    """The same to floats of low bits."""
    rounding.check(x)
    return float_reference(transform_reference(norm_reference(x, weight, eps), 0, False, False), rounding)


rms_norm_hadamard_quantize_float = operator(
    "rms_norm_hadamard_quantize_float",
    reference=_float_norm_reference,
    cuda=lambda x, weight, eps, rounding: _norm_cuda(x, weight, eps, RowFloats.empty(x, rounding)),
    fake=lambda x, weight, eps, rounding: _float_room(x, rounding),
)
