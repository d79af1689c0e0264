"""The 4-bit linear operator: its layout, its reference, and what it refuses."""

import pytest
import torch

from rotquant.kernels.layouts import K_BLOCK, pack_rows, pack_weight, padded, unpack_rows, unpack_weight
from rotquant.kernels.linear import PackedWeight, quantized_linear

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.operators.SlowKernelWarning")


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


def test_the_operator_has_a_shape_rule() -> None:
    weight = PackedWeight.pack(torch.zeros(40, 64, dtype=torch.int8), torch.ones(40))
    torch.library.opcheck(
        torch.ops.rotquant.w4_linear.default,
        (torch.zeros(3, 64, dtype=torch.int8), torch.ones(3), weight.codes, weight.scale, None, 40, torch.float16),
    )
