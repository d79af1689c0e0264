"""The 4-bit linear operator: its layout, its reference, and what it refuses."""

import pytest
import torch

from rotquant.foundation.errors import KernelError
from rotquant.kernels.launch.operators import references
from rotquant.kernels.layouts.weights import K_BLOCK, pack_rows, pack_weight, padded, unpack_rows, unpack_weight
from rotquant.kernels.products.linear import PackedWeight, quantized_linear

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")


@pytest.mark.parametrize("shape", [(1, 5), (16, 64), (17, 65), (40, 688), (128, 864)])
def test_packed_weights_unpack_to_themselves(shape: tuple[int, int]) -> None:
    codes = torch.randint(-8, 8, shape, dtype=torch.int8)
    assert torch.equal(unpack_weight(pack_weight(codes), *shape), codes)


def test_a_lane_owns_what_the_layout_says() -> None:
    codes = torch.randint(-8, 8, (32, 128), dtype=torch.int8)
    packed = pack_weight(codes)
    for g, t, strip, block in ((0, 0, 0, 0), (5, 2, 1, 1), (7, 3, 1, 0)):
        words = packed[strip, block, 4 * g + t].view(4, 4)
        for word in range(4):
            row, column = 16 * strip + g + 8 * (word % 2), 64 * block + 32 * (word // 2) + 4 * t
            low = (words[word].view(torch.int8) << 4) >> 4
            high = words[word].view(torch.int8) >> 4
            assert torch.equal(low, codes[row, column : column + 4])
            assert torch.equal(high, codes[row, column + 16 : column + 20])


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_reference_is_the_product_of_dequantized_operands(packed: bool, groups: bool) -> None:
    rows, outs, ins = 5, 40, 256 if groups else 200
    weight = PackedWeight.pack(
        torch.randint(-8, 8, (outs, ins), dtype=torch.int8), torch.rand(outs, *((2,) if groups else ())) + 0.1
    )
    codes = torch.zeros(rows, padded(ins, K_BLOCK), dtype=torch.int8)
    codes[:, :ins] = torch.randint(-8, 8, (rows, ins))
    scale, bias = torch.rand(rows) + 0.1, torch.randn(outs)
    y = quantized_linear(pack_rows(codes) if packed else codes, scale, weight, bias, torch.float32)
    expected = (codes[:, :ins].double() * scale[:, None]) @ weight.dequantize(torch.float64).T + bias
    torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-4)  # float32 scaling against float64
    assert torch.equal(unpack_rows(pack_rows(codes)), codes)


@pytest.mark.unflipped  # torch.library.opcheck has dispatch modes of its own
def test_the_operator_has_a_shape_rule() -> None:
    weight = PackedWeight.pack(torch.zeros(40, 64, dtype=torch.int8), torch.ones(40))
    torch.library.opcheck(
        torch.ops.rotquant.w4_linear.default,
        (torch.zeros(3, 64, dtype=torch.int8), torch.ones(3), weight.codes, weight.scale, None, 40, torch.float16),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("outs", [1024, 5120])  # few strips and many: up to 64 or up to 32 rows are few
@pytest.mark.parametrize("rows", [0, 1, 32, 33, 64, 65, 127, 128, 129, 200])
def test_every_number_of_rows_gives_the_reference_to_the_bit(rows: int, outs: int) -> None:
    weight = PackedWeight.pack(
        torch.randint(-8, 8, (outs, 640), dtype=torch.int8, device="cuda"), torch.rand(outs, device="cuda") + 0.1
    )
    codes = torch.randint(-8, 8, (rows, 640), dtype=torch.int8, device="cuda")
    scale = torch.rand(rows, device="cuda") + 0.1
    y = quantized_linear(codes, scale, weight)
    with references():
        assert torch.equal(y, quantized_linear(codes, scale, weight))


@pytest.mark.gpu
def test_what_the_kernels_cannot_read_is_refused() -> None:
    weight = PackedWeight.pack(torch.zeros(40, 128, dtype=torch.int8, device="cuda"), torch.ones(40, device="cuda"))
    codes, scale = torch.zeros(3, 128, dtype=torch.int8, device="cuda"), torch.ones(3, device="cuda")
    with pytest.raises(KernelError, match="row scale is on cpu"):
        quantized_linear(codes, scale.cpu(), weight)
    with pytest.raises(KernelError, match="activation codes is float16"):
        quantized_linear(codes.half(), scale, weight)
    with pytest.raises(KernelError, match="100 columns; pad them with zeros to a multiple of 64"):
        quantized_linear(codes[:, :100].contiguous(), scale, weight)
    with pytest.raises(KernelError, match="packed weight has shape"):
        quantized_linear(codes[:, :64].contiguous(), scale, weight)
    with pytest.raises(KernelError, match="not contiguous"):
        quantized_linear(codes.T.contiguous().T, scale, weight)
    with pytest.raises(KernelError, match="3 rows take 3, or 1"):
        quantized_linear(codes, torch.ones(2, device="cuda"), weight)
    with pytest.raises(KernelError, match="float16, bfloat16 or float32"):
        quantized_linear(codes, scale, weight, dtype=torch.float64)
    with pytest.raises(KernelError, match="bias has shape"):
        quantized_linear(codes, scale, weight, torch.ones(41, dtype=torch.float16, device="cuda"))
    with pytest.raises(KernelError, match="multiple of 16 bytes"):
        quantized_linear(torch.zeros(3 * 128 + 1, dtype=torch.int8, device="cuda")[1:].view(3, 128), scale, weight)
