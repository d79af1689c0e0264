"""The search for weight clip ratios (QuaRot Sec. 5) as a kernel, for weights that are rounded anew at every step.

`weights.clipping.search_clip` in torch passes over a weight some 10 times for each of 80 candidates; the kernel reads
each value from memory once. The arithmetic of codes is `tensors.quantization`'s, whose functions the reference calls.
"""

from functools import cache

import torch
from torch import Tensor

from rotquant.kernels.arguments import FLOAT, INT, LONG, POINTER, CudaFile, Parameters
from rotquant.kernels.launch.loading import TranslationUnit, kernel
from rotquant.kernels.launch.operators import as_rows, check_tensor, launch, operator
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import choose_qparams, fake_quantize, grouped

#: Candidates 1.00, 0.99, ... 0.21.
_CANDIDATES = 80
_THREADS, _WARP = 64, 32
_FILE = CudaFile(
    "clip_search.cu",
    kernels={
        "best_ratios": Parameters(
            x=POINTER,
            smallest=FLOAT,
            largest=FLOAT,
            inverse_steps=FLOAT,
            symmetric=INT,
            norm=FLOAT,
            rows=LONG,
            n=INT,
            ratios=POINTER,
        )
    },
    constants={"kThreads": _THREADS, "kWarp": _WARP, "kCandidates": _CANDIDATES},
)
_SQUARES, _POWERS = "best_ratios<true>", "best_ratios<false>"
_UNIT = TranslationUnit(_FILE, (_SQUARES, _POWERS))


def sources(architecture: str) -> list[TranslationUnit]:
    """The one translation unit, with the kernel for squares and the one for other powers."""
    return [_UNIT]


def problem(weight: Tensor, scheme: QuantizationScheme) -> str | None:
    """Why the kernel does not take a weight [out, in] of a scheme, None where it does."""
    integers = scheme.type == "int" and scheme.zero_point == "whole" and scheme.rule == "own"
    if weight.dtype != torch.float32 or scheme.granularity not in ("channel", "group") or not integers:
        return (
            "the kernel takes float32 weights with a scale for each channel or group, integers and whole zero points."
        )
    size, features = scheme.group_size or weight.shape[1], weight.shape[1]
    if features % size:
        return f"{features} features have no kernel in groups of {size}: a multiple of the group size has."
    return None


@cache
def _scheme(bits: int, symmetric: bool, full: bool) -> QuantizationScheme:
    """Rows of integers that share a scale."""
    return QuantizationScheme(bits=bits, symmetric=symmetric, granularity="channel", scale="full" if full else "paper")


def _reference(x: Tensor, bits: int, symmetric: bool, full: bool, norm: float) -> Tensor:
    scheme = _scheme(bits, symmetric, full)
    candidates = 1.0 - torch.arange(_CANDIDATES, dtype=x.dtype, device=x.device) / 100
    errors = [
        (fake_quantize(x, scheme, choose_qparams(x, scheme, one)) - x).abs().pow(norm).sum(1) for one in candidates
    ]
    return candidates[torch.stack(errors).argmin(dim=0)]


def _cuda(x: Tensor, bits: int, symmetric: bool, full: bool, norm: float) -> Tensor:
    check_tensor(x, "values", dtypes=(torch.float32,), shape=(None, None))
    if not x.numel():
        return x.new_ones(len(x))
    scheme, ratios = _scheme(bits, symmetric, full), x.new_empty(len(x))
    chosen = kernel(_UNIT, _SQUARES if norm == 2 else _POWERS, x.device)
    # One over the steps: what torch multiplies by on a GPU where a tensor is divided by a number.
    codes = (*scheme.code_range, 1 / scheme.steps, symmetric)
    blocks = -(-len(x) * _WARP // _THREADS)
    launch(chosen, (blocks,), (_THREADS,), x, *codes, norm, *x.shape, ratios, device=x.device)
    return ratios


#: Of the candidates for x [rows, n], whose rows share a scale each, those [rows] with the least sum |error|^norm; of
#: equally good ones the largest. full: `scale` of a symmetric scheme is `full`. A row that holds what is no number, or
#: infinite, has no least error and gets 1.
best_ratios = operator("best_ratios", reference=_reference, cuda=_cuda, fake=lambda x, *_: x.new_empty(len(x)))


def search(weight: Tensor, scheme: QuantizationScheme, norm: float) -> Tensor:
    """The best clip ratio of every scale of a weight [out, in] that has no `problem`: [out, 1] or [out, groups, 1].

    As `weights.clipping.search_clip`, in float32: of ratios whose errors differ by no more than the rounding of its
    sums either may be chosen.
    """
    view = grouped(weight, scheme)
    ratios = best_ratios(as_rows(view), scheme.bits, scheme.symmetric, scheme.scale == "full", float(norm))
    return ratios.view(*view.shape[:-1], 1)
