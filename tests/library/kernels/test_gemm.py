"""The 4-bit matrix product on tensor cores: exact sums, so its results equal the definition's bit for bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.launch.operators import references
from rotquant.kernels.layouts.weights import K_BLOCK, pack_rows, pack_weight, padded
from rotquant.kernels.products import gemm
from rotquant.kernels.products.linear import PackedWeight, quantized_linear

#: Dynamic shared memory that a block of Hopper can have.
HOPPER_SHARED = 227 * 1024

#: Rows, output features, input features: single elements, tails of every tile, several rounds of them.
SHAPES = [
    (1, 512, 192),
    (3, 40, 64),
    (17, 129, 4096),
    (65, 520, 11008),
    (129, 1032, 832),
    (300, 1000, 1088),
    (1000, 777, 576),
    (5000, 2056, 704),
]


def _arguments(
    shape: tuple[int, int, int],
    *,
    dtype: torch.dtype = torch.float16,
    bits: int = 4,
    bias: bool = False,
    static: bool = False,
    groups: bool = False,
    device: str = "cuda",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Random codes over their whole range, scales within a factor of ten: as `linear.w4_linear` takes them."""
    rows, outs, ins = shape
    largest = 2 ** (bits - 1)
    codes = torch.zeros(rows, padded(ins, K_BLOCK), dtype=torch.int8, device=device)
    codes[:, :ins] = torch.randint(-largest, largest, (rows, ins), device=device)
    weight = pack_weight(torch.randint(-8, 8, (outs, ins), dtype=torch.int8, device=device))
    row_scale = torch.rand(1 if static else rows, device=device) * 0.01 + 0.001
    column_scale = torch.rand(outs, *((ins // 128,) if groups else ()), device=device) * 0.01 + 0.001
    return codes, row_scale, weight, column_scale, torch.randn(outs, device=device).to(dtype) if bias else None


def _both(
    launch: Callable[..., None], arguments: tuple[Tensor | None, ...], outs: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The kernel's result on poisoned memory, and the definition's."""
    rows = arguments[0].shape[0]
    y = torch.full((rows, outs), float("nan"), dtype=dtype, device="cuda")
    launch(*arguments, y)
    with references():
        return y, torch.ops.rotquant.w4_linear(*arguments, outs, dtype)


@pytest.mark.parametrize("tile", gemm.TILES + gemm.GROUPED_TILES, ids=lambda tile: tile.instance)
def test_a_tile_fits_the_shared_memory_of_a_multiprocessor(tile: gemm.Tile) -> None:
    assert tile.shared_bytes <= HOPPER_SHARED


def test_sums_that_may_overflow_are_refused() -> None:
    blocks = gemm.MAX_INNER // K_BLOCK + 1
    weight = torch.zeros(1, blocks, 32, 16, dtype=torch.uint8)
    codes = torch.zeros(65, blocks * K_BLOCK, dtype=torch.int8)
    with pytest.raises(KernelError, match="overflow 32-bit sums"):
        gemm.launch_gemm(codes, torch.ones(65), weight, torch.ones(16), None, torch.empty(65, 16))
    assert 16 * 8 * 128 * gemm.MAX_INNER < 2**31


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_equals_the_definition(shape: tuple[int, int, int], bits: int, dtype: torch.dtype) -> None:
    arguments = _arguments(shape, dtype=dtype, bits=bits, bias=bits == 8)
    assert torch.equal(*_both(gemm.launch_gemm, arguments, shape[1], dtype))


@pytest.mark.parametrize("tile", gemm.TILES + gemm.GROUPED_TILES, ids=lambda tile: tile.instance)
def test_the_boxes_of_a_cluster_hold_every_row_of_a_tile(tile: gemm.Tile) -> None:
    for rows in range(1, 3 * tile.tokens):
        together = tile.cluster * tile.box_rows(rows)
        assert min(rows, tile.tokens) <= together <= tile.tokens
        assert tile.box_rows(rows) % 8 == 0  # the swizzle of shared memory repeats after 8 rows


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES[:7])
@pytest.mark.parametrize("tile", gemm.TILES, ids=lambda tile: tile.instance)
def test_every_tile_equals_the_definition(tile: gemm.Tile, shape: tuple[int, int, int]) -> None:
    arguments = _arguments(shape, static=True)
    assert torch.equal(*_both(lambda *a: gemm.launch_tile(tile, *a), arguments, shape[1], torch.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("launch", [gemm.launch_gemm, gemm.launch_mma])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_activations_and_older_tensor_cores_give_the_same(
    shape: tuple[int, int, int], packed: bool, launch: Callable[..., None]
) -> None:
    codes, *others = _arguments(shape, bias=True)
    arguments = (pack_rows(codes) if packed else codes, *others)
    assert torch.equal(*_both(launch, arguments, shape[1], torch.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("launch", [gemm.launch_gemm, gemm.launch_mma])
@pytest.mark.parametrize("shape", [(1, 128, 128), (17, 129, 4096), (129, 1032, 896), (1000, 777, 1408)])
def test_scales_of_groups_are_applied_in_float32(shape: tuple[int, int, int], launch: Callable[..., None]) -> None:
    arguments = _arguments(shape, groups=True, bits=8)
    y, expected = _both(launch, arguments, shape[1], torch.float32)
    error = (y.double() - expected.double()).norm() / expected.double().norm()
    assert error < 2e-6  # at most one float32 rounding, 6e-8, for each of up to 32 groups


@pytest.mark.gpu
@pytest.mark.captures
def test_the_operator_runs_in_a_cuda_graph_and_under_compile() -> None:
    rows, outs, ins = 100, 200, 320
    weight = PackedWeight.pack(
        torch.randint(-8, 8, (outs, ins), dtype=torch.int8, device="cuda"), torch.rand(outs, device="cuda") + 0.1
    )
    codes = torch.randint(-8, 8, (rows, ins), dtype=torch.int8, device="cuda")
    scale = torch.rand(rows, device="cuda") + 0.1
    expected = quantized_linear(codes, scale, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = quantized_linear(codes, scale, weight)
    y.zero_()
    graph.replay()
    assert torch.equal(y, expected)
    compiled = torch.compile(lambda c, s: quantized_linear(c, s, weight) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(codes, scale), expected + 1)
