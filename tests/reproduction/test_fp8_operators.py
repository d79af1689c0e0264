"""Float8 rows and products: the references against plain formulas, the kernels against the references."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from reproduction.benchmarks.fp8_operators import CODES, fp8_linear, quantize_fp8, rms_norm_quantize_fp8
from rotquant.foundation.errors import KernelError

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")

#: Half the distance between neighbouring codes, over the larger: three bits behind the leading one.
HALF_STEP = 2.0**-4
#: Half the distance between the smallest codes.
SMALLEST = 2.0**-10


def dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.double() * scale.double()[:, None]


def assert_nearest(codes: Tensor, scale: Tensor, expected: Tensor, before: float = 0.0) -> None:
    """Every code is the nearest one to the value, but for a value within 1 % of the middle of two.

    before: relative error of the value that was quantized.
    """
    error = (dequantized(codes, scale) - expected).abs() / scale.double()[:, None]
    magnitude = expected.abs() / scale.double()[:, None]
    assert (error <= 1.01 * torch.clamp(magnitude * HALF_STEP, min=SMALLEST) + before * magnitude).all()


def test_a_row_is_scaled_to_the_largest_code_and_rounded_to_the_nearest() -> None:
    x = torch.randn(5, 64) * torch.logspace(-6, 6, 5)[:, None]
    codes, scale = quantize_fp8(x, False)
    assert codes.dtype == CODES
    torch.testing.assert_close(scale, x.abs().amax(dim=1) / 448)
    assert (codes.float().abs().amax(dim=1) == 448).all()
    assert_nearest(codes, scale, x.double())


def test_a_row_of_zeros_stays_one() -> None:
    codes, scale = quantize_fp8(torch.zeros(2, 16), False)
    assert not codes.float().any()
    assert (scale > 0).all()


def test_swiglu_and_norm_are_done_before() -> None:
    x, residual = torch.randn(2, 3, 64, dtype=torch.float64)
    gate, up = x.chunk(2, dim=1)
    assert_nearest(*quantize_fp8(x, True), silu(gate) * up)
    codes, scale, total = rms_norm_quantize_fp8(x, residual, 1e-5)
    assert torch.equal(total, x + residual)
    assert_nearest(codes, scale, rms_norm(total, (64,), eps=1e-5))
    assert not rms_norm_quantize_fp8(x, None, 1e-5)[2].numel()


def test_a_product_is_that_of_the_dequantized_rows() -> None:
    x, weight = (quantize_fp8(torch.randn(rows, 64), False) for rows in (3, 32))
    y = fp8_linear(*x, *weight, torch.float64)
    torch.testing.assert_close(y, dequantized(*x) @ dequantized(*weight).T)


@pytest.mark.unflipped  # torch.library.opcheck has dispatch modes of its own
def test_the_operators_have_shape_rules() -> None:
    x = torch.randn(2, 64)
    codes, scale = quantize_fp8(x, False)
    ops = torch.ops.rotquant
    torch.library.opcheck(ops.quantize_fp8.default, (x, False), test_utils="test_faketensor")
    torch.library.opcheck(ops.quantize_fp8.default, (x, True), test_utils="test_faketensor")
    for residual in (None, x.clone()):
        torch.library.opcheck(ops.rms_norm_quantize_fp8.default, (x, residual, 1e-5), test_utils="test_faketensor")
    product = (codes, scale, codes, scale, torch.float32)
    torch.library.opcheck(ops.fp8_linear.default, product, test_utils="test_faketensor")


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "n"), [(1, 16), (3, 8192), (37, 1000), (40, 28672), (2, 32768)])
def test_the_quantizing_kernels(rows: int, n: int) -> None:
    x, residual = torch.randn(2, rows, n, dtype=torch.bfloat16, device="cuda")
    gate_up = torch.randn(rows, 2 * n, dtype=torch.bfloat16, device="cuda")
    x[0] = 0
    gate, up = gate_up.double().chunk(2, dim=1)
    # SwiGLU is rounded to bfloat16 twice, half of 2^-7 each, with a fast exponential.
    for inputs, gated, expected, before in ((x, False, x.double(), 0), (gate_up, True, silu(gate) * up, 1.1 * 2.0**-7)):
        codes, scale = quantize_fp8(inputs, gated)
        largest = expected.abs().amax(dim=1).clamp_min(1e-12)
        torch.testing.assert_close(scale.double(), largest / 448, rtol=before + 1e-6, atol=0)
        assert_nearest(codes, scale, expected, before)
    codes, scale, total = rms_norm_quantize_fp8(x, residual, 1e-5)
    assert torch.equal(total, x + residual)
    assert_nearest(codes, scale, rms_norm(total.double(), (n,), eps=1e-5))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 33])
def test_the_product_on_a_gpu(rows: int) -> None:
    x, weight = (
        quantize_fp8(torch.randn(count, 256, device="cuda", dtype=torch.bfloat16), False) for count in (rows, 384)
    )
    y = fp8_linear(*x, *weight, torch.bfloat16)
    # The tensor cores keep 14 bits of a sum of 32 products or more, and the result is rounded to 8.
    expected = dequantized(*x) @ dequantized(*weight).T
    torch.testing.assert_close(y.double(), expected, rtol=2.0**-8, atol=2.0**-8 * 16)


@pytest.mark.gpu
def test_what_the_kernels_refuse() -> None:
    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    codes, scale = quantize_fp8(x, False)
    weight, column = quantize_fp8(torch.randn(32, 64, device="cuda", dtype=torch.bfloat16), False)
    for call, message in (
        (lambda: quantize_fp8(x.float(), False), "the input is float32"),
        (lambda: quantize_fp8(x[:, :60].contiguous(), False), "rows of 60 values"),
        (lambda: rms_norm_quantize_fp8(x, x[:2], 1e-5), "residual has shape"),
        (lambda: fp8_linear(codes, scale, codes, scale, torch.bfloat16), "multiples of 16"),
        (lambda: fp8_linear(codes, scale, codes, scale, torch.float16), "give bfloat16"),
        (lambda: fp8_linear(codes, scale[:1], weight, column, torch.bfloat16), "row scale has shape"),
        (lambda: fp8_linear(codes, scale, weight, column[:16], torch.bfloat16), "weight scale has shape"),
    ):
        with pytest.raises(KernelError, match=message):
            call()
