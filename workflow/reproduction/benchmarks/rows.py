"""Time of what happens between two products: Hadamard transform, quantization, and fake quantization of weights.

PrefixQuant Table 8 and the kernels' own goals. The measure of all of them is a device copy: of the same 16-bit tensor,
or of one that reads and writes as many weights. A training step fake-quantizes every weight and makes its gradients;
our kernels are compared with the same formulas in torch.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from reproduction.benchmarks.arguments import (
    FakeQuantizeArguments,
    QuantizeArguments,
    RoundRowsArguments,
    TransformArguments,
)
from reproduction.benchmarks.layers import copy_case
from reproduction.benchmarks.timing import Case, Measurements, gpu, measure
from rotquant.foundation.errors import KernelError
from rotquant.kernels.hadamard.operator import hadamard
from rotquant.kernels.rows.activations import hadamard_quantize, quantize_rows, rms_norm_quantize
from rotquant.kernels.rows.partition import fake_quantize_groups, fake_quantize_groups_backward
from rotquant.kernels.rows.partition_reference import WeightGroups, forward_reference
from rotquant.kernels.rows.straight_through import fake_quantize as fake_quantize_rows
from rotquant.kernels.rows.transformed import (
    hadamard_quantize_float,
    rms_norm_hadamard_quantize,
    rms_norm_hadamard_quantize_float,
)
from rotquant.qat.quantizers import make_quantizer
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors import quantization
from rotquant.tensors.hadamard import decompose
from rotquant.tensors.quantization import QParams, choose_qparams

#: QuaRot's clip of activations and its bits; they do not change the time.
_CLIP, _BITS = 0.9, 4
_EPS = 1e-5
#: NVFP4's of values whose largest is about 5; it does not change the time.
_GLOBAL_SCALE = 500.0
#: Names under which other libraries' transforms are imported.
_PEERS = {
    "fast-hadamard-transform": "fast_hadamard_transform.fast_hadamard_transform_interface",
    "hadacore": "vllm._custom_ops",
}


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
    if a.implementation in _PEERS:
        return _peer(a)
    return lambda x: hadamard(x, a.heads, False, a.arithmetic == "float16")


def quantize(arguments: QuantizeArguments) -> Measurements:
    """Seconds of quantization of [rows, features], with what comes before it, or of a copy of its 16-bit input."""
    case = quantize_case(arguments, gpu())
    return measure(copy_case(case.inputs[0]) if arguments.implementation == "copy" else case)


def quantize_case(a: QuantizeArguments, device: torch.device) -> Case:
    """The tensors and the call that `quantize` times."""
    x = torch.randn(a.rows, a.features, dtype=torch.float16, device=device)
    residual = (torch.randn_like(x),) if a.before.startswith("residual") else ()
    weight = (torch.rand_like(x[0]),) if a.before == "rms-norm-hadamard" else ()
    static = (torch.full((1,), 0.5, device=device),) if a.scale == "static" else ()
    whole = (torch.full((1,), _GLOBAL_SCALE, device=device),) if a.output == "nvfp4" else ()
    run = _eager if a.implementation == "torch" else _fused if a.output in ("packed", "held") else _floats
    return Case(run(a), (x, *residual, *weight, *static, *whole))


def _fused(a: QuantizeArguments) -> Callable[..., Any]:
    rest = (_CLIP, _BITS, a.output == "packed")

    def run(x: Tensor, *others: Tensor) -> Any:
        residual, scale = _others(a, others)
        if a.before == "rms-norm-hadamard":
            return rms_norm_hadamard_quantize(x, others[0], _EPS, *rest, scale)
        if a.before == "none":
            return quantize_rows(x, *rest, scale)
        if a.before.endswith("rms-norm"):
            return rms_norm_quantize(x, residual, None, _EPS, *rest, scale)
        return hadamard_quantize(x, 0, False, False, *rest, scale)

    return run


def _floats(a: QuantizeArguments) -> Callable[..., Any]:
    def run(x: Tensor, *others: Tensor) -> Any:
        rest = (_CLIP, a.output.upper(), others[-1] if a.output == "nvfp4" else None)
        if a.before == "rms-norm-hadamard":
            return rms_norm_hadamard_quantize_float(x, others[0], _EPS, *rest)
        return hadamard_quantize_float(x, 0, False, False, *rest)

    return run


def _eager(a: QuantizeArguments) -> Callable[..., Any]:
    """Eager torch, one code to the byte; the transform is our kernel, so that only the rest differs."""

    def run(x: Tensor, *others: Tensor) -> Any:
        residual, scale = _others(a, others)
        hidden = x if residual is None else x + residual
        if "rms-norm" in a.before:
            x = rms_norm(hidden, (a.features,), others[0] if a.before == "rms-norm-hadamard" else None, eps=_EPS)
        if a.before.endswith("hadamard"):
            x = hadamard(x, 0, False, False)
        if scale is None:
            scale = x.abs().amax(dim=-1, keepdim=True) * (_CLIP / 7)
        codes = (x / scale).round_().clamp_(-8, 7).to(torch.int8)
        return (codes, scale) if residual is None else (codes, scale, hidden)

    return run


def _others(a: QuantizeArguments, others: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    """A case's tensors other than x: the residual and the static scale."""
    return (others[0] if a.before.startswith("residual") else None, others[-1] if a.scale == "static" else None)


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
    suffix, in_place = "" if factor == 1 else f"_{factor}N", a.implementation == "hadacore"
    function = getattr(peer, f"{'hadacore' if in_place else 'hadamard'}_transform{suffix}", None)
    if a.heads or function is None:
        raise KernelError(f"{a.implementation} has no transform of {a.features} features and {a.heads} heads.")
    scale = a.features**-0.5
    return function if in_place else lambda x: function(x, scale)


#: Weights that a phase reads and writes.
_MOVED = {"forward": 2, "backward": 3, "both": 5}
#: Bits of codes, on which the time does not depend.
_TABLE_BITS, _FLOAT_BITS = 2, 3
#: Weight scheme of block-wise tuning in W4A4KV4.
_SCHEME = QuantizationScheme(bits=4, symmetric=True, granularity="channel")
#: Bytes of a float32 weight that `round_rows` reads and writes, quarters of those of a copy.
_ROW_BYTES = {"forward": 6, "both": 16}


def fake_quantize(arguments: FakeQuantizeArguments) -> Measurements:
    """Seconds of a phase of fake quantization, or of a copy of the same bytes.

    Raises:
        KernelError: there is no GPU, a kernel refuses, or torch compiles nothing here.
    """
    a, device = arguments, gpu()
    if a.implementation == "copy":
        rows = a.out_features * _MOVED[a.phase] // 2
        return measure(copy_case(torch.randn(rows, a.in_features, dtype=getattr(torch, a.dtype), device=device)))
    return measure(fake_quantize_case(a, device))


def fake_quantize_case(a: FakeQuantizeArguments, device: torch.device) -> Case:
    """The tensors and the call that `fake_quantize` times: a weight, the gradient of its value, and parameters."""
    weight = torch.randn(a.out_features, a.in_features, dtype=getattr(torch, a.dtype), device=device)
    bits = _FLOAT_BITS if a.kind.startswith("nf") else _TABLE_BITS
    learned = dict(make_quantizer(a.kind, weight, a.group_size, bits).named_parameters())
    names = [name for name in ("gamma", "beta", "s1", "s2") if name in learned]
    options = a.group_size, bits, a.kind, a.straight_through
    run = _RUNS[a.phase]

    def call(weight: Tensor, gradient: Tensor, *parameters: Tensor) -> Any:
        given = dict(zip(names, parameters, strict=True))
        return run(quantize, gradient, weight, *(given.get(name) for name in ("gamma", "beta", "s1", "s2")), *options)

    quantize = fake_quantize_groups if a.implementation == "ours" else _plain
    return Case(call, (weight, torch.randn_like(weight), *(learned[name].detach() for name in names)))


def _forward(quantize: Callable[..., Tensor], _: Tensor, *arguments: Any) -> Tensor:
    with torch.no_grad():
        return quantize(*arguments)


def _backward(_: Any, gradient: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return fake_quantize_groups_backward(gradient, *arguments)


def _both(quantize: Callable[..., Tensor], gradient: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in arguments]
    value = quantize(*leaves)
    return value, *torch.autograd.grad(value, [x for x in leaves if isinstance(x, Tensor)], gradient)


_RUNS = {"forward": _forward, "backward": _backward, "both": _both}


def _plain(*arguments: Any) -> Tensor:
    return forward_reference(WeightGroups(*arguments))


def round_rows(arguments: RoundRowsArguments) -> Measurements:
    """Seconds of fake quantization with learned scales, without or with gradients, or of a copy of the same bytes."""
    a, device = arguments, gpu()
    if a.implementation == "copy":
        rows = a.out_features * _ROW_BYTES[a.phase] // 8
        return measure(copy_case(torch.randn(rows, a.in_features, device=device)))
    return measure(round_rows_case(a, device))


def round_rows_case(a: RoundRowsArguments, device: torch.device) -> Case:
    """The tensors and the call that `round_rows` times: a weight, the gradient of its value, and scales."""
    weight = torch.randn(a.out_features, a.in_features, device=device)
    scale = choose_qparams(weight, _SCHEME).scale

    def rounded(weight: Tensor, scale: Tensor) -> Tensor:
        if a.implementation == "ours":
            return fake_quantize_rows(weight, _SCHEME, QParams(scale), torch.bfloat16)
        return quantization.fake_quantize(weight, _SCHEME, QParams(scale)).to(torch.bfloat16)

    def call(weight: Tensor, gradient: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        if a.phase == "forward":
            with torch.no_grad():
                return (rounded(weight, scale),)
        leaves = weight.detach().requires_grad_(), scale.detach().requires_grad_()
        value = rounded(*leaves)
        return value, *torch.autograd.grad(value, leaves, gradient)

    return Case(call, (weight, torch.randn_like(weight, dtype=torch.bfloat16), scale))
