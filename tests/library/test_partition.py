"""RCP's quantizers of groups: by the equations, their gradients by autograd and by differences, and at their ends."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rotquant.tensors.normal_float import (
    float_centre,
    float_range,
    float_table,
    normal_float,
    normal_float_asymmetric,
    normal_float_reference,
)
from rotquant.tensors.partition import (
    Spacing,
    StraightThrough,
    ldp,
    ldp_reference,
    ldp_table,
    partitions,
    ramp,
    relative_levels,
    thresholds,
)
from rotquant.tensors.value_range import (
    ValueRange,
    clipped_range,
    dynamic_range,
    uniform,
    uniform_codes,
    uniform_reference,
)

ROWS, GROUPS, SIZE = 3, 4, 16
#: logit(1/3) and logit(1/2): three equal partitions.
UNIFORM = (torch.logit(torch.tensor(1 / 3, dtype=torch.float64)), torch.tensor(0.0, dtype=torch.float64))
OPTIONS = [(kind, spacing) for kind in ("step", "ramp") for spacing in ("partition", "uniform")]


def view_of(seed: int, *, ties: bool = False) -> Tensor:
    view = torch.randn(ROWS, GROUPS, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if ties:  # three smallest and two largest elements in every group
        view[..., :3], view[..., 3:5] = view.amin(-1, keepdim=True), view.amax(-1, keepdim=True)
    return view.requires_grad_()


def parameters(seed: int) -> tuple[Tensor, ...]:
    """gamma, beta, s1, s2: shares of the range about 0.9, partitions of which none is uniform."""
    drawn = 0.7 * torch.randn(4, ROWS, GROUPS, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    centres = torch.tensor([2.0, 2.0, -0.7, 0.0], dtype=torch.float64).view(4, 1, 1, 1)
    return tuple(part.requires_grad_() for part in drawn + centres)


def gradients(value: Tensor, arguments: tuple[Tensor, ...], weights: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, arguments, weights)


def close(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], tolerance: float) -> None:
    for index, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance, msg=lambda m, i=index: f"{i}: {m}")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "spacing"), OPTIONS)
def test_partitioning_is_its_equations_and_its_backward_their_derivative(
    seed: int, kind: StraightThrough, spacing: Spacing
) -> None:
    arguments = (view_of(seed, ties=seed == 1), *parameters(seed))
    value, reference = (rule(*arguments, kind, spacing) for rule in (ldp, ldp_reference))
    close((value,), (reference,), 1e-14)
    weights = torch.randn(value.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 9))
    # Sums of 16 terms of float64 about one: a few of its last bits, 2e-16 each.
    close(gradients(value, arguments, weights), gradients(reference, arguments, weights), 1e-13)


@pytest.mark.parametrize("spacing", ["partition", "uniform"])
def test_the_ramps_backward_is_what_differences_of_the_smoothed_quantizer_say(spacing: Spacing) -> None:
    """Smoothed about the point where it stands: every step is as high as it is there, and moves as its ramp does."""
    arguments = (view_of(5), *parameters(6))
    weights = torch.randn(ROWS, GROUPS, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    found = gradients(ldp(*arguments, "ramp", spacing), arguments, weights)

    def ramps_and_steps(view: Tensor, gamma: Tensor, beta: Tensor, s1: Tensor, s2: Tensor) -> tuple[Tensor, Tensor]:
        low, high = clipped_range(view, gamma, beta)
        x, p = ((view - low) / (high - low)).clamp(0, 1).unsqueeze(-1), partitions(s1, s2).unsqueeze(-2)
        return ramp(x, thresholds(p), p), (x > thresholds(p)).double()

    start, steps = ramps_and_steps(*arguments)
    held = (steps - start).detach()

    def smoothed(view: Tensor, gamma: Tensor, beta: Tensor, s1: Tensor, s2: Tensor) -> Tensor:
        low, high = clipped_range(view, gamma, beta)
        rise = ramps_and_steps(view, gamma, beta, s1, s2)[0] + held
        return low + (high - low) * (
            rise * relative_levels(thresholds(partitions(s1, s2)), spacing).diff().unsqueeze(-2)
        ).sum(-1)

    close((smoothed(*arguments),), (ldp(*arguments, "ramp", spacing),), 1e-14)
    step = 1e-6  # central: rounding of 1e-16 / 1e-6, curvature of 1e-12; no element lies so near to an end of a ramp

    def objective(index: int, place: int, change: float) -> float:
        moved = [argument.detach().clone() for argument in arguments]
        moved[index].view(-1)[place] += change
        return (smoothed(*moved) * weights).sum().item()

    for index, gradient in enumerate(found):
        for place in range(gradient.numel()):
            difference = (objective(index, place, step) - objective(index, place, -step)) / (2 * step)
            assert gradient.view(-1)[place].item() == pytest.approx(difference, rel=1e-6, abs=1e-7), (index, place)


def test_a_weights_gradient_is_one_inside_the_clips_and_zero_outside() -> None:
    """As the paper has it. The smallest and the largest weight have that of the range besides."""
    view, (gamma, beta, s1, s2) = view_of(1), parameters(1)
    low, high = clipped_range(view, gamma, beta)
    ours = gradients(ldp(view, gamma, beta, s1, s2), (view,), torch.ones_like(view))[0]
    others = (view != view.amin(-1, keepdim=True)) & (view != view.amax(-1, keepdim=True))
    expected = ((view > low) & (view < high)).double()
    assert 0 < (1 - expected)[others].sum() < others.sum() / 2
    close((ours[others],), (expected[others],), 1e-14)


@pytest.mark.parametrize("spacing", ["partition", "uniform"])
def test_codes_rise_with_the_weight_and_the_ends_map_to_the_clips(spacing: Spacing) -> None:
    gamma, beta, s1, s2 = parameters(2)
    view = view_of(2).detach().sort(-1).values
    value_range = clipped_range(view, gamma, beta)
    table = ldp_table(value_range, s1, s2, spacing)
    codes = table.encode(view)
    assert codes.dtype == torch.uint8
    assert (codes.diff(dim=-1) >= 0).all()
    assert set(codes.unique().tolist()) == {0, 1, 2, 3}
    assert (table.levels.diff(dim=-1) > 0).all()
    value = ldp(view, gamma, beta, s1, s2, spacing=spacing)
    close((value[..., :1], value[..., -1:]), (value_range.low, value_range.high), 1e-14)  # low + (high - low), rounded
    assert torch.equal(value, table.decode(codes, torch.float64))


def test_equal_partitions_are_uniform_quantization_over_the_clipped_range() -> None:
    """Eq. 1's grid of four points, but that its first point is the end of the range and no multiple of the step."""
    view, (gamma, beta, *_) = view_of(3), parameters(3)
    s1, s2 = (torch.full_like(gamma, start.item()) for start in UNIFORM)
    close((partitions(s1, s2),), (torch.full((ROWS, GROUPS, 3), 1 / 3, dtype=torch.float64),), 1e-15)
    low, high = clipped_range(view, gamma, beta)
    x = ((view - low) / (high - low)).clamp(0, 1)
    for spacing in ("partition", "uniform"):
        close((ldp(view, gamma, beta, s1, s2, spacing=spacing),), (low + (high - low) * (3 * x).round() / 3,), 1e-14)


def test_thresholds_are_the_partitions_centres_and_levels_lie_between_them() -> None:
    """By the recursion that Eq. 8 prints, and Eq. 11."""
    p = partitions(*parameters(4)[2:])
    close((p.sum(-1),), (torch.ones(ROWS, GROUPS, dtype=torch.float64),), 1e-15)
    t = [p[..., 0] / 2]
    for i in (1, 2):
        t.append(t[-1] + (p[..., i - 1] + p[..., i]) / 2)
    close((thresholds(p),), (torch.stack(t, -1),), 1e-15)
    levels = [torch.zeros_like(t[0]), (t[0] + t[1]) / 2, (t[1] + t[2]) / 2, torch.ones_like(t[0])]
    close((relative_levels(thresholds(p)),), (torch.stack(levels, -1),), 1e-15)


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("learned", [False, True])
def test_uniform_rounding_is_eq_1_and_its_backward_the_derivative(bits: int, learned: bool) -> None:
    view, (gamma, beta, *_) = view_of(8), parameters(8)

    def value_range() -> ValueRange:
        return clipped_range(view, gamma, beta) if learned else dynamic_range(view)

    arguments = (view, gamma, beta) if learned else (view,)
    value, reference = (rule(view, value_range(), bits) for rule in (uniform, uniform_reference))
    close((value,), (reference,), 1e-13)
    weights = torch.randn(value.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    close(gradients(value, arguments, weights), gradients(reference, arguments, weights), 1e-12)
    codes, levels = uniform_codes(view.detach(), value_range(), bits)
    assert codes.max() == 2**bits - 1
    assert torch.equal(levels.gather(-1, codes.long()), value)


def test_the_table_of_three_bits_is_the_published_one() -> None:
    """BitDistiller's and AFPQ's eight values, as code prints them; four bits are QLoRA's."""
    published = [-1.0, -0.5350227355957031, -0.2469314038753510, 0.0, 0.1833375245332718, 0.3819939494132996]
    published += [0.6229856610298157, 1.0]
    # They were computed in float32 from scipy's quantiles.
    close((normal_float(3),), (torch.tensor(published, dtype=torch.float64),), 1e-6)
    assert normal_float(4)[[1, 6, 8, 14]].tolist() == pytest.approx(
        [-0.6961928, -0.09105004, 0.07958030, 0.72295684], abs=2e-4
    )  # QLoRA's outermost quantile is rounded otherwise in the fourth digit


@pytest.mark.parametrize("seed", range(3))
def test_normal_float_around_a_learned_centre_is_its_equations(seed: int) -> None:
    view, (gamma, beta, _, s1) = view_of(seed, ties=seed == 1), parameters(seed)
    arguments = (view, gamma, beta, s1)

    def quantized(rule: Callable[[Tensor, ValueRange, Tensor], Tensor]) -> Tensor:
        value_range = clipped_range(view, gamma, beta)
        return rule(view, value_range, float_centre(value_range, s1))

    value, reference = quantized(normal_float_asymmetric), quantized(normal_float_reference)
    close((value,), (reference,), 1e-14)
    weights = torch.randn(value.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 9))
    close(gradients(value, arguments, weights), gradients(reference, arguments, weights), 1e-13)


def test_asymmetric_normal_float_scales_either_side_by_its_own_extreme() -> None:
    """AFPQ: the positive weights over their maximum, the negative over their minimum's size, each to the nearest."""
    view = view_of(4).detach()
    table = normal_float(3)
    expected = torch.empty_like(view)
    for row in range(ROWS):
        for group in range(GROUPS):
            elements = view[row, group]
            for i, w in enumerate(elements.tolist()):
                scale = elements.max().item() if w > 0 else -elements.min().item()
                side = [v for v in table.tolist() if v * w >= 0]
                expected[row, group, i] = scale * min(side, key=lambda v, w=w, s=scale: abs(w / s - v))
    value_range = float_range(view)
    value = normal_float_asymmetric(view, value_range, torch.zeros_like(value_range.low))
    close((value,), (expected,), 1e-14)
    codes = float_table(value_range, torch.zeros_like(value_range.low)).encode(view.sort(-1).values)
    assert (codes.diff(dim=-1) >= 0).all()
    assert codes.amin(-1).eq(0).all()
    assert codes.amax(-1).eq(7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("constant", [0.0, 0.25, -3.0, 1e30, 1e-30])
def test_a_group_of_one_value_and_extreme_parameters_give_finite_values_and_gradients(
    constant: float, dtype: torch.dtype
) -> None:
    view = torch.full((2, 3, 8), constant, dtype=dtype, requires_grad=True)
    for size in (0.0, 5.0, 60.0, -60.0):
        four = tuple(torch.full((2, 3, 1), size, dtype=dtype, requires_grad=True) for _ in range(4))
        value_range = clipped_range(view, *four[:2])
        zeros = torch.zeros_like(value_range.low)
        values = {
            **{str(option): ldp(view, *four, *option) for option in OPTIONS},
            "clipped": uniform(view, value_range, 2),
            "range": uniform(view, dynamic_range(view), 2),
            "nf3": normal_float_asymmetric(view, float_range(view), zeros),
            "nf3 centred": normal_float_asymmetric(view, value_range, float_centre(value_range, four[2])),
        }
        for name, value in values.items():
            found = torch.autograd.grad(
                value, (view, *four), torch.ones_like(value), allow_unused=True, retain_graph=True
            )
            for part in (value, *(gradient for gradient in found if gradient is not None)):
                assert part.isfinite().all(), (name, size)
        assert torch.allclose(values["range"], view)
        assert torch.allclose(values["nf3"], view)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_the_arithmetic_of_float32_and_gradients_have_their_arguments_types(
    dtype: torch.dtype,
) -> None:
    view = view_of(11).detach().to(dtype).requires_grad_()
    four = tuple(part.detach().float().requires_grad_() for part in parameters(11))
    value = ldp(view, *four)
    assert value.dtype == dtype
    # Rounded once more for bfloat16; no element of these lies within float32's last bits of a threshold.
    exact = ldp_reference(view.detach().double(), *(part.double() for part in four))
    torch.testing.assert_close(value.double(), exact, rtol=1e-6 if dtype == torch.float32 else 4e-3, atol=1e-6)
    found = torch.autograd.grad(value.float().sum(), (view, *four))
    assert [part.dtype for part in found] == [dtype, *[torch.float32] * 4]
