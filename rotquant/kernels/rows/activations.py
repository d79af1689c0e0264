"""Activations to integers in one pass: Hadamard, SwiGLU or RMSNorm, then per-token or static symmetric quantization.

QuaRot Sec. 4 (stages 1 and 2a) and PrefixQuant's static scales. Codes and scales follow `tensors.quantization`, rows
are padded with zero codes to a multiple of 64 for `linear`, and the transformed row is never written to memory.

Common to the operators: x is [rows, n], float16, bfloat16 or float32, on a GPU contiguous; bits are 2 to 8, with
`packed` 2 to 4; static_scale is a float32 tensor of one element, or None for a scale per row. They return codes,
int8 [rows, Kp] or packed uint8 [rows, Kp / 2] (`layouts.pack_rows`), Kp being n padded to a multiple of 64, and
float32 scales [rows] or [1]; they raise `KernelError` for anything else.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import FLOAT, INT, POINTER, TYPES, CudaFile, Parameters, Structure
from rotquant.kernels.hadamard.launch import launch_transform
from rotquant.kernels.hadamard.operator import check_heads, transform_reference
from rotquant.kernels.launch.loading import TranslationUnit, kernel
from rotquant.kernels.launch.operators import check_tensor, operator
from rotquant.kernels.launch.overlap import launch_waiting
from rotquant.kernels.layouts.codes import CODES, Rounding, RowCodes
from rotquant.kernels.layouts.weights import K_BLOCK, pack_rows, padded
from rotquant.kernels.rows.elementwise import check_norm, empty_sum, gated
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import QParams, choose_qparams, quantize

#: `heads` of `hadamard_quantize` that leaves the transform out.
NO_TRANSFORM = -1

#: Rows that leave multiprocessors of a large GPU idle.
_FEW_ROWS = 128
#: `Problem` of kernels/include/activations/rows.cuh.
_PROBLEM = Structure(
    "Problem",
    **dict.fromkeys(("x", "residual", "weight", "hidden"), POINTER),
    codes=CODES,
    n=INT,
    columns=INT,
    eps=FLOAT,
)
_FILE_16 = CudaFile("activations_16.cu", kernels={"quantize_rows_16": Parameters(problem=_PROBLEM)})
_FILE_32 = CudaFile("activations.cu", kernels={"quantize_rows_32": Parameters(problem=_PROBLEM)})


def sources(architecture: str) -> list[TranslationUnit]:
    """Sources of the launchers, kernels of `hadamard` aside: each kind of row, with each output and type."""
    names = (
        "quantize_rows_16<__half,kPlain,kInt4,8>",
        "quantize_rows_16<__nv_bfloat16,kGated,kInt8,4>",
        "quantize_rows_16<__nv_bfloat16,kNorm,kInt8,8>",
        "quantize_rows_16<__half,kSumNorm,kInt4,4>",
    )
    return [TranslationUnit(_FILE_32, ("quantize_rows_32<kSumNorm,kInt8,4>",)), TranslationUnit(_FILE_16, names)]


def quantize_reference(x: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Quantize x [rows, n] as it is: codes [rows, Kp] or packed [rows, Kp / 2], and scales [rows] or [1]."""
    scheme = QuantizationScheme(bits=rounding.bits, symmetric=True, granularity="token")
    static = rounding.static_scale
    qparams = choose_qparams(x, scheme, rounding.clip_ratio) if static is None else QParams(static)
    codes = pad(quantize(x, qparams, scheme), (0, padded(x.shape[1], K_BLOCK) - x.shape[1]))
    return pack_rows(codes) if rounding.packed else codes, qparams.scale.flatten().clone()


def codes_room(x: Tensor, rounding: Rounding, *, gated: bool = False) -> tuple[Tensor, Tensor]:
    """Room for the codes and scales of rows x [rows, n], or with `gated` of (gate | up) [rows, 2n]."""
    room = RowCodes.empty(x, rounding, gated=gated)
    return room.codes, room.scale


def _quantize_reference(x: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Rows as they are; on a GPU n is a multiple of 8."""
    rounding.check(x)
    return quantize_reference(x, rounding)


def _quantize_cuda(x: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    out = RowCodes.empty(x, rounding)
    check_tensor(x, "activations", dtypes=tuple(TYPES))
    _launch_rows("kPlain", x, out)
    return out.codes, out.scale


quantize_rows = operator("quantize_rows", reference=_quantize_reference, cuda=_quantize_cuda, fake=codes_room)


def _hadamard_reference(x: Tensor, heads: int, half: bool, swiglu: bool, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """The Hadamard transform of x [rows, n], or with `swiglu` of silu(gate) * up, x being (gate | up) [rows, 2n].

    heads: 0 for the whole row, a number of heads to mix, or `NO_TRANSFORM`; half: float16 arithmetic. The
    transformed row stays float32: it is not rounded to the type of x before it is quantized. A kernel's sums, in
    another order, move fewer than one code in ten thousand across a rounding boundary.
    """
    rounding.check(x)
    x = gated(x) if swiglu else x
    return quantize_reference(x if heads == NO_TRANSFORM else transform_reference(x, heads, False, half), rounding)


def _hadamard_cuda(x: Tensor, heads: int, half: bool, swiglu: bool, rounding: Rounding) -> tuple[Tensor, Tensor]:
    out = RowCodes.empty(x, rounding, gated=swiglu)
    check_tensor(x, "activations", dtypes=tuple(TYPES))
    if heads == NO_TRANSFORM:
        _launch_rows("kGated" if swiglu else "kPlain", x, out)
    else:
        check_heads(x.shape[1] // (2 if swiglu else 1), heads)
        launch_transform(x, out, heads=heads, inverse=False, half=half, gated=swiglu)
    return out.codes, out.scale


hadamard_quantize = operator(
    "hadamard_quantize",
    reference=_hadamard_reference,
    cuda=_hadamard_cuda,
    fake=lambda x, heads, half, swiglu, rounding: codes_room(x, rounding, gated=swiglu),
)


def norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of x [rows, n] in its type, with a weight [n] or none, as transformers computes it."""
    values = x.float()
    normal = (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normal if weight is None else weight * normal


def _norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, rounding: Rounding
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm of x + residual, each [rows, n], with a weight [n] or none, as transformers computes it.

    Statistics are float32, and the normalized row is rounded to the type of x before and after the weight. The third
    result is x + residual as a new tensor, or an empty one where there is no residual.
    """
    rounding.check(x)
    hidden = x if residual is None else x + residual
    codes = quantize_reference(norm_reference(hidden, weight, eps), rounding)
    return *codes, x.new_empty(0) if residual is None else hidden


def _norm_cuda(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, rounding: Rounding
) -> tuple[Tensor, Tensor, Tensor]:
    out = RowCodes.empty(x, rounding)
    check_norm(x, residual, weight, tuple(TYPES))
    hidden = empty_sum(x, residual)
    kind = "kNorm" if residual is None else "kSumNorm"
    _launch_rows(kind, x, out, residual=residual, weight=weight, hidden=hidden, eps=eps)
    return out.codes, out.scale, hidden


rms_norm_quantize = operator(
    "rms_norm_quantize",
    reference=_norm_reference,
    cuda=_norm_cuda,
    fake=lambda x, residual, weight, eps, rounding: (*codes_room(x, rounding), empty_sum(x, residual)),
)


def _launch_rows(
    kind: str,
    x: Tensor,
    out: RowCodes,
    *,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    hidden: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Run kernels/activations_16.cu, or for float32 rows activations.cu: a block to a row."""
    n = x.shape[1] // (2 if kind == "kGated" else 1)
    if n % 8:
        raise KernelError(f"rows of {n} values cannot be read 16 bytes at a time: n must be a multiple of 8.")
    pieces, threads = _shape(out.columns // 8, x.shape[0], kind, x.dtype == torch.float32)
    if threads > 1024:
        raise KernelError(f"rows of {n} values are longer than the kernel holds in registers, {8 * pieces * 1024}.")
    if x.shape[0] == 0:
        return
    file, name = _FILE_16, f"quantize_rows_16<{TYPES[x.dtype]},{kind},{out.output},{pieces}>"
    if x.dtype == torch.float32:
        file, name = _FILE_32, f"quantize_rows_32<{kind},{out.output},{pieces}>"
    problem = _PROBLEM.of(
        x=x,
        residual=residual,
        weight=weight,
        hidden=hidden,
        codes=out.fields,
        n=n,
        columns=out.columns,
        eps=eps,
    )
    function = kernel(TranslationUnit(file, (name,)), name, x.device)
    launch_waiting(function, (x.shape[0],), (threads,), problem, device=x.device)


def _shape(pieces: int, rows: int, kind: str, wide: bool) -> tuple[int, int]:
    """How many of a row's pieces of eight values a thread takes, and the threads of a block.

    As many as 64 registers hold, which costs the fewest instructions for a row; fewer where there are too few rows to
    fill the GPU, so that each is done sooner.
    """
    if wide:
        each = next((v for v in (1, 2, 4) if pieces <= v * 128), 4)
    else:
        each = 8 if kind in ("kPlain", "kNorm") or pieces > 4 * 1024 else 4
        if rows <= _FEW_ROWS:
            each = next((v for v in (2, 4) if pieces <= v * 256), each)
    return each, padded(-(-pieces // each), 32)
