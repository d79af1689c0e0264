"""The quantization primitives against plain loops in float64, and their properties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rotquant.foundation.errors import RecipeError
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import (
    ColumnSplit,
    QParams,
    check_groups,
    choose_qparams,
    dequantize,
    fake_quantize,
    fake_quantize_split,
    quantize,
)
from tests.helpers.tensors import tensors

#: Ways to quantize the normal columns of a split.
SPLIT_SCHEMES = [
    QuantizationScheme(bits=4),
    QuantizationScheme(bits=4, symmetric=False, granularity="tensor"),
    QuantizationScheme(bits=4, granularity="group", group_size=4),
]
GRANULARITIES = ("tensor", "token", "channel", "group", "head")


@st.composite
def schemes(draw: st.DrawFn, clip_ratios: st.SearchStrategy[float] = st.floats(0.3, 1.0)) -> QuantizationScheme:
    granularity = draw(st.sampled_from(GRANULARITIES))
    symmetric = draw(st.booleans())
    return QuantizationScheme(
        bits=draw(st.integers(2, 8)),
        symmetric=symmetric,
        scale=draw(st.sampled_from(["paper", "full"])) if symmetric else "paper",
        granularity=granularity,
        group_size=draw(st.sampled_from([1, 2, 4, 8])) if granularity in ("group", "head") else None,
        clip_ratio=draw(clip_ratios),
    )


def spread(qparam: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A scale or zero point for every element of `x`, from any granularity's shape."""
    if qparam.ndim == x.ndim + 1:
        groups = qparam.shape[-2]
        return qparam.expand(*qparam.shape[:-1], x.shape[-1] // groups).reshape(x.shape)
    return qparam.expand(x.shape)


def reference_row(row: list[float], scheme: QuantizationScheme) -> tuple[list[int], list[float], float, float]:
    """Codes, values, scale and zero point of one set of numbers that share a scale: the definition, in plain Python."""
    smallest, largest = scheme.code_range
    if scheme.symmetric:
        steps = largest + 0.5 if scheme.scale == "full" else largest
        scale, zero = scheme.clip_ratio * max(abs(value) for value in row) / steps, 0
    else:
        low, high = min(0.0, *row), max(0.0, *row)
        scale = scheme.clip_ratio * (high - low) / largest
        zero = round(-scheme.clip_ratio * low / scale) if scale else 0
    scale = scale or 1.0
    codes = [min(max(round(value / scale) + zero, smallest), largest) for value in row]
    return codes, [(code - zero) * scale for code in codes], scale, zero


@given(x=tensors(), scheme=schemes())
def test_codes_and_values_are_those_of_a_plain_loop(x: torch.Tensor, scheme: QuantizationScheme) -> None:
    qparams = choose_qparams(x, scheme)
    codes = quantize(x, qparams, scheme)
    values = dequantize(codes, qparams, scheme, torch.float64)
    size = {"tensor": x.numel(), "group": scheme.group_size, "head": scheme.group_size}.get(scheme.granularity, 8)
    expected = [reference_row(row, scheme) for row in x.reshape(-1, size).tolist()]
    assert codes.reshape(-1, size).tolist() == [codes for codes, *_ in expected]
    # One float64 rounding apart at most: the loop and torch do the same operations.
    assert torch.allclose(values.reshape(-1, size), torch.tensor([row for _, row, *_ in expected], dtype=torch.float64))


@given(x=tensors(torch.float32), granularity=st.sampled_from(["tensor", "token"]))
def test_floats_are_the_nearest_of_e4m3_and_even_ones_between(x: torch.Tensor, granularity: str) -> None:
    scheme = QuantizationScheme.model_validate({"bits": 8, "type": "float", "granularity": granularity})
    qparams = choose_qparams(x, scheme)
    codes = quantize(x, qparams, scheme)
    patterns = torch.arange(127, dtype=torch.uint8)  # of ascending numbers from 0 to 448
    every = patterns.view(torch.float8_e4m3fn).double()
    found = (codes.double().abs()[..., None] == every).int().argmax(-1)
    wanted = (x.float() / qparams.scale).double().abs()
    distances = (wanted[..., None] - every).abs()
    assert torch.equal(distances.gather(-1, found[..., None])[..., 0], distances.amin(-1))
    tie = (distances == distances.amin(-1, keepdim=True)).sum(-1) > 1
    assert (found[tie] % 2 == 0).all()
    assert torch.equal(fake_quantize(x, scheme), dequantize(codes, qparams, scheme, x.dtype))


@pytest.mark.parametrize("changes", [{"bits": 5}, {"symmetric": False}, {"scale": "full"}])
def test_floats_take_no_other_width_or_range(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="type 'float' takes 8 bits"):
        QuantizationScheme.model_validate({"bits": 8, "type": "float", **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"activations": {"type": "int"}}, "take one type"),
        ({"keys": {"bits": 8, "type": "float", "granularity": "head"}}, "keys take type int"),
        ({"methods": {"gptq": {}}, "calibration": {}}, "gptq knows integers alone"),
    ],
)
def test_floats_go_with_nothing_that_knows_integers_alone(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        override(preset("fp8"), changes, "test")


@given(x=tensors(torch.float32), scheme=schemes())
def test_codes_stay_in_range_and_have_their_type(x: torch.Tensor, scheme: QuantizationScheme) -> None:
    codes = quantize(x, choose_qparams(x, scheme), scheme)
    smallest, largest = scheme.code_range
    assert codes.dtype == (torch.int8 if scheme.symmetric else torch.uint8)
    assert codes.shape == x.shape
    assert smallest <= codes.min()
    assert codes.max() <= largest


@given(x=tensors(), scheme=schemes(clip_ratios=st.just(1.0)))
def test_without_clipping_no_value_moves_by_more_than_half_a_step(x: torch.Tensor, scheme: QuantizationScheme) -> None:
    error = (fake_quantize(x, scheme) - x).abs()
    # A relative 1e-9 for float64 rounding of the scale.
    assert (error <= spread(choose_qparams(x, scheme).scale, x) * (0.5 + 1e-9)).all()


@given(x=tensors(), scheme=schemes())
def test_inside_the_clip_range_no_value_moves_by_more_than_half_a_step(
    x: torch.Tensor, scheme: QuantizationScheme
) -> None:
    qparams = choose_qparams(x, scheme)
    scale = spread(qparams.scale, x)
    zero = 0.0 if qparams.zero_point is None else spread(qparams.zero_point, x)
    smallest, largest = scheme.code_range
    inside = ((smallest - zero) * scale <= x) & (x <= (largest - zero) * scale)
    error = (fake_quantize(x, scheme) - x).abs()
    assert (error <= scale * (0.5 + 1e-9))[inside].all()


@given(x=tensors(), scheme=schemes())
def test_quantizing_twice_with_the_same_scales_is_quantizing_once(x: torch.Tensor, scheme: QuantizationScheme) -> None:
    qparams = choose_qparams(x, scheme)
    once = fake_quantize(x, scheme, qparams)
    assert torch.equal(fake_quantize(once, scheme, qparams), once)


@given(
    x=tensors(torch.float32), scheme=schemes(), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
)
def test_fake_quantization_is_quantize_then_dequantize_bit_for_bit(
    x: torch.Tensor, scheme: QuantizationScheme, dtype: torch.dtype
) -> None:
    x = x.clamp(-1e4, 1e4).to(dtype)
    qparams = choose_qparams(x, scheme)
    expected = dequantize(quantize(x, qparams, scheme), qparams, scheme, dtype)
    assert torch.equal(fake_quantize(x, scheme), expected)
    assert fake_quantize(x, scheme).dtype == dtype
    assert torch.equal(fake_quantize(x.clone().requires_grad_(), scheme), expected), "with gradients"


@given(x=tensors(), scheme=schemes())
def test_zero_stays_zero(x: torch.Tensor, scheme: QuantizationScheme) -> None:
    x[..., 3] = 0.0
    assert (fake_quantize(x, scheme)[..., 3] == 0.0).all()


@given(x=tensors(), bits=st.integers(2, 8), symmetric=st.booleans(), size=st.sampled_from([1, 2, 4, 8]))
def test_groups_are_quantized_as_if_alone(x: torch.Tensor, bits: int, symmetric: bool, size: int) -> None:
    grouped = QuantizationScheme(bits=bits, symmetric=symmetric, granularity="group", group_size=size)
    alone = QuantizationScheme(bits=bits, symmetric=symmetric, granularity="token")
    pieces = [fake_quantize(piece, alone) for piece in x.split(size, dim=-1)]
    assert torch.equal(fake_quantize(x, grouped), torch.cat(pieces, dim=-1))


@pytest.mark.parametrize(
    ("granularity", "group_size", "shape"),
    [
        ("tensor", None, ()),
        ("token", None, (2, 3, 1)),
        ("channel", None, (2, 3, 1)),
        ("group", 4, (2, 3, 2, 1)),
        ("head", 2, (2, 3, 4, 1)),
        ("head", None, (2, 3, 1, 1)),
    ],
)
def test_shapes_of_scales(granularity: str, group_size: int | None, shape: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    scheme = QuantizationScheme(bits=4, symmetric=False, granularity=granularity, group_size=group_size)
    qparams = choose_qparams(x, scheme)
    assert qparams.scale.shape == shape
    assert qparams.zero_point.shape == shape


def test_scales_of_half_precision_input_are_float32() -> None:
    x = torch.ones(2, 4, dtype=torch.float16)
    assert choose_qparams(x, QuantizationScheme(bits=4)).scale.dtype == torch.float32
    assert choose_qparams(x.double(), QuantizationScheme(bits=4)).scale.dtype == torch.float64


def test_symmetric_scale_is_the_largest_magnitude_over_seven_and_clipping_reaches_minus_eight() -> None:
    x = torch.tensor([[-14.0, 3.0]])
    scheme = QuantizationScheme(bits=4)
    assert choose_qparams(x, scheme).scale.item() == 2.0
    assert quantize(x, choose_qparams(x, scheme), scheme).tolist() == [[-7, 2]]  # 1.5 rounds to even
    clipped = QuantizationScheme(bits=4, clip_ratio=0.5)
    assert quantize(x, choose_qparams(x, clipped), clipped).tolist() == [[-8, 3]]


def test_a_clip_ratio_given_as_tensor_acts_per_scale() -> None:
    x = torch.tensor([[7.0, 1.0], [7.0, 1.0]])
    ratios = torch.tensor([[1.0], [0.5]])
    assert choose_qparams(x, QuantizationScheme(bits=4, clip_ratio=0.9), ratios).scale.tolist() == [[1.0], [0.5]]


def test_asymmetric_range_includes_zero_for_input_of_one_sign() -> None:
    scheme = QuantizationScheme(bits=4, symmetric=False)
    x = torch.tensor([[10.0, 15.0], [-10.0, -15.0]])
    qparams = choose_qparams(x, scheme)
    assert qparams.zero_point.flatten().tolist() == [0.0, 15.0]
    assert fake_quantize(x, scheme).tolist() == x.tolist()


@pytest.mark.parametrize("symmetric", [True, False])
def test_tiny_and_zero_rows_give_finite_numbers(symmetric: bool) -> None:
    x = torch.tensor([[0.0, 0.0], [1e-45, -1e-42], [1e38, -2e38]])
    assert fake_quantize(x, QuantizationScheme(bits=4, symmetric=symmetric)).isfinite().all()


def test_nan_input_shows_in_the_output() -> None:
    x = torch.tensor([[1.0, math.nan], [1.0, 2.0]])
    assert fake_quantize(x, QuantizationScheme(bits=4)).isnan().any(dim=-1).tolist() == [True, False]


def test_the_gradient_is_one_inside_the_clip_range_and_zero_outside() -> None:
    x = torch.tensor([[-8.0, -3.3, 0.2, 3.4, 8.0]], requires_grad=True)
    fake_quantize(x, QuantizationScheme(bits=4, clip_ratio=0.5)).backward(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]))
    assert x.grad.tolist() == [[0.0, 2.0, 3.0, 4.0, 0.0]]


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_gradient_of_a_learned_scale_is_the_derivative_with_codes_held_constant(symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    scheme = QuantizationScheme(bits=3, symmetric=symmetric)
    clip = torch.full((3, 1), 0.5, dtype=torch.float64, requires_grad=True)
    qparams = choose_qparams(x, scheme, clip)
    fake_quantize(x, scheme, qparams).sum().backward()
    with torch.no_grad():
        codes, ratio = quantize(x, qparams, scheme).double(), x / qparams.scale
        zero = 0.0 if qparams.zero_point is None else qparams.zero_point
        smallest, largest = scheme.code_range
        clipped = (ratio.round() + zero < smallest) | (ratio.round() + zero > largest)
        # d(code * s)/ds = code - zero, minus x/s where rounding passes the gradient on (LSQ, OmniQuant).
        slope = (codes - zero - torch.where(clipped, 0.0, ratio)).sum(-1, keepdim=True)
        expected = slope * qparams.scale / 0.5
    assert clipped.any(dim=-1).all(), "every row must show both cases"
    assert torch.allclose(clip.grad, expected, atol=1e-12)


def test_input_is_left_alone() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    for granularity, size in (("tensor", None), ("token", None), ("group", 4)):
        fake_quantize(x, QuantizationScheme(bits=4, symmetric=False, granularity=granularity, group_size=size))
    assert torch.equal(x, before)


def test_a_group_larger_than_a_row_is_one_clear_error() -> None:
    scheme = QuantizationScheme(bits=4, granularity="group", group_size=9)
    with pytest.raises(RecipeError, match=r"group size 9 exceeds the 8 features of mlp\.down_proj"):
        check_groups(8, scheme, "mlp.down_proj")
    with pytest.raises(RecipeError, match="group size 9"):
        fake_quantize(torch.ones(2, 8), scheme)


@pytest.mark.parametrize("zero_point", [None, "whole", "exact"])
@pytest.mark.parametrize("features", [1, 5, 16, 19, 24])
def test_a_ragged_row_is_quantized_as_each_of_its_groups_by_itself(features: int, zero_point: str | None) -> None:
    """Codes, scales and values are equal bit for bit, and so are gradients, also those through the scales."""
    size = min(8, features)
    options = {"bits": 3, "symmetric": zero_point is None} | ({"zero_point": zero_point} if zero_point else {})
    scheme = QuantizationScheme(granularity="group", group_size=size, **options)
    alone = QuantizationScheme(granularity="token", **options)
    x = torch.randn(2, 3, features, generator=torch.Generator().manual_seed(features)) + 0.3
    pieces = x.split(size, dim=-1)
    qparams, own = choose_qparams(x, scheme), [choose_qparams(piece, alone) for piece in pieces]
    assert torch.equal(qparams.scale.squeeze(-1), torch.cat([each.scale for each in own], dim=-1))
    codes = quantize(x, qparams, scheme)
    assert torch.equal(codes, torch.cat([quantize(p, q, alone) for p, q in zip(pieces, own, strict=True)], dim=-1))
    values = torch.cat([fake_quantize(piece, alone) for piece in pieces], dim=-1)
    assert torch.equal(fake_quantize(x, scheme), values)
    assert torch.equal(dequantize(codes, qparams, scheme, x.dtype), values)
    both = [x.double().requires_grad_(), x.double().requires_grad_()]
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (fake_quantize(both[0], scheme, scale_gradients=True) * weights).sum().backward()
    parts = [fake_quantize(piece, alone, scale_gradients=True) for piece in both[1].split(size, dim=-1)]
    (torch.cat(parts, dim=-1) * weights).sum().backward()
    assert both[0].grad is not None
    assert both[1].grad is not None
    assert torch.allclose(both[0].grad, both[1].grad, atol=1e-12)  # sums in another order, in float64


@pytest.mark.parametrize("scheme", SPLIT_SCHEMES, ids=lambda scheme: scheme.granularity)
@pytest.mark.parametrize("outlier_bits", [8, 16])
def test_a_column_split_quantizes_two_sets_and_moves_no_column(outlier_bits: int, scheme: QuantizationScheme) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 12, generator=generator) * (1 + 50 * (torch.arange(12) % 3 == 0))
    permutation = torch.cat([torch.tensor([i for i in range(12) if i % 3]), torch.tensor([9, 0, 6, 3])])
    split = ColumnSplit(permutation, outliers=4, outlier_bits=outlier_bits)
    result = fake_quantize_split(x, scheme, split)
    normal, outliers = split.normal_columns, split.outlier_columns
    assert torch.equal(result[:, normal], fake_quantize(x[:, normal], scheme))
    eight = fake_quantize(x[:, outliers], QuantizationScheme(bits=8))
    assert torch.equal(result[:, outliers], eight if outlier_bits == 8 else x[:, outliers])
    # The point of it: normal columns no longer share a scale with ones 50 times as large.
    assert not torch.equal(x, result)
    assert (result - x).norm() < 0.2 * (fake_quantize(x, scheme) - x).norm()


@pytest.mark.parametrize("scheme", SPLIT_SCHEMES, ids=lambda scheme: scheme.granularity)
def test_a_split_is_differentiable_and_leaves_its_input_alone(scheme: QuantizationScheme) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    before = x.detach().clone()
    split = ColumnSplit(torch.tensor([7, 1, 5, 3, 2, 6, 0, 4]), 4, 8)
    fake_quantize_split(x, scheme, split).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 8))
    assert torch.equal(x, before)


def test_static_parameters_are_used_as_given() -> None:
    scheme = QuantizationScheme(bits=4, granularity="tensor", dynamic=False)
    x = torch.tensor([[0.4, 0.6, 100.0]])
    assert fake_quantize(x, scheme, QParams(torch.tensor(1.0))).tolist() == [[0.0, 1.0, 7.0]]
