"""RCP's learnable direct partitioning of 2-bit weights (Choi et al. 2025, Sec. 4.3, Eqs. 7-11), and N2UQ's levels.

A weight comes as a view [rows, groups, size]; whatever belongs to a group is [rows, groups, 1], and its thresholds and
levels [rows, groups, n]. Arithmetic is in float32 (float64 for float64). What trains is straight-through: the value is
that of the quantizer, the gradient that of what stands in for its steps. A slow reference in the paper's own terms
stands next to it. W is the paper's W_r, the weight of the rotated network.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from rotquant.tensors.codebook import LevelTable
from rotquant.tensors.value_range import ValueRange, clipped_range, dynamic_range, exact, exact_type, with_gradient_of

#: What stands in for the derivative of a step u at a threshold t_i, see `ldp`.
StraightThrough = Literal["step", "ramp"]
#: Where the levels between the outer two lie: between their thresholds (LDP, Eq. 11), or at equal distances (N2UQ).
Spacing = Literal["partition", "uniform"]


def partitions(s1: Tensor, s2: Tensor) -> Tensor:
    """p_1, p_2, p_3, the shares of the range (Eq. 7): [..., 1] twice to [..., 3]."""
    first, second = torch.sigmoid(s1), torch.sigmoid(s2)
    return torch.cat([first, (1 - first) * second, (1 - first) * (1 - second)], dim=-1)


def thresholds(shares: Tensor) -> Tensor:
    """t_1, t_2, t_3, the centres of the partitions (Eq. 8): [..., 3] to [..., 3]."""
    return shares.cumsum(-1) - shares / 2


def relative_levels(t: Tensor, spacing: Spacing = "partition") -> Tensor:
    """w_0..w_3 of a range from 0 to 1 (Eq. 11): thresholds [..., 3] to [..., 4]."""
    zero, one = torch.zeros_like(t[..., :1]), torch.ones_like(t[..., :1])
    if spacing == "uniform":
        return torch.cat([zero, one / 3, 2 * one / 3, one], dim=-1)
    return torch.cat([zero, (t[..., :-1] + t[..., 1:]) / 2, one], dim=-1)


def ldp_table(value_range: ValueRange, s1: Tensor, s2: Tensor, spacing: Spacing = "partition") -> LevelTable:
    """Edges low + h t_i and levels low + h w_i (Eq. 14) of every group."""
    t = thresholds(partitions(s1.to(value_range.low), s2.to(value_range.low)))
    return LevelTable(
        value_range.low + value_range.span * t, value_range.low + value_range.span * relative_levels(t, spacing)
    )


def ldp(
    view: Tensor,
    gamma: Tensor,
    beta: Tensor,
    s1: Tensor,
    s2: Tensor,
    straight_through: StraightThrough = "step",
    spacing: Spacing = "partition",
) -> Tensor:
    """Learnable direct partitioning to 2 bits, of the view's shape and type, differentiable by all tensors.

    Eq. 10 with W clipped to [low, high] = [sigma(beta) min W, sigma(gamma) max W] and x = (W - low) / h in the steps
    u(x - t_i): Eq. 9 prints no shift, with which alone the ends of the range are the outer levels. u(0) = 0. The
    minimum and maximum are functions of the weight; equal ones share their gradient.

    Args:
        view: [rows, groups, size].
        gamma, beta, s1, s2: [rows, groups, 1].
        straight_through: `step`, as the paper says, is u'(x) = 1 everywhere, u itself where a value is asked: a
            weight's gradient is one inside the clip range and zero outside, and every element pulls at all three
            thresholds. `ramp` gives each step the derivatives of a ramp over its partition, `ramp` here: of slope
            1 / p_i there and zero elsewhere, by x, t_i and p_i. Either way values are those of the steps: with the
            ramps' values for them, the smoothed quantizer's own gradient, the range learns nothing of rounding.
        spacing: of the levels; `uniform` is N2UQ's (Liu et al. 2022), with learned thresholds all the same.
    """
    return _LDP.apply(view, gamma, beta, s1, s2, straight_through, spacing)


def ldp_reference(
    view: Tensor,
    gamma: Tensor,
    beta: Tensor,
    s1: Tensor,
    s2: Tensor,
    straight_through: StraightThrough = "step",
    spacing: Spacing = "partition",
) -> Tensor:
    """`ldp` by autograd, equation by equation."""

    def step(x: Tensor, t: Tensor, p: Tensor) -> Tensor:
        return with_gradient_of((x > t).to(x), x - t if straight_through == "step" else ramp(x, t, p))

    value_range = clipped_range(view, gamma, beta)
    low, h = value_range.low, value_range.span
    x = ((view - low) / h).clamp(0, 1)
    p = partitions(s1, s2)
    t = thresholds(p)
    w0, w1, w2, w3 = relative_levels(t, spacing).split(1, dim=-1)
    u1, u2, u3 = (step(x, t[..., i : i + 1], p[..., i : i + 1]) for i in range(3))
    return low + h * (u1 * (w1 - w0) + u2 * (w2 - w1) + u3 * (w3 - w2))


def ramp(x: Tensor, t: Tensor, p: Tensor) -> Tensor:
    """Smoothed step: a ramp from 0 to 1 over the partition of width p about the threshold t."""
    return ((x - t) / p + 0.5).clamp(0, 1)


class _LDP(torch.autograd.Function):
    """`ldp` as a single node that keeps nothing but its arguments.

    With y = sum u_i d_i, d_i = w_i - w_(i-1), out = low + h y and a_i in place of u_i', slope = sum a_i d_i inside the
    range and zero outside:

    d out/dW = slope,  d out/d low = 1 - y + slope (x - 1),  d out/d high = y - slope x,
    d out/d d_i = h u_i,  d out/d t_i = -h d_i a_i,  and for ramps  d out/d p_i = -h d_i a_i (r_i - 1/2),

    for a ramp is r_i = (x - t_i) / p_i + 1/2. What belongs to a group is summed over it before it goes on to the
    parameters, and to the smallest and largest weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        view: Tensor,
        gamma: Tensor,
        beta: Tensor,
        s1: Tensor,
        s2: Tensor,
        straight_through: StraightThrough,
        spacing: Spacing,
    ) -> Tensor:
        ctx.save_for_backward(view, gamma, beta, s1, s2)
        ctx.options = straight_through, spacing
        table = ldp_table(clipped_range(view, gamma, beta), s1, s2, spacing)
        return table.decode(table.encode(view), view.dtype)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch has *gradients
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, None, None]:
        view, gamma, beta, s1, s2 = ctx.saved_tensors
        return *ldp_backward(gradient, view, gamma, beta, s1, s2, *ctx.options), None, None


def ldp_backward(
    gradient: Tensor,
    view: Tensor,
    gamma: Tensor,
    beta: Tensor,
    s1: Tensor,
    s2: Tensor,
    straight_through: StraightThrough,
    spacing: Spacing,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `ldp` by the view, gamma, beta, s1 and s2, each of its own type, from that of its value."""
    W, g = exact(view), gradient.to(exact_type(view.dtype))
    least, most = dynamic_range(W)
    share_low, share_high = torch.sigmoid(beta.to(W)), torch.sigmoid(gamma.to(W))
    value_range = ValueRange(share_low * least, share_high * most)
    low, h = value_range.low, value_range.span
    p = partitions(s1.to(W), s2.to(W))
    t = thresholds(p)
    edges, d = low + h * t, relative_levels(t, spacing).diff()

    # Masks are numbers of the weight's type, and sums over them dot products: a tenth of the time of torch.where.
    x = (W - low) / h
    inside = g * ((x >= 0) & (x <= 1)).to(W.dtype)
    x = x.clamp(0, 1)  # which may be infinite where a range is empty
    above = torch.cat([_dot(g, (edge.unsqueeze(-1) < W).to(W.dtype)) for edge in edges.unbind(-1)], dim=-1)
    to_d, to_p = h * above, torch.zeros_like(p)
    if straight_through == "step":
        through, by_x = inside, _dot(inside, x)
        to_t = -h * d * _total(g)
    else:
        width = p.clamp(min=torch.finfo(W.dtype).eps)
        rate = d / width
        second, third = (x > p[..., :1]).to(W.dtype), (x > p[..., :1] + p[..., 1:2]).to(W.dtype)
        own = [inside * (1 - second), inside * (second - third), inside * third]  # by the partitions where they lie
        a, b = (torch.cat([_dot(part, other) for part in own], dim=-1) for other in (torch.ones_like(x), x))
        through = rate[..., :1] * own[0] + rate[..., 1:2] * own[1] + rate[..., 2:] * own[2]
        by_x = _total(rate * b)
        to_t, to_p = -h * rate * a, -h * rate / width * (b - t * a)

    values = _total(d * above)
    to_low = _total(g) - values + by_x - _total(through)
    to_high = values - by_x
    to_view = through + _to_extreme(W, least, share_low * to_low) + _to_extreme(W, most, share_high * to_high)
    to_beta = to_low * least * share_low * (1 - share_low)
    to_gamma = to_high * most * share_high * (1 - share_high)
    if spacing == "partition":
        to_t = to_t + _levels_backward(to_d)
    to_s1, to_s2 = _partitions_backward(to_t, to_p, s1.to(W), s2.to(W))
    return (
        to_view.to(view.dtype),
        to_gamma.to(gamma.dtype),
        to_beta.to(beta.dtype),
        to_s1.to(s1.dtype),
        to_s2.to(s2.dtype),
    )


def _total(x: Tensor) -> Tensor:
    """The sum over a group, or over its levels."""
    return x.sum(-1, keepdim=True)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """The sum of products over a group."""
    return torch.linalg.vecdot(x, y).unsqueeze(-1)


def _to_extreme(x: Tensor, extreme: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of a group's smallest or largest element, shared by those that equal it."""
    equal = (x == extreme).to(x.dtype)
    return equal * (gradient / _total(equal))


def _levels_backward(to_d: Tensor) -> Tensor:
    """Backpropagate from d_1 = (t_1 + t_2) / 2, d_2 = (t_3 - t_1) / 2, d_3 = 1 - (t_2 + t_3) / 2 to the thresholds."""
    first, second, third = to_d.unbind(-1)
    return torch.stack([first - second, first - third, second - third], dim=-1) / 2


def _partitions_backward(to_t: Tensor, to_p: Tensor, s1: Tensor, s2: Tensor) -> tuple[Tensor, Tensor]:
    """Backpropagate from the thresholds and the partitions to s1 and s2, by Eqs. 8 and 7."""
    later = to_t.flip(-1).cumsum(-1).flip(-1) - to_t  # p_i moves every later threshold as a whole, its own by half
    first, second, third = (to_p + later + to_t / 2).split(1, dim=-1)
    share1, share2 = torch.sigmoid(s1), torch.sigmoid(s2)
    to_s1 = (first - share2 * second - (1 - share2) * third) * share1 * (1 - share1)
    to_s2 = (1 - share1) * (second - third) * share2 * (1 - share2)
    return to_s1, to_s2
