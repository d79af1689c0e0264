"""Look-up-table weights: their layout, the operator's definition, what it refuses, and the kernel against float64."""

import pytest
import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.launch.overlap import overlapping_launches
from rotquant.kernels.products.lut import (
    LutWeight,
    choose_plan,
    launch_dequantize,
    lut_linear,
    sources,
    spread,
    spread_features,
    spread_weight,
    table_shapes,
)

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")

#: (out, in): fewer rows than a strip, an odd number of groups, Llama projections.
SHAPES = [(1, 128), (16, 128), (40, 384), (300, 896), (1000, 4096), (4096, 4096), (272, 11008), (5120, 13824)]
FLOATS = [torch.float16, torch.bfloat16]


def random_weight(shape: tuple[int, int], device: str = "cpu") -> LutWeight:
    """Sorted levels of the size of a weight, codes at random."""
    codes = torch.randint(0, 4, shape, dtype=torch.uint8, device=device)
    levels = 0.02 * torch.randn(shape[0], shape[1] // 128, 4, device=device)
    return LutWeight.pack(codes, levels.sort().values)


def random_codes(rows: int, columns: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    codes = torch.randint(-8, 8, (rows, columns), dtype=torch.int8, device=device)
    return codes, torch.rand(rows, device=device) + 0.1


def product(x: Tensor, weight: LutWeight, row_scale: Tensor | None = None) -> Tensor:
    """In float64, from the definition of the weight."""
    y = x.double() @ weight.dequantize(torch.float64).T
    return y if row_scale is None else y * row_scale.double()[:, None]


def deviation(y: Tensor, expected: Tensor) -> float:
    return ((y.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("shape", SHAPES[:4])
def test_a_packed_weight_unpacks_to_itself(shape: tuple[int, int]) -> None:
    codes = torch.randint(0, 4, shape, dtype=torch.uint8)
    levels = torch.randn(shape[0], shape[1] // 128, 4)
    weight = LutWeight.pack(codes, levels)
    assert (weight.codes.shape, weight.table.shape) == table_shapes(*shape)
    unpacked = weight.unpack()
    assert torch.equal(unpacked[0], codes)
    assert torch.equal(unpacked[1], levels.half())


def test_a_lane_owns_what_the_layout_says() -> None:
    codes = torch.randint(0, 4, (32, 512), dtype=torch.uint8)
    levels = torch.randn(32, 4, 4)
    weight = LutWeight.pack(codes, levels)
    for strip, group, g, t in ((0, 0, 0, 0), (1, 2, 5, 2), (1, 3, 7, 3)):
        words = weight.codes[strip, group, 4 * g + t].view(torch.int32).tolist()
        for half in range(2):
            row = 16 * strip + g + 8 * half
            assert torch.equal(weight.table[strip, group, g, half], levels[row, group].half())
            for r, byte in ((0, 0), (3, 1), (7, 3)):
                low, high = (words[2 * half + bit] >> (8 * byte + r) & 1 for bit in range(2))
                assert codes[row, 128 * group + 32 * t + 4 * r + byte] == low + 2 * high


@pytest.mark.parametrize("shape", SHAPES[:4])
def test_the_reference_is_the_product_of_levels(shape: tuple[int, int]) -> None:
    weight = random_weight(shape)
    codes, scale = random_codes(3, shape[1])
    bias = torch.randn(shape[0])
    y = lut_linear(codes, weight, scale, bias, torch.float32)
    torch.testing.assert_close(y, (product(codes, weight, scale) + bias).float())
    x = torch.randn(3, shape[1], dtype=torch.bfloat16)
    torch.testing.assert_close(lut_linear(x, weight, dtype=torch.bfloat16), product(x, weight).bfloat16())


@pytest.mark.unflipped  # torch.library.opcheck has dispatch modes of its own
def test_the_operator_has_a_shape_rule() -> None:
    weight = random_weight((40, 384))
    codes, scale = random_codes(3, 384)
    for x, row_scale in ((codes, scale), (codes.half(), None)):
        arguments = (x, row_scale, weight.codes, weight.table, None, 40, torch.float16)
        torch.library.opcheck(torch.ops.rotquant.w2_linear.default, arguments)


def test_packing_refuses_what_it_cannot_hold() -> None:
    codes = torch.zeros(4, 256, dtype=torch.uint8)
    with pytest.raises(KernelError, match="takes uint8"):
        LutWeight.pack(codes.to(torch.int8), torch.zeros(4, 2, 4))
    with pytest.raises(KernelError, match="130 is no multiple"):
        LutWeight.pack(torch.zeros(4, 130, dtype=torch.uint8), torch.zeros(4, 1, 4))
    with pytest.raises(KernelError, match=r"codes of shape \(4, 256\) take \(4, 2, 4\)"):
        LutWeight.pack(codes, torch.zeros(4, 1, 4))


@pytest.mark.parametrize(("ins", "group_size"), [(384, 128), (512, 256), (192, 64), (344, 8), (400, 200), (300, 300)])
def test_groups_of_any_size_are_spread(ins: int, group_size: int) -> None:
    codes = torch.randint(0, 4, (40, ins), dtype=torch.uint8)
    levels = torch.randn(40, ins // group_size, 4).half()
    dense = levels.double().gather(2, codes.unflatten(1, (-1, group_size)).long()).flatten(1)
    weight = LutWeight.pack(*spread_weight(codes, levels))
    x, scale = random_codes(3, ins)
    wide = spread(x, group_size)
    assert wide.shape[1] == weight.shape[1] == spread_features(ins, group_size)
    assert (wide is x) == (group_size % 128 == 0)
    y = lut_linear(wide, weight, scale, None, torch.float32)
    torch.testing.assert_close(y, (x.double() @ dense.T * scale.double()[:, None]).float())


#: Strips of 16 output features and groups of 128 inputs: small ones, Llama 7B to 70B.
PLANNED = [(1, 2), (64, 32), (256, 32), (896, 32), (256, 112), (512, 224), (1792, 64)]


@pytest.mark.parametrize("dtype", [torch.int8, *FLOATS])
@pytest.mark.parametrize(("strips", "groups"), PLANNED)
def test_plans_fit_and_are_compiled_in_tests(strips: int, groups: int, dtype: torch.dtype) -> None:
    compiled = {instance for source in sources("sm_90a") for instance in source.instances}
    for rows in range(1, 9):
        plan = choose_plan(dtype, rows, strips, groups, 132)
        assert plan.shared_bytes(strips, groups) <= 99 * 1024  # of the smallest supported GPU
        assert plan.instance in compiled


def test_too_many_inputs_are_refused() -> None:
    with pytest.raises(KernelError, match="131072 input features do not fit"):
        choose_plan(torch.float16, 1, 256, 1024, 132)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 17, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_codes(shape: tuple[int, int], rows: int) -> None:
    weight = random_weight(shape, "cuda")
    codes, scale = random_codes(rows, shape[1], "cuda")
    bias = torch.randn(shape[0], device="cuda")
    expected = product(codes, weight, scale) + bias.double()
    # Sums over groups are exact integers; a few hundred float32 additions follow (more in the library's product).
    assert deviation(lut_linear(codes, weight, scale, bias, torch.float32), expected) < (1e-6 if rows <= 32 else 1e-5)
    # float16 rounds each value by at most 2^-11 of itself.
    assert deviation(lut_linear(codes, weight, scale[:1].contiguous()), product(codes, weight, scale[:1])) < 2**-11


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 17])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_floats(shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    weight = random_weight(shape, "cuda")
    x = torch.randn(rows, shape[1], device="cuda")
    x[:, ::97] *= 300  # outliers: digits are under the largest value of a group
    x = x.to(dtype)
    y = lut_linear(x, weight, dtype=torch.float32)
    # Sums are float32 and may cancel. Beyond 8 rows levels are rounded to the type of x: of bfloat16's
    # 8 significant bits each is moved by at most 2^-8 of itself.
    tolerance = 2**-8 if rows > 8 and dtype == torch.bfloat16 else 1e-6
    magnitudes, levels = x.double().abs(), weight.dequantize(torch.float64).abs()
    bound = tolerance * (magnitudes @ levels.T)
    if rows <= 8:
        # Half a step for each value, a step being at most 2^-21 of its group's largest, and as much again for float32
        # sums of digits, of which the highest are negative.
        largest = magnitudes.unflatten(1, (-1, 128)).amax(2)
        bound += 2**-21 * (largest @ levels.unflatten(1, (-1, 128)).sum(2).T)
    assert (y - product(x, weight)).norm() < bound.norm()


@pytest.mark.gpu
def test_every_range_of_floats_is_represented() -> None:
    weight = random_weight((64, 1024), "cuda")
    for dtype, size in ((torch.float16, 6e4), (torch.float16, 1e-7), (torch.bfloat16, 1e30), (torch.bfloat16, 1e-30)):
        x = (torch.rand(2, 1024, device="cuda") * size).to(dtype)
        assert deviation(lut_linear(x, weight, dtype=torch.float32), product(x, weight)) < 1e-5
    assert lut_linear(torch.zeros(1, 1024, dtype=torch.float16, device="cuda"), weight).eq(0).all()


@pytest.mark.gpu
def test_what_is_no_number_gives_no_number() -> None:
    weight = random_weight((64, 1024), "cuda")
    x = torch.randn(2, 1024, dtype=torch.float16, device="cuda")
    for bad in (float("inf"), float("nan")):
        x[1, 77] = bad
        assert lut_linear(x, weight).isnan().all(1).tolist() == [False, True]
    codes, scale = random_codes(1, 1024, "cuda")
    codes[0, 500] = 9
    assert lut_linear(codes, weight, scale).isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_written_out_weight_is_the_weight(dtype: torch.dtype) -> None:
    for shape in SHAPES[:5]:
        weight = random_weight(shape, "cuda")
        assert torch.equal(launch_dequantize(weight.codes, weight.table, *shape, dtype), weight.dequantize(dtype))


@pytest.mark.gpu
@pytest.mark.captures
def test_launches_that_overlap_give_the_same() -> None:
    weight = random_weight((4096, 1024), "cuda")
    inputs = [random_codes(1, 1024, "cuda") for _ in range(8)]
    expected = [lut_linear(codes, weight, scale) for codes, scale in inputs]
    graph, results = torch.cuda.CUDAGraph(), []
    torch.cuda.synchronize()
    with overlapping_launches(), torch.cuda.graph(graph):
        for codes, scale in inputs:  # each product's input is written just before it
            results.append(lut_linear(codes + 0, weight, scale + 0))
    for y in results:
        y.fill_(float("nan"))
    graph.replay()
    for y, same in zip(results, expected, strict=True):
        assert torch.equal(y, same)


@pytest.mark.gpu
def test_refusals() -> None:
    weight = random_weight((40, 384), "cuda")
    codes, scale = random_codes(2, 384, "cuda")
    with pytest.raises(KernelError, match="int8 activations take a row scale"):
        lut_linear(codes, weight)
    with pytest.raises(KernelError, match="floating-point activations take none"):
        lut_linear(codes.half(), weight, scale)
    with pytest.raises(KernelError, match="the kernel takes int8 or float16 or bfloat16"):
        lut_linear(codes.float(), weight)
    with pytest.raises(KernelError, match="groups of 128"):
        lut_linear(codes[:, :200].contiguous(), weight, scale)
    with pytest.raises(KernelError, match="packed codes has shape"):
        lut_linear(codes[:, :128].contiguous(), weight, scale)
    with pytest.raises(KernelError, match="not contiguous"):
        lut_linear(codes.T.contiguous().T, weight, scale)
    with pytest.raises(KernelError, match="2 rows take 2, or 1"):
        lut_linear(codes, weight, torch.ones(3, device="cuda"))
    with pytest.raises(KernelError, match="float16, bfloat16 or float32"):
        lut_linear(codes, weight, scale, dtype=torch.float64)
    with pytest.raises(KernelError, match="multiple of 16 bytes"):
        lut_linear(torch.empty(2 * 384 + 1, dtype=torch.int8, device="cuda")[1:].view(2, 384), weight, scale)
