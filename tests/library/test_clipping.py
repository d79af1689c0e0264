"""Clip search: what it minimises, over which candidates, and that rounding to nearest uses it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rotquant.foundation.errors import RecipeError
from rotquant.recipes.schemes import QuantizationScheme, WeightQuantization
from rotquant.tensors.quantization import ColumnSplit, choose_qparams, fake_quantize
from rotquant.weights.clipping import search_clip
from rotquant.weights.rtn import quantize_rtn
from tests.helpers.last_bits import FlippedLastBits

SCHEMES = [
    QuantizationScheme(bits=4, granularity="channel"),
    QuantizationScheme(bits=3, granularity="channel", symmetric=False),
    QuantizationScheme(bits=4, granularity="group", group_size=8),
    QuantizationScheme(bits=4, granularity="tensor"),
]


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def per_scale(error: torch.Tensor, scheme: QuantizationScheme) -> torch.Tensor:
    if scheme.granularity == "tensor":
        return error.sum()
    if scheme.granularity == "group":
        error = error.unflatten(-1, (-1, scheme.group_size))
    return error.sum(-1, keepdim=True)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.granularity}-{s.symmetric}")
@pytest.mark.parametrize("norm", [2.0, 2.4])
def test_the_ratio_found_is_the_best_of_all_eighty(scheme: QuantizationScheme, norm: float) -> None:
    weight = gaussian(6, 32, dtype=torch.float64)
    ratios = [1 - i / 100 for i in range(80)]
    errors = torch.stack(
        [
            per_scale((fake_quantize(weight, scheme, choose_qparams(weight, scheme, r)) - weight).abs() ** norm, scheme)
            for r in ratios
        ]
    )
    best = torch.tensor(ratios, dtype=torch.float64)[errors.argmin(dim=0)]
    torch.testing.assert_close(search_clip(weight, scheme, norm), best, rtol=0, atol=1e-12)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**16), scheme=st.sampled_from(SCHEMES), rows=st.integers(1, 9))
def test_searching_never_loses_to_not_clipping(seed: int, scheme: QuantizationScheme, rows: int) -> None:
    weight = gaussian(rows, 24, seed=seed)
    searched = fake_quantize(weight, scheme, choose_qparams(weight, scheme, search_clip(weight, scheme, 2.0)))
    plain = fake_quantize(weight, scheme, choose_qparams(weight, scheme, 1.0))
    better = per_scale((searched - weight) ** 2, scheme)
    # ratio 1.0 is a candidate; the sums are taken in another order, hence the last-digit allowance
    assert (better <= per_scale((plain - weight) ** 2, scheme) * (1 + 1e-5)).all()


def test_the_result_does_not_depend_on_how_rows_are_chunked() -> None:
    """Of more elements than a chunk has, rows are searched as each few of them alone."""
    weight = gaussian(2**10, 300, dtype=torch.float64)
    alone = torch.cat([search_clip(rows, SCHEMES[0], 2.4, steps=8) for rows in weight.split(100)])
    torch.testing.assert_close(search_clip(weight, SCHEMES[0], 2.4, steps=8), alone, rtol=0, atol=0)


def test_clips_of_a_ragged_row_are_those_of_each_group_by_itself() -> None:
    weight, row = gaussian(6, 29, dtype=torch.float64), QuantizationScheme(bits=3, granularity="channel")
    scheme = QuantizationScheme(bits=3, granularity="group", group_size=8)
    alone = torch.stack([search_clip(part, row, 2.4) for part in weight.split(8, dim=1)], dim=1)
    assert alone.shape == (6, 4, 1)
    torch.testing.assert_close(search_clip(weight, scheme, 2.4), alone, rtol=0, atol=0)


def test_one_large_weight_in_a_row_is_clipped_but_not_below_the_last_candidate() -> None:
    weight = gaussian(1, 256)
    weight[0, 0] = 1e4
    assert search_clip(weight, SCHEMES[0], 2.0).item() == 1.0  # squared error: losing the large one costs too much
    few_steps = search_clip(gaussian(4, 4096), QuantizationScheme(bits=2, granularity="channel"), 2.0, steps=10)
    assert few_steps.min() >= 0.91 - 1e-6  # ten candidates end at 0.91


def test_a_row_of_zeros_keeps_its_zeros() -> None:
    weight = gaussian(3, 16)
    weight[1] = 0
    quantized = quantize_rtn(weight, WeightQuantization(scheme=SCHEMES[0]))
    assert (quantized.codes[1] == 0).all()
    assert torch.isfinite(quantized.dequantize(torch.float32)).all()


def test_rounding_to_nearest_is_the_quantizer_under_the_searched_ratios() -> None:
    weight = gaussian(12, 32)
    for scheme in SCHEMES:
        searched = quantize_rtn(weight, WeightQuantization(scheme=scheme, clip_norm=2.4))
        qparams = choose_qparams(weight, scheme, search_clip(weight, scheme, 2.4))
        torch.testing.assert_close(
            searched.dequantize(torch.float32), fake_quantize(weight, scheme, qparams), rtol=0, atol=0
        )
        plain = quantize_rtn(weight, WeightQuantization(scheme=scheme, clip_search=False))
        torch.testing.assert_close(plain.dequantize(torch.float32), fake_quantize(weight, scheme), rtol=0, atol=0)


@pytest.mark.parametrize("bits", [8, 16])
def test_outlier_columns_are_kept_in_higher_precision_and_in_their_place(bits: int) -> None:
    weight = gaussian(12, 32)
    permutation = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    split = ColumnSplit(permutation, outliers=8, outlier_bits=bits)
    quantized = quantize_rtn(weight, WeightQuantization(scheme=SCHEMES[2]), split)
    restored = quantized.dequantize(torch.float32)
    error = (restored - weight).abs()
    kept = error[:, split.outlier_columns].max()
    # 8 bits: at most half a step of max|w| / 127
    assert kept == 0 if bits == 16 else kept <= weight.abs().max() / 127 / 2 * 1.001
    reordered = quantize_rtn(weight[:, split.normal_columns], WeightQuantization(scheme=SCHEMES[2]))
    torch.testing.assert_close(restored[:, split.normal_columns], reordered.dequantize(torch.float32), rtol=0, atol=0)
    assert quantized.shape == weight.shape


def test_outliers_that_leave_no_group_are_refused_in_one_sentence() -> None:
    split = ColumnSplit(torch.arange(32), outliers=25)
    with pytest.raises(RecipeError, match=r"group size 8 exceeds the 7 features .*32, less 25 outliers"):
        quantize_rtn(gaussian(4, 32), WeightQuantization(scheme=SCHEMES[2]), split)
    with pytest.raises(RecipeError, match="leave nothing to quantize"):
        quantize_rtn(gaussian(4, 32), WeightQuantization(scheme=SCHEMES[0]), ColumnSplit(torch.arange(32), 32))


def test_no_choice_depends_on_last_bits() -> None:
    """Two of 80 ratios of some of these rows differ in their error by no more: float64 decides, on every machine."""
    weight = torch.randn(4000, 32, generator=torch.Generator().manual_seed(0))
    scheme = QuantizationScheme(bits=4, granularity="channel")
    found = search_clip(weight, scheme, 2.4)
    with FlippedLastBits():
        assert torch.equal(search_clip(weight, scheme, 2.4), found)
    # The candidates themselves are float32's and float64's 1 - k / 100.
    torch.testing.assert_close(search_clip(weight.double(), scheme, 2.4).float(), found, rtol=1e-6, atol=0)
