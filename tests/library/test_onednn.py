"""Matrix products through oneDNN: torch's own in another order of summation, and only where they can be."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from rotquant.tensors import onednn
from rotquant.tensors.faster import FasterKernels
from rotquant.tensors.onednn import linear

needs_onednn = pytest.mark.skipif(not onednn._AVAILABLE, reason="torch was built without oneDNN")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch's own linear an error, so that whatever still works went through oneDNN."""

    def called(*_: object, **__: object) -> None:
        raise AssertionError("torch's own linear was called")

    monkeypatch.setattr(functional, "linear", called)


@pytest.mark.parametrize("shape", [(7, 13, 5), (64, 688, 128), (1, 1, 1), (0, 8, 4)])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_is_exact_up_to_float32_rounding(shape: tuple[int, int, int], strided: bool, with_bias: bool) -> None:
    rows, features, out = shape
    x, weight = random(rows, features), random(out, features, seed=1)
    if strided:
        x, weight = random(features, rows).T, random(features, out, seed=1).T
    bias = random(out, seed=2) if with_bias else None
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Any order of summation errs by at most n eps sum |x| |w|, n terms of relative error eps.
    bound = (features + 2) * torch.finfo(torch.float32).eps * (x.abs().double() @ weight.abs().double().T + 10)
    assert ((linear(x, weight, bias).double() - expected).abs() <= bound).all()


@needs_onednn
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_parameters_that_require_gradients_use_onednn_when_none_are_taken(
    context: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = nn.Parameter(random(4, 8)), random(3, 8)
    expected = x.double() @ weight.detach().double().T
    forbid(monkeypatch)
    with context():
        torch.testing.assert_close(linear(x, weight).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("learned", [(True, True, True), (True, False, False), (False, True, False)])
@pytest.mark.parametrize("rows", [(), (6,), (2, 3)])
def test_gradients_are_those_of_torch(rows: tuple[int, ...], learned: tuple[bool, bool, bool]) -> None:
    operands = [random(*rows, 8), random(4, 8, seed=1), random(4, seed=2)]
    for operand, wanted in zip(operands, learned, strict=True):
        operand.requires_grad_(wanted)
    exact = [
        operand.detach().double().requires_grad_(wanted) for operand, wanted in zip(operands, learned, strict=True)
    ]
    with FasterKernels():
        functional.linear(*operands).square().sum().backward()
    functional.linear(*exact).square().sum().backward()
    for operand, reference, wanted in zip(operands, exact, learned, strict=True):
        assert (operand.grad is not None) == wanted
        if wanted:
            torch.testing.assert_close(operand.grad.double(), reference.grad, rtol=1e-5, atol=1e-4)


@needs_onednn
def test_gradients_through_frozen_weights_go_through_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(3, 8).requires_grad_(), random(4, 8)
    forbid(monkeypatch)
    linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_keep_torch_s_product(dtype: torch.dtype) -> None:
    x, weight = random(3, 8, dtype=dtype), random(4, 8, dtype=dtype)
    assert torch.equal(linear(x, weight), functional.linear(x, weight))


@needs_onednn
def test_a_weight_that_is_a_slice_is_put_together_first() -> None:
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "linear_pointwise" in str(func):
                seen.append(args[1].stride())
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Seen():
        linear(random(6, 8), random(4, 9, seed=1)[:, :8])
        linear(random(6, 8), random(8, 4, seed=1).T)  # as gradients have it, which oneDNN takes as it is
    assert seen == [(8, 1), (1, 4)]
