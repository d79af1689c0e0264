"""Operators from activations to integers: their references, shape rules and refusals, and on a GPU the kernels."""

import pytest
import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.launch.operators import references
from rotquant.kernels.layouts.weights import K_BLOCK, padded, unpack_rows
from rotquant.kernels.rows.activations import NO_TRANSFORM, hadamard_quantize, quantize_rows, rms_norm_quantize
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import choose_qparams, quantize

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FORMATS = [(4, True), (4, False), (8, False)]
#: Few rows, whose threads take few values each, and more than that.
ROWS = (1, 3, 17, 150)
#: dtype, bits, packed, SwiGLU: every type, format and gate, not every combination of them.
MIXTURES = [
    (torch.float16, 4, True, False),
    (torch.float16, 8, False, True),
    (torch.bfloat16, 4, False, False),
    (torch.bfloat16, 4, True, True),
    (torch.float32, 4, True, False),
]


def held(codes: Tensor) -> Tensor:
    """Codes one to a byte."""
    return unpack_rows(codes) if codes.dtype == torch.uint8 else codes


@pytest.mark.parametrize(("bits", "packed"), FORMATS)
@pytest.mark.parametrize("n", [64, 100, 688])
def test_codes_are_those_of_the_librarys_quantizer(n: int, bits: int, packed: bool) -> None:
    x = torch.randn(5, n)
    codes, scale = quantize_rows(x, 0.9, bits, packed, None)
    scheme = QuantizationScheme(bits=bits, symmetric=True, granularity="token", clip_ratio=0.9)
    qparams = choose_qparams(x, scheme)
    assert torch.equal(scale, qparams.scale.flatten())
    assert torch.equal(held(codes)[:, :n], quantize(x, qparams, scheme))
    assert not held(codes)[:, n:].any()
    assert held(codes).shape == (5, padded(n, K_BLOCK))


def test_a_static_scale_is_used_and_returned() -> None:
    static = torch.tensor([0.25])
    codes, scale = quantize_rows(torch.tensor([[0.3, -9.0, 9.0, 0.625]]), 1.0, 4, False, static)
    assert torch.equal(scale, static)
    assert held(codes)[0, :4].tolist() == [1, -8, 7, 2]  # 0.625 / 0.25 is a tie, which goes to the even code


def test_swiglu_rounds_as_a_model_does() -> None:
    x = torch.randn(3, 128).half()
    gate, up = x.chunk(2, 1)
    codes, scale = hadamard_quantize(x, NO_TRANSFORM, False, True, 1.0, 4, False, None)
    expected = quantize_rows(torch.nn.functional.silu(gate) * up, 1.0, 4, False, None)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scale, expected[1])


def test_the_norm_is_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, residual, weight = torch.randn(3, 96).half(), torch.randn(3, 96).half(), torch.rand(96).half()
    norm = LlamaRMSNorm(96, 1e-5)
    norm.weight = torch.nn.Parameter(weight)
    codes, scale, hidden = rms_norm_quantize(x, residual, weight, 1e-5, 1.0, 8, False, None)
    expected = quantize_rows(norm(x + residual).detach(), 1.0, 8, False, None)
    assert torch.equal(hidden, x + residual)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scale, expected[1])


@pytest.mark.unflipped  # torch.library.opcheck has dispatch modes of its own
def test_the_operators_have_shape_rules() -> None:
    ops, x, static = torch.ops.rotquant, torch.randn(3, 160), torch.tensor([0.1])
    for packed, scale in ((True, None), (False, static)):
        torch.library.opcheck(ops.quantize_rows.default, (x, 0.9, 4, packed, scale))
        torch.library.opcheck(ops.hadamard_quantize.default, (x, 0, False, True, 0.9, 4, packed, scale))
        for residual in (None, x.clone()):
            torch.library.opcheck(ops.rms_norm_quantize.default, (x, residual, None, 1e-5, 0.9, 4, packed, scale))


def test_impossible_codes_are_refused() -> None:
    x = torch.randn(3, 64)
    with pytest.raises(KernelError, match="8-bit codes cannot be packed as int4"):
        quantize_rows(x, 1.0, 8, True, None)
    with pytest.raises(KernelError, match="one float32 number"):
        quantize_rows(x, 1.0, 4, True, torch.ones(3))
    with pytest.raises(KernelError, match=r"\[rows, n\]"):
        quantize_rows(x[0], 1.0, 4, True, None)


# --- on a GPU -----------------------------------------------------------------------------------------------------


def agree(result: tuple[Tensor, ...], expected: tuple[Tensor, ...], off_by_one: float, scales: float = 2e-6) -> None:
    """Equal scales up to rounding, and codes equal but for a fraction that lies at a rounding boundary."""
    torch.testing.assert_close(result[1], expected[1], rtol=scales, atol=0)
    difference = (held(result[0]).int() - held(expected[0]).int()).abs()
    assert difference.max() <= 1
    assert difference.float().mean() <= off_by_one


@pytest.mark.gpu
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("bits", "packed"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [8, 200, 4096, 28672])
def test_rows_are_quantized_exactly(n: int, dtype: torch.dtype, bits: int, packed: bool, static: bool) -> None:
    scale = torch.tensor([0.3], device="cuda") if static else None
    for rows in ROWS:
        x = torch.randn(rows, n, device="cuda").to(dtype)
        result = quantize_rows(x, 0.9, bits, packed, scale)
        # On the CPU, since torch divides by 7 with the reciprocal on a GPU, one bit off.
        expected = quantize_rows(x.cpu(), 0.9, bits, packed, None if scale is None else scale.cpu())
        assert torch.equal(result[0].cpu(), expected[0])
        assert torch.equal(result[1].cpu(), expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("static", [None, 3e-6])
@pytest.mark.parametrize("magnitude", [0.0, 1e-6, 1e-3, 300.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_magnitude_are_quantized(dtype: torch.dtype, magnitude: float, static: float | None) -> None:
    """Subnormal numbers and scales whose reciprocal float16 cannot hold, and values far beyond a static scale."""
    scale = None if static is None else torch.tensor([static], device="cuda")
    for bits, packed in FORMATS:
        x = (torch.randn(150, 200, device="cuda") * magnitude).to(dtype)
        result = quantize_rows(x, 0.9, bits, packed, scale)
        expected = quantize_rows(x.cpu(), 0.9, bits, packed, None if scale is None else scale.cpu())
        assert torch.equal(result[0].cpu(), expected[0])
        assert torch.equal(result[1].cpu(), expected[1])
        result = rms_norm_quantize(x, None, None, 1e-5, 0.9, bits, packed, scale)
        with references():
            agree(result, rms_norm_quantize(x, None, None, 1e-5, 0.9, bits, packed, scale), 2e-2, scales=8e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bits", "packed", "swiglu"), MIXTURES)
@pytest.mark.parametrize("n", [64, 448, 512, 688, 4096, 5120, 8192, 11008, 13824, 14336, 28672])
def test_the_transform_is_quantized(n: int, dtype: torch.dtype, bits: int, packed: bool, swiglu: bool) -> None:
    """Float32 sums in another order move values by 1e-6 of the scale, and so few of them across a rounding boundary.

    With SwiGLU the exponential is the hardware's: a gated value may round to the neighbouring 16-bit number, one in
    thousands of a row, which moves all transformed values by less than a thousandth of their rounding.
    """
    for rows, scale in ((1, None), (17, None), (3, torch.tensor([0.4], device="cuda"))):
        x = torch.randn(rows, 2 * n if swiglu else n, device="cuda").to(dtype)
        result = hadamard_quantize(x, 0, False, swiglu, 0.9, bits, packed, scale)
        with references():
            expected = hadamard_quantize(x, 0, False, swiglu, 0.9, bits, packed, scale)
        if scale is None:
            torch.testing.assert_close(result[1], expected[1], rtol=1e-3 if swiglu else 2e-6, atol=0)
        difference = (held(result[0]).int() - held(expected[0]).int()).abs()
        assert difference.max() <= 1
        assert difference.float().mean() <= (2e-2 if swiglu else 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "head_dim"), [(32, 128), (40, 128), (32, 64), (4, 32)])
def test_mixed_heads_are_quantized(heads: int, head_dim: int) -> None:
    x = torch.randn(17, heads * head_dim, device="cuda").half()
    result = hadamard_quantize(x, heads, False, False, 0.9, 4, True, None)
    with references():
        agree(result, hadamard_quantize(x, heads, False, False, 0.9, 4, True, None), 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [64, 200, 4096, 8192])
def test_the_norm_is_quantized(n: int, dtype: torch.dtype, weighted: bool, residual: bool) -> None:
    """A sum of squares in another order may move a normalized value to the neighbouring number of its type."""
    for rows in ROWS:
        x = torch.randn(rows, n, device="cuda").to(dtype)
        other = torch.randn_like(x) if residual else None
        weight = torch.rand(n, device="cuda").to(dtype) if weighted else None
        result = rms_norm_quantize(x, other, weight, 1e-5, 0.9, 4, True, None)
        with references():
            expected = rms_norm_quantize(x, other, weight, 1e-5, 0.9, 4, True, None)
        assert torch.equal(result[2], expected[2])
        # A step of bfloat16 is 2^-7 of a value.
        agree(result, expected, 2e-2, scales=8e-3)


@pytest.mark.gpu
def test_rows_that_are_not_whole_vectors_are_refused() -> None:
    with pytest.raises(KernelError, match="multiple of 8"):
        quantize_rows(torch.randn(3, 100, device="cuda")[:, :99].contiguous(), 1.0, 4, True, None)
    with pytest.raises(KernelError, match="not contiguous"):
        quantize_rows(torch.randn(3, 128, device="cuda")[:, :64], 1.0, 4, True, None)
    with pytest.raises(KernelError, match="longer than the kernel holds in registers, 65536"):
        quantize_rows(torch.zeros(1, 65544, device="cuda", dtype=torch.float16), 1.0, 4, True, None)
