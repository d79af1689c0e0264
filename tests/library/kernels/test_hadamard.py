"""The Hadamard operator: its reference, its shape rule, and on a GPU every kernel against float64."""

import pytest
import torch

from rotquant.foundation.errors import KernelError
from rotquant.kernels.hadamard.choice import hadamard_transform, head_hadamard_transform
from rotquant.kernels.hadamard.cuts import TILE, LaunchGrid, cut_of, signs
from rotquant.kernels.hadamard.launch import launch_transform
from rotquant.kernels.hadamard.operator import hadamard
from rotquant.kernels.launch.operators import references
from rotquant.kernels.layouts.codes import Rounding, RowCodes
from rotquant.kernels.layouts.weights import unpack_rows
from rotquant.kernels.rows.activations import hadamard_quantize
from rotquant.tensors import hadamard as reference
from rotquant.tensors.hadamard import HadamardSizeError, hadamard_matrix

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")

#: Every kernel and way through it: tensor-core strips and dense factors, several short rows to a tile, shared memory.
SIZES = [1, 2, 12, 40, 64, 128, 256, 448, 512, 688, 768, 864, 1024, 2048, 3072, 4096, 5120, 6656, 8192, 11008, 12288]
LARGE_SIZES = [13824, 14336, 17920, 18944, 28672]
HEADS = [(32, 128), (40, 128), (28, 128), (64, 128), (32, 64), (12, 64), (24, 80), (4, 16)]

#: Relative error of a result rounded once: 2^-11 at most for float16, 2^-8 for bfloat16, four tenths of it on average.
#: The kernels' float32 sums, parts of them in pairs of tf32 numbers of 21 bits, add a hundredth of that.
TOLERANCE = {torch.float16: 2.5e-4, torch.bfloat16: 2e-3, torch.float32: 1e-6}


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return ((result.double() - exact.double()).norm() / exact.double().norm()).item()


def rounding_bound(result: torch.Tensor) -> float:
    """The largest error of a result. The average says nothing of a few elements: there the bound of one rounding."""
    return TOLERANCE[result.dtype] * (1 if result.numel() >= 1000 else 2.2)


def exact_transform(x: torch.Tensor, heads: int, inverse: bool) -> torch.Tensor:
    if heads:
        return reference.head_hadamard_transform(x.double(), heads, inverse=inverse)
    return reference.hadamard_transform(x.double(), inverse=inverse)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("n", [64, 160, 688])
def test_the_reference_is_the_product_with_the_matrix(n: int, dtype: torch.dtype, inverse: bool) -> None:
    x = torch.randn(5, n).to(dtype)
    matrix = hadamard_matrix(n) * n**-0.5
    y = hadamard(x, 0, inverse, False)
    assert y.dtype == dtype
    assert error(y, x.double() @ (matrix.T if inverse else matrix)) < TOLERANCE[dtype]


def test_heads_are_mixed_as_the_library_mixes_them() -> None:
    x = torch.randn(3, 12 * 16)
    torch.testing.assert_close(hadamard(x, 12, False, False), head_hadamard_transform(x, 12))


def test_half_arithmetic_rounds_to_float16() -> None:
    x = torch.randn(3, 1024)
    assert 1e-5 < error(hadamard(x, 0, False, True), exact_transform(x, 0, False)) < 5e-3


@pytest.mark.unflipped  # torch.library.opcheck has dispatch modes of its own
def test_the_operator_has_a_shape_rule() -> None:
    for heads in (0, 4):
        torch.library.opcheck(torch.ops.rotquant.hadamard.default, (torch.randn(3, 64), heads, False, False))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("order", "blocks_of"), [(28, 28), (16, 4), (40, 40), (172, 172)])
def test_sign_tables_hold_the_left_factor_as_lanes_read_it(order: int, blocks_of: int, inverse: bool) -> None:
    """Decoded as the kernel decodes them: position p of a word moves to bits 15 and 31 by a shift of p."""
    rows = -(-order // TILE) * TILE
    table = signs(order, blocks_of, inverse, rows, torch.device("cpu"))
    decoded = torch.zeros(rows, rows)
    words = table.view(torch.int32).tolist()
    for tile in range(rows // TILE):
        for step in range(rows // TILE):
            for lane in range(32):
                g, t = divmod(lane, 4)
                for register in range(4):
                    word = (words[tile][step // 4][lane] << (4 * (step % 4) + register)) & 0x80008000
                    row = tile * TILE + g + 8 * (register % 2)
                    column = step * TILE + 2 * t + 8 * (register // 2)
                    decoded[row, column] = -1.0 if word & 0x8000 else 1.0
                    decoded[row, column + 1] = -1.0 if word & 0x80000000 else 1.0
    block = hadamard_matrix(blocks_of, torch.float32)
    left = torch.kron(torch.eye(order // blocks_of), (block if inverse else block.T).contiguous())
    assert torch.equal(decoded[:order, :order][left != 0], left[left != 0])


@pytest.mark.parametrize("dealt", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("units", [1, 3, 17, 132, 700, 32768])
def test_every_row_is_taken_once(units: int, dealt: float) -> None:
    """Shared out as kernels/include/pipeline/row_share.cuh reads it."""
    blocks, share = LaunchGrid(dealt=dealt, run=4).share(units, resident=132)
    taken: list[int] = []
    for block in range(blocks):
        later = block - share["blocks"]
        start = share["even"] + later * share["run"]
        rows = range(start, min(start + share["run"], units))
        if later < 0:
            rows = range(block, share["even"], share["blocks"])
        assert rows
        taken.extend(rows)
    assert sorted(taken) == list(range(units))


def test_cuts_hold_a_whole_row() -> None:
    for n in (1024, 2048, 3072, 4096, 5120, 8192, 11008, 12288, 13824, 14336, 28672):
        for output in ("kSame", "kInt8", "kInt4"):
            for across in (False, True):
                assert cut_of(n, 1, torch.float16, output, across=across).elements == n


def test_heads_and_orders_that_do_not_exist_are_refused() -> None:
    meta = torch.empty(2, 60, device="meta")
    with pytest.raises(KernelError, match="60 columns are not 7 heads"):
        hadamard(meta, 7, False, False)
    with pytest.raises(HadamardSizeError):
        hadamard(torch.empty(2, 6, device="meta"), 0, False, False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("n", SIZES + LARGE_SIZES)
def test_the_kernel_against_float64(n: int, dtype: torch.dtype) -> None:
    for rows, inverse in ((1, False), (3, True), (17, False), (700, True)):
        x = torch.randn(rows, n, device="cuda").to(dtype)
        y = hadamard(x, 0, inverse, False)
        assert error(y, exact_transform(x, 0, inverse)) < rounding_bound(y), (rows, inverse)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("heads", "head_dim"), HEADS)
def test_the_kernel_mixes_heads(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    for rows, inverse in ((1, False), (3, True), (17, False), (700, True)):
        x = torch.randn(rows, heads * head_dim, device="cuda").to(dtype)
        y = hadamard(x, heads, inverse, False)
        assert error(y, exact_transform(x, heads, inverse)) < rounding_bound(y), (rows, inverse)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 1024, 2048, 4096, 5120, 8192, 11008, 12288, 13824, 14336, 28672])
def test_float16_arithmetic_is_float16(n: int) -> None:
    """A rounding to 11 bits for every factor, so several times the error of one."""
    x = torch.randn(17, n, device="cuda").half()
    found = error(hadamard(x, 0, False, True), exact_transform(x, 0, False))
    assert found < 1e-2
    assert n == 64 or found > TOLERANCE[torch.float16]


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("n", [64, 1024, 4096, 5120, 11008, 13824, 14336, 28672])
def test_codes_of_float16_arithmetic(n: int, packed: bool) -> None:
    """Errors of 6e-4 of a value move one code in 200 at most to a neighbour."""
    x = torch.randn(17, n, device="cuda").half()
    codes, scale = hadamard_quantize(x, 0, True, False, 0.9, 4, packed, None)
    with references():
        expected, exact_scale = hadamard_quantize(x.float(), 0, False, False, 0.9, 4, False, None)
    difference = ((unpack_rows(codes) if packed else codes).int() - expected.int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 1e-2
    torch.testing.assert_close(scale, exact_scale, rtol=3e-3, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 2048, 3072, 11008, 14336])
def test_every_element_is_written_and_none_beyond(n: int) -> None:
    """Launched into the middle of a poisoned buffer, over rows that no tile or block divides."""
    rows, guard = 1037, 4096
    x = torch.randn(rows, n, device="cuda").half()
    buffer = torch.full((2 * guard + rows * n,), float("nan"), device="cuda").half()
    launch_transform(x, buffer[guard : guard + rows * n].view(rows, n), heads=0)
    assert buffer[:guard].isnan().all()
    assert buffer[guard + rows * n :].isnan().all()
    assert not buffer[guard : guard + rows * n].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("n", [64, 2048, 4096, 8192, 11008, 14336, 28672])
def test_every_code_is_written_and_none_beyond(n: int, packed: bool) -> None:
    """As above; 100 is no code of four bits. Packed bytes take all values, so only what surrounds them is poisoned."""
    rows, guard = 301, 4096
    x = torch.randn(rows, n, device="cuda").half()
    width, poison = (n // 2, 0x5A) if packed else (n, 100)
    buffer = torch.full((2 * guard + rows * width,), poison, device="cuda", dtype=torch.uint8)
    codes = buffer[guard : guard + rows * width].view(torch.uint8 if packed else torch.int8).view(rows, width)
    scale = torch.full((rows,), float("nan"), device="cuda")
    launch_transform(x, RowCodes(codes, scale, Rounding(0.9, 4, packed, None)), heads=0)
    assert (buffer[:guard] == poison).all()
    assert (buffer[guard + rows * width :] == poison).all()
    assert not scale.isnan().any()
    assert packed or not (codes == poison).any()


@pytest.mark.gpu
def test_the_gradient_on_a_gpu_is_the_opposite_transform() -> None:
    x = torch.randn(5, 5120, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn_like(x)
    hadamard_transform(x).backward(upstream)
    assert error(x.grad, exact_transform(upstream, 0, True)) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.captures
def test_the_operator_is_captured_in_a_graph_and_compiled() -> None:
    x = torch.randn(17, 4096, device="cuda").half()
    expected = hadamard(x, 0, False, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = hadamard(x, 0, False, False)
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, expected)
    compiled = torch.compile(lambda x: hadamard(x, 0, False, False) + 0, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)


@pytest.mark.gpu
def test_what_a_kernel_cannot_read_is_refused() -> None:
    x = torch.randn(4, 8192, device="cuda").half()
    with pytest.raises(KernelError, match="not contiguous"):
        hadamard(x[:, ::2], 0, False, False)
    with pytest.raises(KernelError, match="16 bytes"):
        hadamard(x.flatten()[1 : 1 + 4096].view(1, 4096), 0, False, False)
    with pytest.raises(KernelError, match="float64"):
        hadamard(x.double(), 0, False, False)
    with pytest.raises(KernelError, match="shared memory"):
        hadamard(torch.zeros(1, 2**20, device="cuda"), 0, False, False)


def test_tables_keep_their_place_for_captured_graphs() -> None:
    """However many transforms a process makes, a graph's table stays where it was."""
    device = torch.device("cpu")
    tables = [signs(16, 16, False, rows, device) for rows in range(16, 16 * 301, 16)]
    assert all(signs(16, 16, False, table.shape[0] * 16, device) is table for table in tables)
