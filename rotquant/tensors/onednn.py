"""Matrix products of float32 tensors on a CPU through oneDNN instead of MKL, torch's default.

MKL keeps AMD processors to its AVX2 kernels; oneDNN uses what the processor has. On one Zen 5 core that is 245 against
107 GFLOP/s at every shape of the small models, whose evaluation consists of such products. Sums are float32 in both, in
another order. Everything else (GPUs, other types, torch without oneDNN) takes torch's default.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b for x [..., in], weight [out, in], bias [out] or None: [..., out]. Any strides; differentiable."""
    operands = [operand for operand in (x, weight, bias) if operand is not None]
    if not (_AVAILABLE and all(_fits(operand) for operand in operands)):
        return functional.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        return _Linear.apply(x, weight, bias)
    return _product(x, weight, bias)


def _fits(operand: Tensor) -> bool:
    return operand.dtype == torch.float32 and operand.device.type == "cpu"


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Product by oneDNN. A weight that is a slice is copied first: for it oneDNN would take its reference loops, which
    are a thousand times slower."""
    if not weight.T.is_contiguous():
        weight = weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """The product and its gradients, of frozen operands none; not differentiable twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wanted = ctx.needs_input_grad
        ctx.save_for_backward(x if wanted[1] else None, weight if wanted[0] else None)
        return _product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch has *gradients
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        to_x = None if weight is None else _product(gradient, weight.T)
        to_weight = None if x is None else rows.T @ x.reshape(-1, x.shape[-1])
        return to_x, to_weight, rows.sum(0) if ctx.needs_input_grad[2] else None
