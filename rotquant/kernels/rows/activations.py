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
from torch.nn.functional import pad, silu

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import FLOAT, INT, POINTER, CudaFile, Parameters, Structure
from rotquant.kernels.hadamard.launch import TYPES, launch_transform
from rotquant.kernels.hadamard.operator import check_heads, transform_reference
from rotquant.kernels.launch.loading import Source, kernel
from rotquant.kernels.launch.operators import check_same_device, check_tensor, launch, operator
from rotquant.kernels.layouts.codes import CODES, RowCodes, check_codes
from rotquant.kernels.layouts.weights import K_BLOCK, pack_rows, padded
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import QParams, choose_qparams, quantize

#: `heads` of `hadamard_quantize` that leaves the transform out.
NO_TRANSFORM = -1

#: Rows that leave multiprocessors of a large GPU idle.
_FEW_ROWS = 128
#: `Problem` of kernels/include/rows.cuh.
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


def sources(architecture: str) -> list[Source]:
    """What the launchers ask for, kernels of `hadamard` aside: each kind of row, with each output and type."""
    names = (
        "quantize_rows_16<__half,kPlain,kInt4,8>",
        "quantize_rows_16<__nv_bfloat16,kGated,kInt8,4>",
        "quantize_rows_16<__nv_bfloat16,kNorm,kInt8,8>",
        "quantize_rows_16<__half,kSumNorm,kInt4,4>",
    )
    return [Source(_FILE_32, ("quantize_rows_32<kSumNorm,kInt8,4>",)), Source(_FILE_16, names)]


def _codes(x: Tensor, clip_ratio: float, bits: int, packed: bool, static_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantize x [rows, n] as it is: codes [rows, Kp] or packed [rows, Kp / 2], and scales [rows] or [1]."""
    scheme = QuantizationScheme(bits=bits, symmetric=True, granularity="token")
    qparams = choose_qparams(x, scheme, clip_ratio) if static_scale is None else QParams(static_scale)
    codes = pad(quantize(x, qparams, scheme), (0, padded(x.shape[1], K_BLOCK) - x.shape[1]))
    return pack_rows(codes) if packed else codes, qparams.scale.flatten().clone()


def _gated(x: Tensor) -> Tensor:
    """silu(gate) * up of x = (gate | up) [rows, 2n], each operation rounded to the type of x, as a model does it."""
    gate, up = x.chunk(2, dim=1)
    return silu(gate) * up


def _quantize_reference(
    x: Tensor, clip_ratio: float, bits: int, packed: bool, static_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rows as they are; on a GPU n is a multiple of 8."""
    check_codes(x, bits, packed, static_scale)
    return _codes(x, clip_ratio, bits, packed, static_scale)


def _quantize_cuda(
    x: Tensor, clip_ratio: float, bits: int, packed: bool, static_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    check_codes(x, bits, packed, static_scale)
    check_tensor(x, "activations", dtypes=tuple(TYPES))
    out = RowCodes.empty(x, x.shape[1], clip_ratio, bits, packed, static_scale)
    _launch_rows("kPlain", x, out, x.shape[1])
    return out.codes, out.scale


def _quantize_fake(
    x: Tensor, clip_ratio: float, bits: int, packed: bool, static_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    check_codes(x, bits, packed, static_scale)
    return _room(x, x.shape[1], packed, static_scale)


quantize_rows = operator(
    "quantize_rows(Tensor x, float clip_ratio, int bits, bool packed, Tensor? static_scale) -> (Tensor, Tensor)",
    reference=_quantize_reference,
    cuda=_quantize_cuda,
    fake=_quantize_fake,
)


def _hadamard_reference(
    x: Tensor,
    heads: int,
    half: bool,
    swiglu: bool,
    clip_ratio: float,
    bits: int,
    packed: bool,
    static_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The Hadamard transform of x [rows, n], or with `swiglu` of silu(gate) * up, x being (gate | up) [rows, 2n].

    heads: 0 for the whole row, a number of heads to mix, or `NO_TRANSFORM`; half: float16 arithmetic. The
    transformed row stays float32: it is not rounded to the type of x before it is quantized. A kernel's sums, in
    another order, move fewer than one code in ten thousand across a rounding boundary.
    """
    check_codes(x, bits, packed, static_scale)
    x = _gated(x) if swiglu else x
    y = x if heads == NO_TRANSFORM else transform_reference(x, heads, False, half)
    return _codes(y, clip_ratio, bits, packed, static_scale)


def _hadamard_cuda(
    x: Tensor,
    heads: int,
    half: bool,
    swiglu: bool,
    clip_ratio: float,
    bits: int,
    packed: bool,
    static_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    check_codes(x, bits, packed, static_scale)
    check_tensor(x, "activations", dtypes=tuple(TYPES))
    n = x.shape[1] // (2 if swiglu else 1)
    out = RowCodes.empty(x, n, clip_ratio, bits, packed, static_scale)
    if heads == NO_TRANSFORM:
        _launch_rows("kGated" if swiglu else "kPlain", x, out, n)
    else:
        check_heads(n, heads)
        launch_transform(x, out, heads=heads, inverse=False, half=half, gated=swiglu)
    return out.codes, out.scale


def _hadamard_fake(
    x: Tensor,
    heads: int,
    half: bool,
    swiglu: bool,
    clip_ratio: float,
    bits: int,
    packed: bool,
    static_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    check_codes(x, bits, packed, static_scale)
    return _room(x, x.shape[1] // (2 if swiglu else 1), packed, static_scale)


hadamard_quantize = operator(
    "hadamard_quantize(Tensor x, int heads, bool half, bool swiglu, float clip_ratio, int bits, bool packed,"
    " Tensor? static_scale) -> (Tensor, Tensor)",
    reference=_hadamard_reference,
    cuda=_hadamard_cuda,
    fake=_hadamard_fake,
)


def _norm_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    clip_ratio: float,
    bits: int,
    packed: bool,
    static_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm of x + residual, each [rows, n], with a weight [n] or none, as transformers computes it.

    Statistics are float32, and the normalized row is rounded to the type of x before and after the weight. The third
    result is x + residual as a new tensor, or an empty one where there is no residual.
    """
    check_codes(x, bits, packed, static_scale)
    hidden = x if residual is None else x + residual
    values = hidden.float()
    normal = (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    normal = normal if weight is None else weight * normal
    new = x.new_empty(0) if residual is None else hidden
    return *_codes(normal, clip_ratio, bits, packed, static_scale), new


def _norm_cuda(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    clip_ratio: float,
    bits: int,
    packed: bool,
    static_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    check_codes(x, bits, packed, static_scale)
    check_tensor(x, "activations", dtypes=tuple(TYPES))
    if residual is not None:
        check_tensor(residual, "residual", dtypes=(x.dtype,), shape=tuple(x.shape))
    if weight is not None:
        check_tensor(weight, "norm weight", dtypes=(x.dtype,), shape=(x.shape[1],))
    check_same_device(x, residual=residual, weight=weight)
    out = RowCodes.empty(x, x.shape[1], clip_ratio, bits, packed, static_scale)
    hidden = x.new_empty(0) if residual is None else torch.empty_like(x)
    kind = "kNorm" if residual is None else "kSumNorm"
    _launch_rows(kind, x, out, x.shape[1], residual=residual, weight=weight, hidden=hidden, eps=eps)
    return out.codes, out.scale, hidden


def _norm_fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    clip_ratio: float,
    bits: int,
    packed: bool,
    static_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    check_codes(x, bits, packed, static_scale)
    hidden = x.new_empty(0) if residual is None else torch.empty_like(x)
    return *_room(x, x.shape[1], packed, static_scale), hidden


rms_norm_quantize = operator(
    "rms_norm_quantize(Tensor x, Tensor? residual, Tensor? weight, float eps, float clip_ratio, int bits,"
    " bool packed, Tensor? static_scale) -> (Tensor, Tensor, Tensor)",
    reference=_norm_reference,
    cuda=_norm_cuda,
    fake=_norm_fake,
)


def _room(x: Tensor, n: int, packed: bool, static_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    room = RowCodes.empty(x, n, 1.0, 4, packed, static_scale)
    return room.codes, room.scale


def _launch_rows(
    kind: str,
    x: Tensor,
    out: RowCodes,
    n: int,
    *,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    hidden: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Run kernels/activations_16.cu, or for float32 rows activations.cu: a block to a row."""
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
    launch(kernel(Source(file, (name,)), name, x.device), (x.shape[0],), (threads,), problem, device=x.device)


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
