"""Products of float8 rows with float8 weights, and the kernels that make such rows: SpinQuant Appendix A.6, Table 14.

A row is quantized where it arises: as it is, by SwiGLU, or by residual add and RMSNorm. The product is torch's own,
with a scale for each row of either operand. Nothing here transforms: an online Hadamard transform comes before it.
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import FLOAT, INT, POINTER, CudaFile, Parameters
from rotquant.kernels.launch.loading import TranslationUnit, kernel
from rotquant.kernels.launch.operators import check_same_device, check_tensor, launch, operator
from rotquant.kernels.layouts.weights import padded
from rotquant.kernels.rows.elementwise import check_norm, empty_sum, swiglu
from rotquant.kernels.rows.elementwise import gated as gated_rows

CODES = torch.float8_e4m3fn
LARGEST_CODE = torch.finfo(CODES).max
#: Largest magnitude that a row is taken to have at least, so that a row of zeros keeps a scale above zero.
_TINY = 1e-12
_NORM, _PLAIN, _GATED = "rms_norm_quantize_fp8", "quantize_fp8<false>", "quantize_fp8<true>"
_SCALE = "scale_product"
_VECTOR, _PER_THREAD, _LONGEST = 8, 32, 32768
#: Threads of a block of `scale_product`, and values of each.
_THREADS, _SCALED = 256, 4
_FILE = CudaFile(
    "quantize_fp8.cu",
    kernels={
        "quantize_fp8": Parameters(x=POINTER, n=INT, codes=POINTER, scale=POINTER),
        _NORM: Parameters(x=POINTER, residual=POINTER, eps=FLOAT, n=INT, sum=POINTER, codes=POINTER, scale=POINTER),
        _SCALE: Parameters(x=POINTER, row_scale=POINTER, column_scale=POINTER, n=INT, out=POINTER),
    },
    constants={"8 * kVectors": _PER_THREAD, "kScaled": _SCALED},
)
_UNIT = TranslationUnit(_FILE, (_NORM, _PLAIN, _GATED, _SCALE))
#: torch multiplies float8 only where both sizes of a weight are multiples of this.
_ALIGNMENT = 16
#: Up to so many rows, two launches are faster than one on an H200: a product without scales and a pass that scales its
#: float32 sums, by up to 44 %; SwiGLU on all multiprocessors and then quantization, which takes one for each row.
_FEW_ROWS = 32


def sources(architecture: str) -> list[TranslationUnit]:
    """The one translation unit, with every kernel."""
    return [_UNIT]


def _launch(name: str, x: Tensor, n: int, *arguments: object) -> tuple[Tensor, Tensor]:
    """Launch a kernel on the rows of x: codes [rows, n] and scale [rows]; `arguments` stand between x and n."""
    if n % _VECTOR or n > _LONGEST:
        raise KernelError(f"rows of {n} values have no float8 kernel: a multiple of {_VECTOR} up to {_LONGEST} has.")
    codes, scale = _empty(x, n)
    if len(x):
        threads = padded(-(-n // _PER_THREAD), 32)
        function = kernel(_UNIT, name, x.device)
        launch(function, (len(x),), (threads,), x, *arguments, codes, scale, device=x.device)
    return codes, scale


def _empty(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), n, dtype=CODES), x.new_empty(len(x), dtype=torch.float32)


def _quantize_reference(x: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    x = gated_rows(x) if gated else x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (wide.abs().amax(dim=-1).clamp_min(_TINY) / LARGEST_CODE).float()
    codes = (wide * (1 / scale)[:, None]).clamp(-LARGEST_CODE, LARGEST_CODE)
    return codes.to(CODES), scale


def _quantize_cuda(x: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    check_tensor(x, "the input", dtypes=(torch.bfloat16,), shape=(None, None))
    if gated and x.shape[1] % 2:
        raise KernelError(f"{x.shape[1]} columns are not gate and up of equal size.")
    if gated and len(x) <= _FEW_ROWS:
        x, gated = swiglu(x), False
    n = x.shape[1] // 2 if gated else x.shape[1]
    return _launch(_GATED if gated else _PLAIN, x, n, n)


#: x [rows, n], or with `gated` silu(gate) * up of (gate | up) [rows, 2 n], as float8 [rows, n] and its scale, float32
#: [rows]: the row's largest magnitude becomes 448, the largest code. On a GPU x is bfloat16.
quantize_fp8 = operator(
    "quantize_fp8",
    reference=_quantize_reference,
    cuda=_quantize_cuda,
    fake=lambda x, gated: _empty(x, x.shape[1] // 2 if gated else x.shape[1]),
)


def _norm_reference(x: Tensor, residual: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = x if residual is None else x + residual
    wide = total.to(torch.promote_types(x.dtype, torch.float32))
    codes, scale = _quantize_reference(rms_norm(wide, wide.shape[-1:], eps=eps), False)
    return codes, scale, x.new_empty(0) if residual is None else total


def _norm_cuda(x: Tensor, residual: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    check_norm(x, residual, None, (torch.bfloat16,))
    total = empty_sum(x, residual)
    codes, scale = _launch(_NORM, x, x.shape[1], residual, eps, x.shape[1], total)
    return codes, scale, total


#: RMSNorm, without a gain, of x + residual [rows, n], quantized as by `quantize_fp8`; and that sum, or [0] without a
#: residual.
rms_norm_quantize_fp8 = operator(
    "rms_norm_quantize_fp8",
    reference=_norm_reference,
    cuda=_norm_cuda,
    fake=lambda x, residual, eps: (*_empty(x, x.shape[1]), empty_sum(x, residual)),
)


def _linear_reference(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    x, weight = codes.to(wide) * scale[:, None], weight.to(wide) * weight_scale[:, None]
    return (x @ weight.T).to(dtype)


def _linear_cuda(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype != torch.bfloat16:
        raise KernelError(f"torch's float8 products with a scale for each row give bfloat16, not {dtype}.")
    if any(size % _ALIGNMENT for size in weight.shape):
        raise KernelError(f"a float8 weight of shape {tuple(weight.shape)} has no product: multiples of 16 have.")
    check_tensor(scale, "row scale", dtypes=(torch.float32,), shape=(len(codes),))
    check_tensor(weight_scale, "weight scale", dtypes=(torch.float32,), shape=(len(weight),))
    check_same_device(codes, scale=scale, weight=weight, weight_scale=weight_scale)
    if len(codes) <= _FEW_ROWS:
        return _few_rows(codes, scale, weight, weight_scale)
    scales = {"scale_a": scale[:, None], "scale_b": weight_scale[None]}
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]  # no public name
        codes, weight.T, **scales, out_dtype=dtype, use_fast_accum=True
    )


def _few_rows(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    one = _one(codes.device)
    sums = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]  # no public name
        codes, weight.T, one, one, out_dtype=torch.float32, use_fast_accum=True
    )
    out = torch.empty_like(sums, dtype=torch.bfloat16)
    rows, n = sums.shape
    if rows:
        grid = (-(-n // (_THREADS * _SCALED)), rows)
        function = kernel(_UNIT, _SCALE, codes.device)
        launch(function, grid, (_THREADS,), sums, scale, weight_scale, n, out, device=codes.device)
    return out


@functools.cache
def _one(device: torch.device) -> Tensor:
    """The scale of a product without scales; kept, since a captured graph must not make it."""
    return torch.ones((), device=device)


#: float8 codes [rows, in], scale float32 [rows]; weight float8 [out, in], its scale float32 [out] -> dtype [rows, out].
fp8_linear = operator(
    "fp8_linear",
    reference=_linear_reference,
    cuda=_linear_cuda,
    fake=lambda codes, scale, weight, weight_scale, dtype: codes.new_empty(len(codes), len(weight), dtype=dtype),
)
