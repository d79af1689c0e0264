"""The Hessian of a linear layer's output error, which GPTQ, AWQ and QuIP# start from, and its inverse's factor.

For a layer with inputs X the weight error dW is measured by its output, tr(dW H dW^T) with H = X^T X.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from rotquant.foundation.errors import RotquantError
from rotquant.models.architectures import Architecture, linear_of
from rotquant.tensors.onednn import linear


class Hessian:
    """H = sum over tokens of x x^T, [features, features], in float32 (float64 for float64 inputs).

    Products of float16 or bfloat16 inputs are summed in float32 by the tensor cores, which is exact per product.
    """

    def __init__(self, features: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.matrix = torch.zeros(features, features, dtype=dtype, device=device)
        self.tokens = 0

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Add the tokens of `x` [..., features]."""
        x = x.reshape(-1, x.shape[-1])
        self.tokens += len(x)
        if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16):
            self.matrix += torch.mm(x.T, x, out_dtype=torch.float32)
        else:
            x = x.to(self.matrix.dtype)
            self.matrix += linear(x.T, x.T)

    def shrunk(self) -> Tensor:
        """The matrix, its diagonal raised by the share of tokens that it lacks to have as many as features.

        A shrinkage towards the mean of the diagonal times the identity, by 1 - tokens / features.
        """
        lacking = max(0.0, 1.0 - self.tokens / len(self.matrix))
        shrunk = self.matrix.clone()
        shrunk.diagonal().add_(lacking * self.matrix.diagonal().mean())
        return shrunk


@contextmanager
def observed_hessians(
    layer: nn.Module, architecture: Architecture, receive: Callable[[str, Tensor], object] | None = None
) -> Iterator[dict[str, Hessian]]:
    """While open, a decoder layer that runs adds what each linear layer reads, by its name.

    Those that read one input share a Hessian; an expert has its own, of the tokens that are routed to it.

    Args:
        receive: gets the same inputs, with the name of the linear layer, or of the first of those that share them.
    """
    hessians: dict[str, Hessian] = {}
    with ExitStack() as stack:
        for site in architecture.sites:
            for readers in site.sharing:
                module = linear_of(layer, readers[0])
                dtype = torch.promote_types(module.weight.dtype, torch.float32)
                found = Hessian(site.features, module.weight.device, dtype)
                hessians |= dict.fromkeys(readers, found)

                def seen(
                    _: nn.Module, inputs: tuple[Tensor, ...], name: str = readers[0], own: Hessian = found
                ) -> None:
                    own.add(inputs[0])
                    if receive is not None:
                        receive(name, inputs[0])

                stack.callback(module.register_forward_pre_hook(seen).remove)
        yield hessians


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper triangular U with U^T U = (H + damping * mean(diag H) * I)^-1, in float64, new memory.

    Inputs that never occur (zero diagonal) get the mean diagonal, so their weights are rounded to nearest and take part
    in nothing.

    Raises:
        RotquantError: when `hessian` [n, n] is not finite or the damped matrix is not positive definite.
    """
    diagonal = hessian.diagonal().double()
    if not torch.isfinite(diagonal.sum()):
        raise RotquantError(
            "calibration activations are not finite, so GPTQ has no Hessian: use bfloat16 or float32, or another text."
        )
    mean = diagonal.mean()
    mean = torch.where(mean > 0, mean, torch.ones_like(mean))
    # With rows and columns in reverse order, H = L L^T; U is then L^-1 in reverse order: one factorization.
    reverse = hessian.flip(0, 1).double()
    reverse.diagonal().add_(torch.where(diagonal > 0, damping * mean, mean).flip(0))
    lower, failed = torch.linalg.cholesky_ex(reverse)
    if failed.item():
        raise RotquantError(f"the GPTQ Hessian is not positive definite at damping {damping}: raise the damping.")
    identity = reverse.zero_()
    identity.fill_diagonal_(1.0)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    return inverse.flip(0, 1)
