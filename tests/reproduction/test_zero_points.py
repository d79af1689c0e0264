"""Zero points of asymmetric ranges: whole ones as the authors' codes have, and the exact one of SpinQuant's Eq. 1."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reproduction.words.describe import settings as words_of
from rotquant.decoder.conversion import precision_of
from rotquant.foundation.errors import RecipeError
from rotquant.recipes.presets import PRESETS, preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import (
    ColumnSplit,
    choose_qparams,
    dequantize,
    fake_quantize,
    fake_quantize_split,
    quantize,
)
from tests.helpers.tensors import tensors


def scheme(bits: int = 4, zero_point: Any = "exact") -> QuantizationScheme:
    return QuantizationScheme(bits=bits, symmetric=False, zero_point=zero_point)


def equation_1(row: list[float], bits: int) -> list[float]:
    """alpha * round((x - beta) / alpha) + beta, alpha = (max - min) / (2^N - 1), beta = min."""
    beta = min(row)
    alpha = (max(row) - beta) / (2**bits - 1)
    return [alpha * round((value - beta) / alpha) + beta if alpha else value for value in row]


@given(x=tensors(), bits=st.integers(2, 8), shift=st.sampled_from([0.0, 10.0, -1e4]))
def test_an_exact_zero_point_is_equation_1(x: torch.Tensor, bits: int, shift: float) -> None:
    x = x + shift
    expected = torch.tensor([equation_1(row, bits) for row in x.reshape(-1, 8).tolist()], dtype=x.dtype)
    size = x.reshape(-1, 8).abs().amax(-1, keepdim=True)
    # Beside a shift a range may be next to nothing; what is left is float64's rounding of the largest number.
    assert ((fake_quantize(x, scheme(bits)).reshape(-1, 8) - expected).abs() <= 1e-9 * size).all()


def test_an_exact_zero_point_keeps_both_ends_of_a_range_that_a_whole_one_moves() -> None:
    x = torch.tensor([[-1.0, 0.3, 2.3], [10.0, 11.0, 15.0]], dtype=torch.float64)
    ends = x[:, [0, 2]]
    assert torch.allclose(fake_quantize(x, scheme())[:, [0, 2]], ends, rtol=1e-12)
    assert not torch.allclose(fake_quantize(x, scheme(zero_point="whole"))[0, [0, 2]], ends[0], rtol=1e-3)
    assert choose_qparams(x, scheme()).scale[1] < choose_qparams(x, scheme(zero_point="whole")).scale[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_pass_is_codes_and_back_bit_for_bit_with_gradients_and_without(dtype: torch.dtype) -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    qparams = choose_qparams(x, scheme())
    codes = quantize(x, qparams, scheme())
    assert codes.dtype == torch.uint8
    expected = dequantize(codes, qparams, scheme(), dtype)
    assert torch.equal(fake_quantize(x, scheme()), expected)
    assert torch.equal(fake_quantize(x.clone().requires_grad_(), scheme()), expected)
    assert torch.equal(fake_quantize(x.clone().requires_grad_(), scheme(), scale_gradients=True), expected)


def test_equal_numbers_stay_what_they_are() -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, 3.0], [-1e-30, -1e-30], [1e30, 1e30]])
    assert torch.allclose(fake_quantize(x, scheme()), x)


def test_outlier_columns_do_not_widen_the_range_of_the_others() -> None:
    x = torch.tensor([[5.0, 6.0, 9.0, 100.0]], dtype=torch.float64)
    split = ColumnSplit(torch.tensor([0, 1, 2, 3]), outliers=1)
    alone = fake_quantize(x[:, :3], scheme())
    assert torch.equal(fake_quantize_split(x, scheme(), split), torch.cat([alone, x[:, 3:]], dim=-1))


def test_no_preset_has_exact_zero_points_unless_asked() -> None:
    assert not any("exact" in recipe().model_dump_json() for recipe in PRESETS.values())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"activations": {"symmetric": True, "zero_point": "exact"}}, "no meaning for a symmetric scheme"),
        ({"weights": {"scheme": {"symmetric": False, "zero_point": "exact"}}}, "weights take zero_point whole"),
    ],
)
def test_where_it_has_no_meaning_it_is_refused_in_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        override(preset("spinquant-hard"), changes, "here")


def test_the_integer_decoder_refuses_a_cache_with_exact_zero_points() -> None:
    cache = {"zero_point": "exact"}
    recipe = override(preset("quarot"), {"keys": cache, "values": cache}, "here")
    with pytest.raises(RecipeError, match="exact zero points, which cannot be converted: the kernels' zero points are"):
        precision_of(recipe)


def test_pages_say_so() -> None:
    recipe = override(preset("spinquant-hard"), {"keys": {"zero_point": "exact"}}, "here")
    assert "4-bit asymmetric with exact zero points per head" in words_of(recipe)
