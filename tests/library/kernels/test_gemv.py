"""The kernel for few rows: every shape has a plan that fits its GPU, and sums are exact."""

import itertools

import pytest
import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.launch.loading import ARCHITECTURES
from rotquant.kernels.launch.operators import references
from rotquant.kernels.layouts.weights import K_BLOCK, pack_rows, padded
from rotquant.kernels.products.gemv import MAX_ROWS, GemvPlan, choose_plan, is_preferred, launch_gemv, sources
from rotquant.kernels.products.linear import GROUP_SIZE, PackedWeight, quantized_linear

#: Shared memory that a block may have, in bytes.
SHARED = {"sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_89": 99 * 1024, "sm_90a": 227 * 1024}

#: (out, in): Llama projections, sizes that no tile divides, and every choice of a plan by the number of strips.
SHAPES = [
    (1, 64),
    (40, 200),
    (129, 1000),
    (272, 11008),
    (4096, 4096),
    (1024, 28672),
    (8191, 320),
    (14336, 704),
    (17001, 192),
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_plan_fits_its_gpu(architecture: str) -> None:
    for rows, strips, flags in itertools.product(
        range(1, MAX_ROWS + 1), (1, 64, 256, 512, 896, 1792), itertools.product((False, True), (False, True))
    ):
        plan = choose_plan(rows, strips, architecture)
        assert plan.rows >= rows
        assert plan.shared_bytes(*flags) <= SHARED[architecture]
        assert plan.cluster == 1 or architecture == "sm_90a"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_sources_are_what_plans_ask_for(architecture: str) -> None:
    instances = {instance for source in sources(architecture) for instance in source.instances}
    for rows in (1, 2, 8, 16, 32, 64):
        assert choose_plan(rows, 256, architecture).instance(packed=True, grouped=False) in instances


def test_many_rows_go_to_the_tiles_of_gemm() -> None:
    assert is_preferred(32, 1792, "sm_90a")
    assert not is_preferred(33, 1792, "sm_90a")
    assert is_preferred(64, 256, "sm_90a")  # too few features to fill the GPU with tiles
    for architecture in ARCHITECTURES:
        assert not is_preferred(65, 256, architecture)
    assert is_preferred(64, 1792, "sm_80")


def test_a_plan_names_its_kernel() -> None:
    assert GemvPlan(1, 1, 1, 8, 6).instance(True, False) == "gemv<1, 1, 1, 8, 6, true, false>"
    assert GemvPlan(8, 2, 1, 4, 5, 2).instance(False, True) == "gemv_cluster<8, 2, 1, 4, 5, 2, false, true>"


def test_too_many_rows_are_refused() -> None:
    codes, weight = torch.zeros(65, 64, dtype=torch.int8), torch.zeros(1, 1, 32, 16, dtype=torch.uint8)
    with pytest.raises(KernelError, match="up to 64, not 65"):
        launch_gemv(codes, torch.ones(1), weight, torch.ones(16), None, torch.empty(65, 16))


def test_sums_that_could_overflow_are_refused() -> None:
    codes, weight = torch.zeros(1, 2**17, dtype=torch.int8), torch.zeros(1, 2**11, 32, 16, dtype=torch.uint8)
    with pytest.raises(KernelError, match="overflow 32-bit sums"):
        launch_gemv(codes, torch.ones(1), weight, torch.ones(16), None, torch.empty(1, 16))


def draw(rows: int, shape: tuple[int, int], bits: int, packed: bool, grouped: bool) -> tuple:
    """Codes, row scales and a weight at random; inputs padded as the operator wants them."""
    outs, ins = shape
    ins = padded(ins, GROUP_SIZE) if grouped else ins
    weight = PackedWeight.pack(
        torch.randint(-8, 8, (outs, ins), dtype=torch.int8, device="cuda"),
        torch.rand(outs, *((ins // GROUP_SIZE,) if grouped else ()), device="cuda") + 0.1,
    )
    codes = torch.zeros(rows, padded(ins, K_BLOCK), dtype=torch.int8, device="cuda")
    half = 2 ** (bits - 1)
    codes[:, :ins] = torch.randint(-half, half, (rows, ins), device="cuda")
    return pack_rows(codes) if packed else codes, torch.rand(rows, device="cuda") + 0.1, weight


def multiply(codes: Tensor, scale: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The kernel's result, on poisoned memory."""
    y = torch.full((codes.shape[0], weight.shape[0]), torch.nan, dtype=dtype, device="cuda")
    launch_gemv(codes, scale, weight.codes, weight.scale, bias, y)
    return y


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("bits", "packed"), [(4, True), (4, False), (8, False)])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 64])
def test_scales_per_feature_give_the_reference_to_the_bit(
    rows: int, bits: int, packed: bool, dtype: torch.dtype
) -> None:
    for index, shape in enumerate(SHAPES):
        codes, scale, weight = draw(rows, shape, bits, packed, grouped=False)
        scale = scale[:1].contiguous() if index % 2 else scale
        bias = torch.randn(shape[0], device="cuda").to(dtype) if index % 3 else None
        y = multiply(codes, scale, weight, bias, dtype)
        with references():
            assert torch.equal(y, quantized_linear(codes, scale, weight, bias, dtype)), shape


@pytest.mark.gpu
@pytest.mark.parametrize(("bits", "packed"), [(4, True), (8, False)])
@pytest.mark.parametrize("rows", [1, 3, 8, 17, 64])
def test_scales_per_group_come_within_float32_rounding(rows: int, bits: int, packed: bool) -> None:
    for shape in SHAPES:
        codes, scale, weight = draw(rows, shape, bits, packed, grouped=True)
        y = multiply(codes, scale, weight, None, torch.float32)
        with references():
            expected = quantized_linear(codes, scale, weight, None, torch.float32)
        # Up to 224 groups are added in float32, where the reference adds in float64.
        assert (y - expected).double().norm() <= 1e-6 * expected.double().norm(), shape
        assert torch.equal(y, multiply(codes, scale, weight, None, torch.float32))


@pytest.mark.gpu
def test_every_output_is_written_and_nothing_else() -> None:
    codes, scale, weight = draw(17, (129, 1000), 4, True, False)
    whole = torch.full((19, 129), torch.nan, device="cuda")
    launch_gemv(codes, scale, weight.codes, weight.scale, None, whole[1:18])
    assert whole[1:18].isfinite().all()
    assert whole[0].isnan().all()
    assert whole[18].isnan().all()
