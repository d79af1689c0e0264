"""Matrix products of float32 tensors on a CPU through oneDNN instead of MKL, torch's default.

MKL keeps AMD processors to its AVX2 kernels; oneDNN uses what the processor has. On one Zen 5 core that is 245 against
107 GFLOP/s at every shape of the small models, whose evaluation consists of such products. Sums are float32 in both, in
another order. Everything else (GPUs, other types, gradients, torch without oneDNN) takes torch's default.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b for x [..., in], weight [out, in], bias [out] or None: [..., out]. Any strides."""
    if _AVAILABLE and all(_fits(operand) for operand in (x, weight, bias) if operand is not None):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return functional.linear(x, weight, bias)


def _fits(operand: Tensor) -> bool:
    learned = operand.requires_grad and torch.is_grad_enabled()
    return operand.dtype == torch.float32 and operand.device.type == "cpu" and not learned


class OneDNNLinear(TorchFunctionMode):
    """While open, every `torch.nn.functional.linear` of this thread, hence every `nn.Linear`, goes through `linear`."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Called by torch for each of its functions; torch suspends the mode meanwhile."""
        return (linear if func is functional.linear else func)(*args, **(kwargs or {}))
