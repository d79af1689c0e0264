"""4-bit weights and 16-bit activations: layout, definition, plans, refusals, and the kernel against float64."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.launch.loading import ARCHITECTURES, architecture_of_device
from rotquant.kernels.launch.overlap import overlapping_launches
from rotquant.kernels.products.w4a16 import (
    DIRECT_ROWS,
    MAX_ROWS,
    HalfPlan,
    HalfWeight,
    _plans,
    choose_plan,
    half_linear,
    half_shapes,
    launch_dequantize,
    launch_w4a16,
    sources,
)
from tests.library.kernels.test_gemv import SHARED

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")

#: (out, in): less than a strip, no multiple of a tile, one group, Llama projections.
SHAPES = [(1, 128), (40, 384), (129, 1024), (272, 11008), (4096, 4096), (8191, 256), (1000, 28672), (17001, 128)]
#: Of which no group of 128 divides the inputs.
ROW_SHAPES = [(1, 8), (40, 200), (300, 1000)]
#: What rounding to a type moves a number by, relative to it.
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8}


def random_weight(shape: tuple[int, int], grouped: bool = True, device: str = "cpu") -> HalfWeight:
    outs, ins = shape
    codes = torch.randint(-8, 8, shape, dtype=torch.int8, device=device)
    return HalfWeight.pack(codes, torch.rand(outs, ins // 128 if grouped else 1, device=device) + 0.1)


@given(st.integers(1, 40), st.integers(1, 3), st.booleans())
def test_a_packed_weight_unpacks_to_itself(outs: int, groups: int, grouped: bool) -> None:
    codes = torch.randint(-8, 8, (outs, 128 * groups), dtype=torch.int8)
    scale = torch.rand(outs, groups if grouped else 1)
    weight = HalfWeight.pack(codes, scale)
    expected = half_shapes(outs, 128 * groups, grouped)
    assert (weight.codes.shape, weight.scale.shape) == expected
    spread = scale.repeat_interleave(128 * groups // scale.shape[1], dim=1)
    assert torch.equal(weight.dequantize(), codes * spread)
    assert torch.equal(weight.dequantize(torch.bfloat16), (codes * spread).bfloat16())


def test_the_reference_is_the_product_of_the_weight() -> None:
    for shape, grouped in ((SHAPES[1], True), (ROW_SHAPES[1], False)):
        weight, bias = random_weight(shape, grouped), torch.randn(shape[0], dtype=torch.float64)
        x = torch.randn(3, shape[1], dtype=torch.float64)
        expected = x @ weight.dequantize(torch.float64).T + bias
        torch.testing.assert_close(half_linear(x, weight, bias), expected, rtol=1e-14, atol=1e-13)
        y = half_linear(x.half(), weight, bias.half())
        assert torch.equal(y, (x.half().double() @ weight.dequantize(torch.float64).T + bias.half().double()).half())


@pytest.mark.unflipped  # torch.library.opcheck has dispatch modes of its own
def test_the_operator_has_a_shape_rule() -> None:
    weight = random_weight((40, 384))
    arguments = (torch.randn(3, 384).bfloat16(), weight.codes, weight.scale, None)
    torch.library.opcheck(torch.ops.rotquant.w4a16_linear.default, arguments)


def test_packing_refuses_what_it_cannot_hold() -> None:
    codes = torch.zeros(4, 256, dtype=torch.int8)
    with pytest.raises(KernelError, match="packing takes int8"):
        HalfWeight.pack(codes.float(), torch.ones(4))
    with pytest.raises(KernelError, match="one scale for each 128 inputs"):
        HalfWeight.pack(codes, torch.ones(4, 3))
    with pytest.raises(KernelError, match="groups of 128 weights do not divide 200 input features"):
        half_shapes(4, 200, grouped=True)


#: Strips of 16 output features and input features: small ones, and the layers of Llama-2-7B and 70B.
PLANNED = [(1, 8), (64, 4096), (256, 4096), (688, 4096), (1376, 4096), (256, 11008)]
PLANNED += [(512, 8192), (1792, 8192), (512, 28672)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plans_fit_and_are_compiled_in_tests(architecture: str) -> None:
    compiled = {instance for source in sources(architecture) for instance in source.instances}
    for rows, (strips, _) in itertools.product(range(1, MAX_ROWS + 1), PLANNED):
        plan = choose_plan(rows, strips, architecture)
        assert plan.rows >= rows
        assert plan.bytes(16, grouped=True) <= SHARED[architecture]
        assert architecture == "sm_90a" or (plan.cluster == 1 and not plan.warpgroups)
        assert not plan.warpgroups or plan.across % 4 == 0
        assert plan.half_instance(torch.float16) in compiled


def test_a_plan_fills_the_gpu() -> None:
    """No layer of Llama-2 gives a multiprocessor of an H200 more than two and a half times its share."""
    for rows, (strips, _) in itertools.product((1, 8, 16, 32, 64), PLANNED[2:]):
        plan = choose_plan(rows, strips, "sm_90a")
        blocks = -(-strips // plan.block_strips) * plan.cluster
        busiest = -(-blocks // 132) * plan.block_strips / plan.cluster  # strips
        assert busiest <= 2.5 * strips / 132, (rows, strips, plan)


def test_inputs_of_a_thread_are_neighbours() -> None:
    """Thread t takes inputs 2t, 2t + 1, 2t + 8 and 2t + 9 of 16: the low nibbles of bytes 0, 2, 1, 3 of its word."""
    codes = torch.arange(-8, 8, dtype=torch.int8).expand(16, 16)
    words = HalfWeight.pack(codes, torch.ones(16)).codes[0, 0, :, :4]
    for lane, word in enumerate(words & 0xF):
        first = 2 * (lane % 4)
        expected = torch.tensor([first, first + 8, first + 1, first + 9]) - 8
        assert torch.equal(word, (expected & 0xF).byte())


def test_too_many_rows_are_refused() -> None:
    weight = random_weight((16, 128))
    with pytest.raises(KernelError, match="up to 64, not 65"):
        launch_w4a16(torch.zeros(65, 128).half(), weight.codes, weight.scale, None, torch.empty(65, 16).half())


def check(y: Tensor, x: Tensor, weight: HalfWeight, bias: Tensor | None, rounded: float = 0.0) -> None:
    """Within the rounding of the output, and float32 sums; `rounded`: relative, of each weight."""
    dense = weight.dequantize(torch.float64)
    expected = x.double() @ dense.T
    terms = x.double().abs() @ dense.abs().T
    if bias is not None:
        expected += bias.double()
    # Tensor cores add with fewer bits than float32 has: a millionth of the sum of magnitudes was never exceeded.
    allowed = ROUNDING[x.dtype] * expected.abs() + (rounded + 2**-19) * terms
    assert (y.double() - expected).abs().le(allowed).all(), (x.shape, weight.shape)


def multiply(x: Tensor, weight: HalfWeight, bias: Tensor | None = None, plan: HalfPlan | None = None) -> Tensor:
    """The kernel's result, on poisoned memory, twice the same."""
    results = []
    for _ in range(2):
        y = torch.full((x.shape[0], weight.shape[0]), torch.nan, dtype=x.dtype, device="cuda")
        launch_w4a16(x, weight.codes, weight.scale, bias, y, plan)
        results.append(y)
    assert torch.equal(*results)
    return results[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 16, 17, 32, 33, 63, 64])
def test_products_come_within_rounding(rows: int, dtype: torch.dtype) -> None:
    for index, shape in enumerate([*SHAPES, *ROW_SHAPES]):
        grouped = index < len(SHAPES) and index % 4 != 3
        weight = random_weight(shape, grouped, "cuda")
        x = torch.randn(rows, shape[1], device="cuda")
        x[:, ::97] *= 100  # outliers
        x = x.to(dtype)
        bias = torch.randn(shape[0], device="cuda").to(dtype) if index % 3 else None
        check(multiply(x, weight, bias), x, weight, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROUNDING)
def test_every_plan_comes_within_rounding(dtype: torch.dtype) -> None:
    for capacity, choices in _plans(architecture_of_device(torch.device("cuda"))).items():
        for (_, plan), shape in itertools.product(choices, [(129, 1024), (1040, 4096), (40, 384)]):
            weight = random_weight(shape, device="cuda")
            x = torch.randn(capacity, shape[1], device="cuda").to(dtype)
            check(multiply(x, weight, plan=plan), x, weight, None)


@pytest.mark.gpu
def test_one_row_is_a_column_of_the_weight() -> None:
    """Every input by itself: exact, so that no place is taken for another."""
    weight = random_weight((48, 256), device="cuda")
    for start in range(0, 256, MAX_ROWS):
        x = torch.eye(256, dtype=torch.bfloat16, device="cuda")[start : start + MAX_ROWS]
        assert torch.equal(multiply(x, weight), weight.dequantize(torch.bfloat16).T[start : start + MAX_ROWS])


@pytest.mark.gpu
def test_every_output_is_written_and_nothing_else() -> None:
    weight = random_weight((130, 1024), device="cuda")  # an even number, so that rows begin at whole words
    whole = torch.full((24, 136), torch.nan, dtype=torch.float16, device="cuda").flatten()
    y = whole[8 : 8 + 17 * 130].view(17, 130)
    launch_w4a16(torch.randn(17, 1024, device="cuda").half(), weight.codes, weight.scale, None, y)
    assert y.isfinite().all()
    assert whole[:8].isnan().all()
    assert whole[8 + 17 * 130 :].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("rows", [65, 100, DIRECT_ROWS, DIRECT_ROWS + 1, 700])
def test_many_rows(rows: int, dtype: torch.dtype) -> None:
    for shape, grouped in (((40, 384), True), ((1000, 4096), True), ((300, 1000), False)):
        weight = random_weight(shape, grouped, "cuda")
        x, bias = torch.randn(rows, shape[1], device="cuda").to(dtype), torch.randn(shape[0], device="cuda").to(dtype)
        check(half_linear(x, weight, bias), x, weight, bias, ROUNDING[dtype] if rows > DIRECT_ROWS else 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROUNDING)
def test_the_written_out_weight_is_the_weight(dtype: torch.dtype) -> None:
    for shape, grouped in (*zip(SHAPES[:5], itertools.repeat(True)), *zip(ROW_SHAPES, itertools.repeat(False))):
        weight = random_weight(shape, grouped, "cuda")
        assert torch.equal(launch_dequantize(weight.codes, weight.scale, shape[1], dtype), weight.dequantize(dtype))


@pytest.mark.gpu
@pytest.mark.captures
def test_launches_that_overlap_give_the_same() -> None:
    weight = random_weight((4096, 1024), device="cuda")
    for rows in (1, 8, 16, 40):
        inputs = [torch.randn(rows, 1024, device="cuda").half() for _ in range(8)]
        expected = [half_linear(x, weight) for x in inputs]
        half_linear(inputs[0] + 0, weight)
        graph, results = torch.cuda.CUDAGraph(), []
        torch.cuda.synchronize()
        with overlapping_launches(), torch.cuda.graph(graph):
            for x in inputs:  # each product's input is written just before it
                results.append(half_linear(x + 0, weight))
        for y in results:
            y.fill_(float("nan"))
        graph.replay()
        for y, same in zip(results, expected, strict=True):
            assert torch.equal(y, same)


@pytest.mark.gpu
def test_refusals() -> None:
    weight = random_weight((40, 384), device="cuda")
    x = torch.zeros(2, 384, dtype=torch.float16, device="cuda")
    with pytest.raises(KernelError, match="the kernel takes float16 or bfloat16"):
        half_linear(x.float(), weight)
    with pytest.raises(KernelError, match="3 groups of 128 for 256 input features"):
        half_linear(x[:, :256].contiguous(), weight)
    with pytest.raises(KernelError, match="201 columns, and the kernel reads 8 at a time"):
        half_linear(torch.zeros(2, 201, dtype=torch.float16, device="cuda"), random_weight((40, 201), False, "cuda"))
    with pytest.raises(KernelError, match="not contiguous"):
        half_linear(x.T.contiguous().T, weight)
    with pytest.raises(KernelError, match="bias is float32"):
        half_linear(x, weight, torch.zeros(40, device="cuda"))
    with pytest.raises(KernelError, match="packed codes has shape"):
        half_linear(x, HalfWeight(weight.codes[:2], weight.scale, weight.shape))
