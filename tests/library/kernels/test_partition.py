"""Fake quantization in groups: the kernels against the references, and both gradients against autograd of the papers'.

Without a GPU the CUDA source runs lane by lane on the CPU (`emulated`), which tests all but what NVIDIA's compiler and
hardware do.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.launch.loading import compile_source
from rotquant.kernels.rows import partition
from rotquant.kernels.rows.partition import (
    _KINDS,
    LARGEST_GROUP,
    Kind,
    fake_quantize_groups,
    fake_quantize_groups_backward,
    has_kernel,
)
from rotquant.kernels.rows.partition_reference import WeightGroups, backward_reference, forward_reference
from rotquant.qat.quantizers import make_quantizer
from rotquant.tensors.normal_float import float_centre, float_range, float_table, normal_float_reference
from rotquant.tensors.partition import StraightThrough, ldp_reference, ldp_table, partitions
from rotquant.tensors.value_range import clipped_range, dynamic_range, uniform_qparams, uniform_reference
from tests.helpers.cases import each_once
from tests.library.kernels.emulated import emulate, needs_compiler

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")

TYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Every kind with every derivative of its steps.
RULES: list[tuple[str, StraightThrough]] = [
    *((kind, "step") for kind in _KINDS),
    *((kind, "ramp") for kind in ("ldp", "n2uq")),
]
ROWS, GROUPS = 5, 3

on_gpu = pytest.param("cuda", marks=pytest.mark.gpu)
emulated = pytest.param("cpu", marks=needs_compiler)


class Problem(NamedTuple):
    """Arguments of the operator, and the gradient of what it gives."""

    weight: Tensor
    parameters: tuple[Tensor | None, ...]
    options: tuple[int, int, str, StraightThrough]
    gradient: Tensor

    @property
    def view(self) -> Tensor:
        """The weight in groups."""
        return self.weight.unflatten(1, (-1, self.options[0]))

    @property
    def arguments(self) -> WeightGroups:
        """What operators take, but the gradient."""
        return WeightGroups(self.weight, *self.parameters, *self.options)

    def forward(self, function: Callable[[WeightGroups], Tensor] = lambda w: fake_quantize_groups(*w)) -> Tensor:
        """The fake-quantized weight, by the operator or by one of its functions."""
        return function(self.arguments)

    def backward(
        self,
        function: Callable[[Tensor, WeightGroups], tuple[Tensor, ...]] = lambda gradient, w: (
            fake_quantize_groups_backward(gradient, *w)
        ),
    ) -> list[Tensor]:
        """The gradients of the weight and of the parameters there are."""
        return [gradient for gradient in function(self.gradient, self.arguments) if gradient.numel()]

    def wide(self) -> "Problem":
        """The same numbers in float64, on the CPU."""
        weight, gradient, *parameters = (
            None if x is None else x.detach().cpu().double() for x in (self.weight, self.gradient, *self.parameters)
        )
        assert weight is not None
        assert gradient is not None
        return Problem(weight, tuple(parameters), self.options, gradient)


def problem(
    kind: str,
    step: StraightThrough = "step",
    size: int = 128,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
    shape: tuple[int, int] = (ROWS, GROUPS),
    bits: int = 2,
) -> Problem:
    """Random arguments: shares of the range about 0.9, uneven partitions; two thirds of the groups not about zero.

    But of `nf3` all are, whose equations divide by the range of either side of zero.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, groups = shape
    view = torch.randn(rows, groups, size, generator=generator)
    view = view + 2.5 * (kind != "nf3") * torch.randint(-1, 2, (rows, groups, 1), generator=generator)
    centres = (2.0, 2.0, -0.7, 0.0)
    parameters = tuple(
        0.7 * torch.randn(rows, groups, 1, generator=generator) + centre if number < _KINDS[kind].parameters else None
        for number, centre in enumerate(centres)
    )
    bits = 3 if kind.startswith("nf") else bits
    weight, gradient = view.flatten(1).to(dtype), torch.randn(rows, groups * size, generator=generator).to(dtype)
    drawn = Problem(weight, parameters, (size, bits, kind, step), gradient)
    drawn = drawn._replace(weight=away_from_edges(drawn))
    on_device = (None if x is None else x.to(device) for x in parameters)
    return Problem(drawn.weight.to(device), tuple(on_device), drawn.options, gradient.to(device))


def edges(p: Problem) -> Tensor:
    """Where the value or a gradient of a group jumps, float64 [rows, groups, n]."""
    view, (gamma, beta, s1, s2) = p.view, p.parameters
    _, bits, kind, _ = p.options
    if kind.startswith("nf"):
        value_range = float_range(view) if gamma is None else clipped_range(view, gamma, beta)
        centre = torch.zeros_like(value_range.low) if s1 is None else float_centre(value_range, s1)
        return torch.cat([float_table(value_range, centre, bits).edges, *value_range, centre], dim=-1)
    value_range = dynamic_range(view) if gamma is None else clipped_range(view, gamma, beta)
    if s1 is None:
        qparams = uniform_qparams(value_range, bits)
        ties = torch.arange(2**bits + 1, dtype=torch.float64) - 0.5
        assert qparams.zero_point is not None
        # The zero point jumps as well, with all values: where it nearly does, no element moves away from that.
        return (ties - qparams.zero_point) * qparams.scale
    ends = value_range.low + value_range.span * partitions(s1, s2).cumsum(-1)
    return torch.cat([ldp_table(value_range, s1, s2).edges, *value_range, ends], dim=-1)


def away_from_edges(p: Problem) -> Tensor:
    """The weight, but elements that rounding of float32 could take to the other side of an edge are the group's median.

    Extremes stay: they make the edges, which lie away from them or, where nothing is clipped, are they in any
    arithmetic. 1e-5 of the range is a hundred times what float32 does to an edge.
    """
    wide = p.wide()
    view = wide.view
    least, most = (x.unsqueeze(-1) for x in (view.amin(-1), view.amax(-1)))
    distance = (view.unsqueeze(-1) - edges(wide).unsqueeze(-2)).abs().amin(-1)
    near = (distance < 1e-5 * (most - least)) & (view != least) & (view != most)
    median = view.median(-1, keepdim=True).values
    return torch.where(near, median, view).flatten(1).to(p.weight.dtype)


def by_autograd(p: Problem) -> tuple[Tensor, list[Tensor]]:
    """Value and gradients of the papers' equations in float64, by autograd."""
    wide = p.wide()
    leaves = [x.requires_grad_() for x in (wide.weight, *wide.parameters) if x is not None]
    view, (gamma, beta, s1, s2) = wide.view, wide.parameters
    _, bits, kind, step = p.options
    if kind in ("ldp", "n2uq"):
        value = ldp_reference(view, gamma, beta, s1, s2, step, "partition" if kind == "ldp" else "uniform")
    elif kind.startswith("nf"):
        value_range = float_range(view) if gamma is None else clipped_range(view, gamma, beta)
        centre = torch.zeros_like(value_range.low) if s1 is None else float_centre(value_range, s1)
        value = normal_float_reference(view, value_range, centre, bits)
    else:
        value_range = dynamic_range(view) if gamma is None else clipped_range(view, gamma, beta)
        value = uniform_reference(view, value_range, bits)
    value = value.flatten(1)
    return value.detach(), list(torch.autograd.grad(value, leaves, wide.gradient))


def assert_near(p: Problem, value: Tensor, gradients: list[Tensor]) -> None:
    """As autograd has it in float64, up to float32's sums over a group and the rounding of the weight's type.

    Levels are of the order of the weight, some 4; a sum over a group of gradients of about one, times a span of about
    5, is off by its size in float32's last bits, some 1e-7 each; ramps divide by partitions, down to a tenth.
    """
    expected, by_hand = by_autograd(p)
    last = torch.finfo(p.weight.dtype).eps
    torch.testing.assert_close(value.cpu().double(), expected, rtol=0.51 * last, atol=4e-6)
    assert len(gradients) == len(by_hand)
    scale = p.options[0] ** 0.5
    for index, (own, other) in enumerate(zip(gradients, by_hand, strict=True)):
        rtol = 0.51 * last if index == 0 else 1e-5
        torch.testing.assert_close(
            own.cpu().double(), other, rtol=rtol + 1e-5, atol=1e-5 * scale, msg=lambda m, i=index: f"{i}: {m}"
        )


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels on tensors of the CPU as well."""
    emulate(partition, monkeypatch)


def kernels(p: Problem) -> tuple[Tensor, list[Tensor]]:
    return p.forward(partition._forward_cuda), p.backward(partition._backward_cuda)


@pytest.mark.parametrize(("kind", "step"), RULES)
def test_the_references_are_the_papers_and_their_derivatives(kind: str, step: StraightThrough) -> None:
    for seed in range(3):
        p = problem(kind, step, size=24, seed=seed).wide()
        value, gradients = p.forward(forward_reference), p.backward(backward_reference)
        expected, by_hand = by_autograd(p)
        for own, other in zip((value, *gradients), (expected, *by_hand), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("device", [emulated, on_gpu])
@pytest.mark.parametrize(("kind", "step", "dtype"), each_once(RULES, TYPES))
def test_the_kernels_are_the_papers_and_their_derivatives(
    kind: str, step: StraightThrough, dtype: torch.dtype, device: str
) -> None:
    for seed in range(3):
        p = problem(kind, step, dtype=dtype, seed=seed, device=device)
        assert_near(p, *kernels(p))


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("device", [emulated, on_gpu])
@pytest.mark.parametrize(
    ("size", "shape", "dtype"),
    each_once(
        [(8, (3, 7)), (24, (2, 3)), (32, (9, 8)), (64, (1, 1)), (72, (3, 5)), (256, (5, 2)), (512, (2, 2))],
        [torch.float32, torch.bfloat16],
    ),
)
def test_groups_of_any_size_and_number(size: int, shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    p = problem("ldp", size=size, shape=shape, dtype=dtype, device=device)
    assert_near(p, *kernels(p))


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("device", [emulated, on_gpu])
@pytest.mark.parametrize("kind", ["range", "learned_range"])
def test_uniform_codes_of_three_bits(kind: str, device: str) -> None:
    p = problem(kind, device=device, bits=3)
    value, gradients = kernels(p)
    assert_near(p, value, gradients)
    assert max(len(group.unique()) for group in value.unflatten(1, (-1, 128)).flatten(0, 1)) == 8


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("device", [emulated, on_gpu])
def test_ends_that_equal_share_their_gradient(device: str) -> None:
    for kind, step in RULES:
        p = problem(kind, step, dtype=torch.bfloat16)
        view = p.view.clone()
        view[..., 3:90:29], view[..., 7:99:31] = view.amin(-1, keepdim=True), view.amax(-1, keepdim=True)
        tensors = (None if x is None else x.to(device) for x in p.parameters)
        p = Problem(view.flatten(1).to(device), tuple(tensors), p.options, p.gradient.to(device))
        assert_near(p, *kernels(p))


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("device", [emulated, on_gpu])
@pytest.mark.parametrize("side", [-1, 1])
def test_groups_on_one_side_of_zero(side: int, device: str) -> None:
    for kind, step in RULES:
        p = problem(kind, step, device=device)
        p.weight.abs_().mul_(side)
        p.weight.copy_(away_from_edges(p))
        wide = p.wide()
        leaves = [x.requires_grad_() for x in (wide.weight, *wide.parameters) if x is not None]
        expected = wide.forward(forward_reference)  # differentiable: it is no operator
        by_hand = torch.autograd.grad(expected, leaves, wide.gradient)
        value, gradients = kernels(p)
        torch.testing.assert_close(value.cpu().double(), expected.detach(), rtol=1e-6, atol=4e-6)
        for own, other in zip(gradients, by_hand, strict=True):
            torch.testing.assert_close(own.cpu().double(), other, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("device", [emulated, on_gpu])
@pytest.mark.parametrize("constant", [0.0, 1.25, -3.5])
def test_groups_of_one_value(constant: float, device: str) -> None:
    for kind, step in RULES:
        p = problem(kind, step, device=device)
        p.weight.fill_(constant)
        value, gradients = kernels(p)
        torch.testing.assert_close(value, p.forward(forward_reference), rtol=1e-6, atol=1e-6)
        for own, other in zip(gradients, p.backward(backward_reference), strict=True):
            assert own.isfinite().all(), (kind, step)
            # Sums of 128 products of float32 with up to 3.5, in another order, over partitions of down to a tenth.
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("device", [emulated, on_gpu])
def test_what_is_not_a_number_spreads_over_its_group_and_no_further(device: str) -> None:
    for dtype in TYPES:
        for kind, step in RULES:
            p = problem(kind, step, dtype=dtype, device=device)
            p.view[2, 1, 37] = torch.nan
            value, gradients = kernels(p)
            for found in (value, *gradients):
                groups = found.isnan().view(ROWS, GROUPS, -1)
                assert groups[2, 1].all(), (kind, step)
                assert groups.sum() == groups[2, 1].numel(), (kind, step)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("kind", "step"), RULES)
def test_values_are_those_of_torch_on_the_same_gpu_bit_for_bit(
    kind: str, step: StraightThrough, dtype: torch.dtype
) -> None:
    """What is frozen is found by torch's operations, and must be what was trained."""
    p = problem(kind, step, dtype=dtype, device="cuda", shape=(256, 32))
    assert torch.equal(p.forward(), p.forward(forward_reference))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("kind", "step"), RULES)
def test_a_trainable_quantizer_takes_the_kernels_and_freezes_what_they_give(
    kind: Kind, step: StraightThrough, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = problem(kind, dtype=dtype, device="cuda", shape=(64, 8)).weight
    bits = 3 if kind.startswith("nf") else 2
    quantizer = make_quantizer(kind, weight, 128, bits, straight_through=step)
    with monkeypatch.context() as patched:
        patched.setattr(quantizer, "quantized", None)
        value = quantizer(weight.requires_grad_())
    assert value.requires_grad
    assert torch.equal(quantizer.freeze(weight).dequantize(dtype), value)


@pytest.mark.gpu
def test_a_large_weight() -> None:
    p = problem("ldp", dtype=torch.bfloat16, device="cuda", shape=(4096, 32))
    torch.testing.assert_close(p.forward(), p.forward(forward_reference))
    for own, other in zip(p.backward(), p.backward(backward_reference), strict=True):
        torch.testing.assert_close(own.float(), other.float(), rtol=2.0**-7, atol=2e-4)


@pytest.mark.parametrize("device", ["cpu", on_gpu])
@pytest.mark.parametrize(("kind", "step"), RULES)
def test_autograd_goes_through_the_operators(kind: str, step: StraightThrough, device: str) -> None:
    p = problem(kind, step, device=device)
    leaves = [x.requires_grad_() for x in (p.weight, *p.parameters) if x is not None]
    value = p.forward()
    assert_near(p, value.detach(), list(torch.autograd.grad(value, leaves, p.gradient)))
    (to_weight,) = torch.autograd.grad(p.forward().sum(), p.weight)  # a gradient of one number, expanded
    assert to_weight.shape == p.weight.shape


@pytest.mark.unflipped  # torch.library.opcheck has dispatch modes of its own
def test_the_operators_have_shape_rules() -> None:
    ops = torch.ops.rotquant
    for kind, step in RULES:
        p = problem(kind, step, size=16)
        arguments = (p.weight.requires_grad_(), *p.parameters, *p.options)
        torch.library.opcheck(ops.fake_quantize_groups.default, arguments)
        torch.library.opcheck(
            ops.fake_quantize_groups_backward.default, (p.gradient, p.weight.detach(), *arguments[1:])
        )


def test_which_groups_have_kernels() -> None:
    for dtype in TYPES:
        assert all(has_kernel(dtype, size) for size in (8, 32, 64, 96, 128, 256, LARGEST_GROUP))
        assert not any(has_kernel(dtype, size) for size in (0, 4, 100, LARGEST_GROUP + 8))
    assert not has_kernel(torch.float64, 128)


@pytest.mark.parametrize(
    ("size", "dtype", "architecture"),
    [
        (8, torch.float32, "sm_80"),
        (32, torch.bfloat16, "sm_86"),
        (64, torch.float32, "sm_89"),
        (256, torch.bfloat16, "sm_90a"),
        (512, torch.float32, "sm_80"),
        (512, torch.bfloat16, "sm_90a"),
    ],
)
def test_other_sizes_of_groups_compile(size: int, dtype: torch.dtype, architecture: str) -> None:
    """A size decides the layout, which no architecture changes: `test_compile` compiles the papers' size for each."""
    source = partition._source(dtype, "ldp", size)
    assert set(compile_source(source, architecture).symbols) == set(source.instances)


@pytest.mark.gpu
def test_what_the_kernels_refuse() -> None:
    p = problem("ldp", dtype=torch.bfloat16, device="cuda")
    weight, (gamma, beta, s1, s2) = p.weight, p.parameters
    for arguments, message in (
        ((weight.double(), gamma, beta, s1, s2, 128, 2, "ldp", "step"), "weight is float64"),
        ((weight, gamma, beta, s1, None, 128, 2, "ldp", "step"), "ldp needs s2"),
        ((weight, gamma, beta, s1, s2, 128, 2, "range", "step"), "range has no gamma"),
        ((weight, gamma[:1], beta, s1, s2, 128, 2, "ldp", "step"), "gamma has shape"),
        ((weight, gamma, beta.double(), s1, s2, 128, 2, "ldp", "step"), "beta is float64"),
        ((weight, gamma, beta, s1, s2.cpu(), 128, 2, "ldp", "step"), "s2 is on cpu"),
        ((weight, gamma, beta, s1, s2, 128, 3, "ldp", "step"), "no codes of 3 bits"),
        ((weight, gamma, beta, s1, s2, 100, 2, "ldp", "step"), "groups of 100 weights"),
        ((weight, gamma, beta, s1, s2, 256, 2, "ldp", "step"), "256 does not divide"),
        ((weight, gamma, beta, s1, s2, 128, 2, "other", "step"), "no kind of quantizer"),
        ((weight, gamma, beta, s1, s2, 128, 2, "ldp", "other"), "stands in for no step"),
    ):
        with pytest.raises(KernelError, match=message):
            fake_quantize_groups(*arguments)
    with pytest.raises(KernelError, match="the gradient is float32"):
        fake_quantize_groups_backward(p.gradient.float(), weight, *p.parameters, *p.options)
