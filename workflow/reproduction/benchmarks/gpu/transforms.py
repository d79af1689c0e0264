"""Time of the operations on activations between two products: Hadamard transform and quantization, alone and fused.

PrefixQuant Table 8 and the kernels' own goals. The measure of all of them is a device copy of the same 16-bit tensor:
it reads the input as they must, and writes what the plain transform must.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from reproduction.benchmarks.gpu import QuantizeArguments, TransformArguments
from reproduction.benchmarks.gpu.baselines import copy_case
from reproduction.benchmarks.timing.case import Case, Measurements, gpu, measure
from rotquant.foundation.errors import KernelError
from rotquant.kernels.hadamard.operator import hadamard
from rotquant.kernels.launch.operators import references
from rotquant.kernels.rows.activations import NO_TRANSFORM, hadamard_quantize, quantize_rows, rms_norm_quantize
from rotquant.tensors.hadamard import decompose

#: QuaRot's clip of activations and its bits; they do not change the time.
_CLIP, _BITS = 0.9, 4
_EPS = 1e-5
#: Names under which other libraries' transforms are imported.
_PEERS = {"fast-hadamard-transform": "fast_hadamard_transform", "hadacore": "hadacore"}


def transform(arguments: TransformArguments) -> Measurements:
    """Seconds of the transform of [rows, features], or of a copy of that tensor.

    Raises:
        KernelError: there is no GPU, or the implementation has no such transform.
    """
    a = arguments
    x = torch.randn(a.rows, a.features, dtype=getattr(torch, a.dtype), device=gpu())
    if a.implementation == "copy":
        return measure(copy_case(x))
    return measure(Case(transform_call(a), (x,)))


def transform_call(a: TransformArguments) -> Callable[[Tensor], Tensor]:
    """The function of [rows, features] that `transform` times."""
    half = a.arithmetic == "float16"
    if a.implementation in _PEERS:
        return _peer(a)
    if a.implementation == "ours":
        return lambda x: hadamard(x, a.heads, False, half)

    def in_torch(x: Tensor) -> Tensor:
        with references():
            return hadamard(x, a.heads, False, half)

    return in_torch


def quantize(arguments: QuantizeArguments) -> Measurements:
    """Seconds of quantization of [rows, features], with what comes before it, or of a copy of its 16-bit input.

    Raises:
        KernelError: there is no GPU, or a kernel refuses.
    """
    case = quantize_case(arguments, gpu())
    return measure(copy_case(case.inputs[0]) if arguments.implementation == "copy" else case)


def quantize_case(a: QuantizeArguments, device: torch.device) -> Case:
    """The tensors and the call that `quantize` times; SwiGLU takes gate and up side by side."""
    columns = a.features * (2 if a.before.startswith("swiglu") else 1)
    x = torch.randn(a.rows, columns, dtype=torch.float16, device=device)
    residual = (torch.randn_like(x),) if a.before.startswith("residual") else ()
    static = (torch.full((1,), 0.5, device=device),) if a.scale == "static" else ()
    return Case(_eager(a) if a.implementation == "torch" else _fused(a), (x, *residual, *static))


def _fused(a: QuantizeArguments) -> Callable[..., Any]:
    rest = (_CLIP, _BITS, a.output == "packed")
    gated = a.before.startswith("swiglu")
    heads = 0 if a.before.endswith("hadamard") else NO_TRANSFORM

    def run(x: Tensor, *others: Tensor) -> Any:
        residual, scale = _others(a, others)
        if a.before == "none":
            return quantize_rows(x, *rest, scale)
        if a.before.endswith("rms-norm"):
            return rms_norm_quantize(x, residual, None, _EPS, *rest, scale)
        return hadamard_quantize(x, heads, False, gated, *rest, scale)

    return run


def _eager(a: QuantizeArguments) -> Callable[..., Any]:
    """Eager torch, one code to the byte; the transform is our kernel, so that only the rest differs."""

    def run(x: Tensor, *others: Tensor) -> Any:
        residual, scale = _others(a, others)
        if a.before.startswith("swiglu"):
            gate, up = x.chunk(2, dim=1)
            x = silu(gate) * up
        if a.before.endswith("hadamard"):
            x = hadamard(x, 0, False, False)
        hidden = x if residual is None else x + residual
        if a.before.endswith("rms-norm"):
            x = rms_norm(hidden, (a.features,), eps=_EPS)
        if scale is None:
            scale = x.abs().amax(dim=-1, keepdim=True) * (_CLIP / 7)
        codes = (x / scale).round_().clamp_(-8, 7).to(torch.int8)
        return (codes, scale) if residual is None else (codes, scale, hidden)

    return run


def _others(a: QuantizeArguments, others: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    """A case's tensors other than x: the residual and the static scale."""
    return (
        others[0] if a.before.startswith("residual") else None,
        others[-1] if a.scale == "static" else None,
    )


def _peer(a: TransformArguments) -> Callable[[Tensor], Tensor]:
    """Another library's transform.

    Raises:
        KernelError: it is not installed, or has no such size.
    """
    try:
        peer = importlib.import_module(_PEERS[a.implementation])
    except ImportError as error:
        raise KernelError(f"{a.implementation} is not installed here: {error}.") from None
    factor, _ = decompose(a.features)
    name = "hadamard_transform" if factor == 1 else f"hadamard_transform_{factor}N"
    if a.heads or not hasattr(peer, name):
        raise KernelError(f"{a.implementation} has no transform of {a.features} features and {a.heads} heads.")
    function = getattr(peer, name)
    if a.implementation == "hadacore":
        return function
    scale = a.features**-0.5
    return lambda x: function(x, scale)
