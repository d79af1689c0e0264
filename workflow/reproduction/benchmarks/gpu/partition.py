"""Time of fake quantization of weights in groups, and of its gradients: a training step does both for every weight.

The measure is a device copy that reads and writes as many weights. Our kernels are compared with the same formulas in
torch, operation by operation or compiled.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from reproduction.benchmarks.gpu import FakeQuantizeArguments, RoundRowsArguments
from reproduction.benchmarks.gpu.baselines import copy_case
from reproduction.benchmarks.timing.case import Case, Measurements, gpu, measure
from rotquant.foundation.errors import KernelError
from rotquant.kernels.rows.partition import fake_quantize_groups, fake_quantize_groups_backward
from rotquant.kernels.rows.partition_reference import WeightGroups, forward_reference
from rotquant.kernels.rows.straight_through import fake_quantize as fake_quantize_rows
from rotquant.qat.quantizers import make_quantizer
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors import quantization
from rotquant.tensors.quantization import QParams, choose_qparams

#: Weights that a phase reads and writes.
_MOVED = {"forward": 2, "backward": 3, "both": 5}
#: Bits of codes, on which the time does not depend.
_BITS, _FLOAT_BITS = 2, 3
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
    bits = _FLOAT_BITS if a.kind.startswith("nf") else _BITS
    learned = dict(make_quantizer(a.kind, weight, a.group_size, bits).named_parameters())
    names = [name for name in ("gamma", "beta", "s1", "s2") if name in learned]
    options = a.group_size, bits, a.kind, a.straight_through
    run = _RUNS[a.phase]

    def call(weight: Tensor, gradient: Tensor, *parameters: Tensor) -> Any:
        given = dict(zip(names, parameters, strict=True))
        return run(quantize, gradient, weight, *(given.get(name) for name in ("gamma", "beta", "s1", "s2")), *options)

    quantize = _quantize(a.implementation)
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


def _quantize(implementation: str) -> Callable[..., Tensor]:
    if implementation == "ours":
        return fake_quantize_groups
    if implementation == "torch":
        return _plain
    if importlib.util.find_spec("triton") is None:
        raise KernelError("torch compiles nothing for a GPU without triton, which is not installed here.")
    return torch.compile(_plain, dynamic=False)


def _plain(*arguments: Any) -> Tensor:
    return forward_reference(WeightGroups(*arguments))


def round_rows(arguments: RoundRowsArguments) -> Measurements:
    """Seconds of fake quantization with learned scales, without or with gradients, or of a copy of the same bytes.

    Raises:
        KernelError: there is no GPU, or a kernel refuses.
    """
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
