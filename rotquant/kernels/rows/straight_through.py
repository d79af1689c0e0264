"""Uniform fake quantization with straight-through gradients, one kernel each way: tuning spends its time here.

Torch takes some 12 passes over a weight matrix for the two; the kernels read and write each value once. `fake_quantize`
is `rotquant.tensors.quantization.fake_quantize` for weights whose scales are learned, in a type of the caller's.
"""

from itertools import product
from typing import Any

import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import FLOAT, INT, LONG, POINTER, TYPES, CudaFile, Parameters
from rotquant.kernels.launch.loading import Kernel, TranslationUnit, kernel
from rotquant.kernels.launch.operators import check_same_device, check_tensor, launch, operator
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors import quantization
from rotquant.tensors.quantization import QParams, grouped, ungrouped

_INPUTS = {torch.float32: "float"}
_THREADS, _VECTOR = 256, 8
#: Threads that share a row, the fewer the shorter it is.
_TEAMS = (4, 8, 16, 32, _THREADS)
_RANGE = {"smallest": FLOAT, "largest": FLOAT, "rows": LONG, "n": INT}
_FILE = CudaFile(
    "straight_through.cu",
    kernels={
        "round_rows": Parameters(**dict.fromkeys(("x", "scale", "zero_point"), POINTER), **_RANGE, out=POINTER),
        "round_rows_backward": Parameters(
            **dict.fromkeys(("gradient", "x", "scale", "zero_point"), POINTER),
            **_RANGE,
            **dict.fromkeys(("to_x", "to_scale", "to_zero_point"), POINTER),
        ),
    },
    constants={"Row<32>::kThreads": _THREADS},
)
_INSTANCES = product(_FILE.kernels, _INPUTS.values(), TYPES.values(), _TEAMS)
_UNIT = TranslationUnit(_FILE, tuple(f"{name}<{a}, {b}, {team}>" for name, a, b, team in _INSTANCES))


def sources(architecture: str) -> list[TranslationUnit]:
    """The one translation unit, with both kernels for every type and length of rows."""
    return [_UNIT]


def _kernel(name: str, x: Tensor, dtype: torch.dtype) -> tuple[Kernel, tuple[int]]:
    """The kernel for rows of x [rows, n], and its grid."""
    rows, n = x.shape
    team = next((team for team in _TEAMS if team * _VECTOR >= n), _THREADS)
    blocks = -(-rows * team // _THREADS)
    return kernel(_UNIT, f"{name}<{_INPUTS[x.dtype]}, {TYPES[dtype]}, {team}>", x.device), (blocks,)


def problem(x: Tensor, scheme: QuantizationScheme) -> str | None:
    """Why the kernels do not take a weight of a scheme, None where they do."""
    n = scheme.group_size or x.shape[-1]
    if x.dtype not in _INPUTS or scheme.granularity not in ("channel", "group") or scheme.zero_point != "whole":
        return "the kernels take float32 weights with a scale for each channel or group and whole zero points."
    return f"{n} values with one scale have no kernel: a multiple of {_VECTOR} has." if n % _VECTOR else None


def _check(x: Tensor, scale: Tensor, zero_point: Tensor | None) -> None:
    check_tensor(x, "values", dtypes=tuple(_INPUTS), shape=(None, None))
    if x.shape[1] % _VECTOR:
        raise KernelError(f"rows of {x.shape[1]} values have no kernel: a multiple of {_VECTOR} has.")
    for name, tensor in (("scale", scale), ("zero_point", zero_point)):
        if tensor is not None:
            check_tensor(tensor, name, dtypes=(torch.float32,), shape=(len(x),))
    check_same_device(x, scale=scale, zero_point=zero_point)


def _codes(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, smallest: float, largest: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes less their zero point, x over the scale, and where codes were clipped; each [rows, n] in scale's type."""
    move = torch.zeros_like(scale) if zero_point is None else zero_point
    ratio = x.to(scale.dtype) / scale[:, None]
    codes = ratio.round() + move[:, None]
    clipped = codes.clamp(smallest, largest)
    return clipped - move[:, None], ratio, clipped != codes


def _forward_reference(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, smallest: float, largest: float, dtype: torch.dtype
) -> Tensor:
    return (_codes(x, scale, zero_point, smallest, largest)[0] * scale[:, None]).to(dtype)


def _forward_cuda(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, smallest: float, largest: float, dtype: torch.dtype
) -> Tensor:
    _check(x, scale, zero_point)
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        chosen, grid = _kernel("round_rows", x, dtype)
        launch(chosen, grid, (_THREADS,), x, scale, zero_point, smallest, largest, *x.shape, out, device=x.device)
    return out


#: (clamp(round(x / scale) + zero_point) - zero_point) * scale of x [rows, n], with scales and zero points [rows], in
#: another type.
round_rows = operator(
    "round_rows",
    reference=_forward_reference,
    cuda=_forward_cuda,
    fake=lambda x, scale, zero_point, smallest, largest, dtype: torch.empty_like(x, dtype=dtype),
)


def _backward_reference(
    gradient: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, smallest: float, largest: float
) -> tuple[Tensor, Tensor, Tensor]:
    values, ratio, clipped = _codes(x, scale, zero_point, smallest, largest)
    wide = gradient.to(scale.dtype)
    to_scale = (wide * torch.where(clipped, values, values - ratio)).sum(-1)
    to_zero_point = -scale * wide.masked_fill(~clipped, 0.0).sum(-1)
    return gradient.to(x.dtype).masked_fill(clipped, 0.0), to_scale, to_zero_point


def _backward_cuda(
    gradient: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, smallest: float, largest: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, scale, zero_point)
    check_tensor(gradient, "gradient", dtypes=tuple(TYPES), shape=tuple(x.shape))
    check_same_device(x, gradient=gradient)
    to_x, to_scale, to_zero_point = torch.empty_like(x), torch.zeros_like(scale), torch.zeros_like(scale)
    if x.numel():
        chosen, grid = _kernel("round_rows_backward", x, gradient.dtype)
        arguments = (gradient, x, scale, zero_point, smallest, largest, *x.shape, to_x, to_scale, to_zero_point)
        launch(chosen, grid, (_THREADS,), *arguments, device=x.device)
    return to_x, to_scale, to_zero_point


#: The gradients of x [rows, n], scale and zero_point [rows] from that of `round_rows`; rounding has slope one.
round_rows_backward = operator(
    "round_rows_backward",
    reference=_backward_reference,
    cuda=_backward_cuda,
    fake=lambda gradient, x, scale, zero_point, smallest, largest: (
        torch.empty_like(x),
        torch.empty_like(scale),
        torch.empty_like(scale),
    ),
)


class _RoundedRows(torch.autograd.Function):
    """`round_rows`; only the values themselves are kept for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor | None, limits: tuple[int, int], dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.limits = limits
        return round_rows(x, scale, zero_point, *limits, dtype)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch has *gradients
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        x, scale, zero_point = ctx.saved_tensors
        found = round_rows_backward(gradient.contiguous(), x, scale, zero_point, *ctx.limits)
        return found[0], found[1], None if zero_point is None else found[2], None, None


def fake_quantize(x: Tensor, scheme: QuantizationScheme, qparams: QParams, dtype: torch.dtype) -> Tensor:
    """`fake_quantize(x, scheme, qparams).to(dtype)`: equal values and, up to the order of sums, equal gradients.

    On a GPU one kernel each way, where there is one for the weight.

    Args:
        x: a weight [out, in].
        scheme, qparams: as there; the gradient reaches x, the scales and the zero points.
        dtype: of the result; what is computed is rounded to it once.
    """
    if not x.is_cuda or problem(x, scheme):
        return quantization.fake_quantize(x, scheme, qparams).to(dtype)
    rows = grouped(x, scheme)
    zero_point = None if qparams.zero_point is None else qparams.zero_point.flatten()
    rounded = _RoundedRows.apply(
        rows.reshape(-1, rows.shape[-1]), qparams.scale.flatten(), zero_point, scheme.code_range, dtype
    )
    return ungrouped(rounded.view(rows.shape), x.shape)
