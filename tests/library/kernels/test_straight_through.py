"""Fake quantization with straight-through gradients as kernels: references against autograd, kernels against those."""

import pytest
import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.rows import straight_through
from rotquant.kernels.rows.straight_through import round_rows, round_rows_backward
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import QParams, choose_qparams, fake_quantize

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")

SCHEMES = (
    QuantizationScheme(bits=4, symmetric=True, granularity="channel"),
    QuantizationScheme(bits=2, symmetric=False, granularity="channel"),
    QuantizationScheme(bits=4, symmetric=False, granularity="group", group_size=128),
    QuantizationScheme(bits=3, symmetric=True, granularity="group", group_size=32),
    QuantizationScheme(bits=8, symmetric=False, granularity="group", group_size=8),
)


def weight(rows: int, n: int, scheme: QuantizationScheme, device: str, dtype: torch.dtype) -> tuple[Tensor, QParams]:
    """A weight, and scales under which some of its values are clipped; leaves with gradient."""
    x = torch.randn(rows, n, device=device, dtype=dtype)
    chosen = choose_qparams(x, scheme)
    zero_point = None if chosen.zero_point is None else chosen.zero_point.clone().requires_grad_()
    return x.requires_grad_(), QParams((0.6 * chosen.scale).requires_grad_(), zero_point)


def flat(x: Tensor, qparams: QParams, scheme: QuantizationScheme) -> tuple[Tensor, Tensor, Tensor | None]:
    rows = x.detach().reshape(qparams.scale.numel(), -1)
    zero_point = None if qparams.zero_point is None else qparams.zero_point.detach().flatten()
    return rows, qparams.scale.detach().flatten(), zero_point


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_references_are_fake_quantization_and_its_gradients(scheme: QuantizationScheme) -> None:
    x, qparams = weight(6, 256, scheme, "cpu", torch.float64)
    expected = fake_quantize(x, scheme, qparams)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    rows = flat(x, qparams, scheme)
    assert torch.equal(round_rows(*rows, *scheme.code_range, torch.float64).view_as(x), expected)
    found = round_rows_backward(gradient.view_as(rows[0]), *rows, *scheme.code_range)
    learned = [x, qparams.scale] + ([] if qparams.zero_point is None else [qparams.zero_point])
    for tensor, one in zip(learned, found, strict=False):
        torch.testing.assert_close(one.view_as(tensor), tensor.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.unflipped  # torch.library.opcheck has dispatch modes of its own
def test_the_operators_have_shape_rules() -> None:
    x, scale = torch.randn(3, 16), torch.rand(3)
    torch.library.opcheck(torch.ops.rotquant.round_rows.default, (x, scale, None, -8.0, 7.0, torch.bfloat16))
    gradient = torch.randn(3, 16, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.rotquant.round_rows_backward.default, (gradient, x, scale, None, -8.0, 7.0))


@pytest.mark.parametrize(
    ("dtype", "scheme", "why"),
    [
        (torch.float64, SCHEMES[0], "float32 weights"),
        (torch.float32, QuantizationScheme(bits=4, granularity="tensor"), "channel or group"),
        (torch.float32, QuantizationScheme(bits=4, granularity="group", group_size=12), "multiple of 8"),
    ],
)
def test_what_the_kernels_do_not_take_is_said(dtype: torch.dtype, scheme: QuantizationScheme, why: str) -> None:
    assert why in str(straight_through.problem(torch.zeros(2, 24, dtype=dtype), scheme))
    assert straight_through.problem(torch.zeros(2, 24), SCHEMES[4]) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("rows", "n"), [(7, 128), (3, 4096), (33, 11008), (2, 28672)])
def test_kernels(rows: int, n: int, scheme: QuantizationScheme, dtype: torch.dtype) -> None:
    x, qparams = weight(rows, n, scheme, "cuda", torch.float32)
    out = straight_through.fake_quantize(x, scheme, qparams, dtype)
    assert torch.equal(out, fake_quantize(x.detach(), scheme, qparams.detach()).to(dtype))
    gradient = torch.randn_like(out)
    out.backward(gradient)
    flat_rows, scale, zero_point = flat(x, qparams, scheme)
    # Float64 would round some values at a boundary to another code: the codes are float32's, the sums float64's.
    wide = straight_through._codes(flat_rows, scale, zero_point, *scheme.code_range)
    values, ratio, clipped = wide[0].double(), wide[1].double(), wide[2]
    g = gradient.double().view_as(values)
    assert x.grad is not None and qparams.scale.grad is not None  # noqa: PT018 - for the types
    assert torch.equal(x.grad, gradient.float().view_as(values).masked_fill(clipped, 0.0).view_as(x))
    per_value = g * torch.where(clipped, values, values - ratio)
    # Each product is rounded once, and the sums have some log2(n) + n / 2048 roundings of their partial sums.
    bound = 64 * torch.finfo(torch.float32).eps * per_value.abs().sum(-1)
    assert ((qparams.scale.grad.flatten() - per_value.sum(-1)).abs() <= bound).all()
    if qparams.zero_point is not None:
        per_value = -scale.double()[:, None] * g.masked_fill(~clipped, 0.0)
        bound = 64 * torch.finfo(torch.float32).eps * per_value.abs().sum(-1)
        assert qparams.zero_point.grad is not None
        assert ((qparams.zero_point.grad.flatten() - per_value.sum(-1)).abs() <= bound).all()
    assert clipped.any()


@pytest.mark.gpu
def test_what_is_no_number_stays_none() -> None:
    x, scale = torch.randn(4, 64, device="cuda"), torch.rand(4, device="cuda")
    x[1, 3] = torch.nan
    out = round_rows(x, scale, None, -8.0, 7.0, torch.float32)
    assert out.isnan().nonzero().tolist() == [[1, 3]]


@pytest.mark.gpu
def test_a_tensor_that_the_kernel_cannot_read_is_refused() -> None:
    scale = torch.rand(4, device="cuda")
    with pytest.raises(KernelError, match="multiple of 8"):
        round_rows(torch.randn(4, 12, device="cuda"), scale, None, -8.0, 7.0, torch.float32)
    with pytest.raises(KernelError, match="float32"):
        round_rows(torch.randn(4, 16, device="cuda").half(), scale, None, -8.0, 7.0, torch.float32)
