"""Rounding errors by dynamic scales as one kernel, of what is rounded while a rotation is learned.

Torch takes some 10 passes over the values in float32; the kernel reads and writes each once, in its own type. The
arithmetic is `tensors.quantization`'s, whose functions the reference calls. No gradient passes through it.
"""

from functools import cache

import torch
from torch import Tensor

from rotquant.kernels.arguments import FLOAT, INT, LONG, POINTER, TYPES, CudaFile, Parameters
from rotquant.kernels.launch.loading import TranslationUnit, kernel
from rotquant.kernels.launch.operators import as_rows, check_same_device, check_tensor, launch, operator
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import choose_qparams, fake_quantize, grouped, ungrouped

_THREADS, _PIECE, _HELD = 128, 8, 6
#: Threads that share a row, as few as keep all of it in registers; a row of any length has a warp, or a block.
_WARP, _TEAMS = 32, (4, 8, 16, 32, _THREADS)
_FILE = CudaFile(
    "rounding_errors.cu",
    kernels={
        "rounding_errors": Parameters(
            x=POINTER,
            smallest=FLOAT,
            largest=FLOAT,
            inverse_steps=FLOAT,
            clips=POINTER,
            clip=FLOAT,
            zero_point=INT,
            rows=LONG,
            n=INT,
            out=POINTER,
        )
    },
    constants={"kThreads": _THREADS, "kPiece": _PIECE, "kHeld": _HELD, "kNone": 0, "kWhole": 1, "kExact": 2},
)


def _instance(dtype: torch.dtype, team: int, neighbours: bool) -> str:
    return f"rounding_errors<{TYPES[dtype]}, {team}, {str(neighbours).lower()}>"


@cache
def _unit(dtype: torch.dtype) -> TranslationUnit:
    """The kernels of one type: pieces of neighbouring values, and by a warp any others."""
    kinds = (*((team, True) for team in _TEAMS), (_WARP, False))
    return TranslationUnit(_FILE, tuple(_instance(dtype, *kind) for kind in kinds))


def sources(architecture: str) -> list[TranslationUnit]:
    """A translation unit for each type of values."""
    return [_unit(dtype) for dtype in TYPES]


def problem(x: Tensor, scheme: QuantizationScheme) -> str | None:
    """Why the kernel does not take values [..., features] of a scheme, None where it does."""
    if x.dtype not in TYPES or scheme.granularity == "tensor" or scheme.type != "int" or scheme.rule != "own":
        return "the kernel takes floats of 16 or 32 bits, a scale for each row, group or head, and integers."
    size, features = scheme.group_size or x.shape[-1], x.shape[-1]
    if features % size:
        return f"{features} features have no kernel in groups of {size}: a multiple of the group size has."
    return None


@cache
def _scheme(bits: int, symmetric: bool, full: bool, exact: bool, clip_ratio: float) -> QuantizationScheme:
    """Rows of integers that share a scale."""
    return QuantizationScheme(
        bits=bits,
        symmetric=symmetric,
        scale="full" if full else "paper",
        zero_point="exact" if exact else "whole",
        clip_ratio=clip_ratio,
    )


def _reference(
    x: Tensor, bits: int, symmetric: bool, full: bool, exact: bool, clip_ratio: float, clips: Tensor | None
) -> Tensor:
    scheme = _scheme(bits, symmetric, full, exact, clip_ratio)
    return fake_quantize(x, scheme, choose_qparams(x, scheme, clips)).sub_(x)


def _cuda(
    x: Tensor, bits: int, symmetric: bool, full: bool, exact: bool, clip_ratio: float, clips: Tensor | None
) -> Tensor:
    check_tensor(x, "values", dtypes=tuple(TYPES), shape=(None, None))
    if clips is not None:
        check_tensor(clips, "clip ratios", dtypes=(torch.float32,), shape=(len(x), 1))
        check_same_device(x, clips=clips)
    out = torch.empty_like(x)
    if not x.numel():
        return out
    (rows, n), scheme = x.shape, _scheme(bits, symmetric, full, exact, clip_ratio)
    neighbours = n % _PIECE == 0
    team = next((team for team in _TEAMS if team * _PIECE * _HELD >= n), _THREADS) if neighbours else _WARP
    chosen = kernel(_unit(x.dtype), _instance(x.dtype, team, neighbours), x.device)
    # One over the steps: what torch multiplies by on a GPU where a tensor is divided by a number.
    codes = (*scheme.code_range, 1 / scheme.steps, clips, clip_ratio, 0 if symmetric else 2 if exact else 1)
    launch(chosen, (-(-rows * team // _THREADS),), (_THREADS,), x, *codes, rows, n, out, device=x.device)
    return out


#: x [rows, n], each row rounded to integer codes by a scale of its own and back, less x, in x's type. full: `scale` of
#: a symmetric scheme is `full`; exact: `zero_point` of another is `exact`. clips: float32 [rows, 1] in place of
#: `clip_ratio`, or None. Rows that hold what is no number, or is infinite, are as in torch.
rounding_errors = operator("rounding_errors", reference=_reference, cuda=_cuda, fake=lambda x, *_: torch.empty_like(x))


def errors_of(x: Tensor, scheme: QuantizationScheme, clips: Tensor | None = None) -> Tensor:
    """`fake_quantize(x, scheme) - x` of x [..., features] that has no `problem`, of its shape and type; no gradient.

    Equal bit for bit to what torch computes on the same device, but for the signs of zeros on a GPU.

    Args:
        clips: clip ratios in place of the scheme's, of the scales' shape; taken as float32.

    Raises:
        KernelError: they have another shape, or lie on another device.
    """
    view = grouped(x, scheme)
    kind = (scheme.symmetric, scheme.scale == "full", scheme.zero_point == "exact")
    ratios = None if clips is None else as_rows(clips.float())
    errors = rounding_errors(as_rows(view), scheme.bits, *kind, scheme.clip_ratio, ratios)
    return ungrouped(errors.view(view.shape), x.shape)
