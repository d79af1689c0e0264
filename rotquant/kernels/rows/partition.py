"""Fake quantization of weights in groups, and its gradients, a kernel each: what RCP trains (Secs. 4.2 and 4.3).

The mathematics is that of `tensors.value_range`, `tensors.partition` and `tensors.normal_float`. A kernel reads a
weight once; the backward one finds extremes, thresholds and codes anew from it instead of reading them.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import FLOAT, LONG, POINTER, TYPES, CudaFile, Parameters, Structure
from rotquant.kernels.launch.loading import TranslationUnit, kernel
from rotquant.kernels.launch.operators import check_same_device, check_tensor, launch, operator
from rotquant.kernels.rows.partition_reference import WeightGroups, backward_reference, forward_reference
from rotquant.tensors.normal_float import normal_float
from rotquant.tensors.partition import StraightThrough

Kind = Literal["range", "learned_range", "ldp", "n2uq", "nf3", "nf3_ldp"]
"""Kind of a quantizer, as `qat.quantizers` makes them."""


class _Traits(NamedTuple):
    """A kind in the kernels: its enumerator, how many of gamma, beta, s1 and s2 it has, and bits that it can give."""

    enumerator: str
    parameters: int
    bits: range


_KINDS: dict[str, _Traits] = {
    "range": _Traits("kRange", 0, range(2, 9)),
    "learned_range": _Traits("kLearnedRange", 2, range(2, 9)),
    "ldp": _Traits("kLdp", 4, range(2, 3)),
    "n2uq": _Traits("kN2uq", 4, range(2, 3)),
    "nf3": _Traits("kNf3", 0, range(3, 4)),
    "nf3_ldp": _Traits("kNf3Ldp", 3, range(3, 4)),
}
_STEPS: dict[StraightThrough, str] = {"step": "kStep", "ramp": "kRamp"}
_NAMES = ("gamma", "beta", "s1", "s2")

#: Group sizes that have kernels: multiples of the first up to the second. The papers' is the third.
_MULTIPLE, LARGEST_GROUP, _PAPERS = 8, 512, 128
_THREADS, _WARP, _VECTORS, _FEWEST_LANES = 256, 32, 4, 4
_NORMAL_FLOAT = Structure("NormalFloat", **{f"v{i}": FLOAT for i in range(8)})
_GRID = Structure("Grid", largest_code=FLOAT, step=FLOAT, values=_NORMAL_FLOAT)
_WEIGHTS = Structure(
    "Weights", weight=POINTER, **{f"parameters{i}": POINTER for i in range(4)}, groups=LONG, grid=_GRID
)
_FILE = CudaFile(
    "partition.cu",
    kernels={
        "partition_forward": Parameters(weights=_WEIGHTS, out=POINTER),
        "partition_backward": Parameters(
            weights=_WEIGHTS, gradient=POINTER, to_weight=POINTER, **{f"to_parameters{i}": POINTER for i in range(4)}
        ),
    },
    constants={"kThreads": _THREADS, "kWarp": _WARP, "kVectors": _VECTORS, "kFewestLanes": _FEWEST_LANES},
)


def has_kernel(dtype: torch.dtype, group_size: int) -> bool:
    """Whether groups of so many elements of a type have a kernel."""
    return dtype in TYPES and group_size % _MULTIPLE == 0 and 0 < group_size <= LARGEST_GROUP


def sources(architecture: str) -> list[TranslationUnit]:
    """One translation unit for each type and kind, at the paper's group size."""
    return [_source(dtype, kind, _PAPERS) for dtype in TYPES for kind in _KINDS]


def _source(dtype: torch.dtype, kind: str, group_size: int) -> TranslationUnit:
    steps = get_args(StraightThrough) if kind in ("ldp", "n2uq") else ("step",)
    names = (_forward(dtype, kind, group_size), *(_backward(dtype, kind, step, group_size) for step in steps))
    side_by_side, turns = _layout(dtype, group_size)
    layout = f"Layout<{TYPES[dtype]}, {group_size}>"
    return TranslationUnit(_FILE, names, ((f"{layout}::kGroups", side_by_side), (f"{layout}::kTurns", turns)))


def _forward(dtype: torch.dtype, kind: str, group_size: int) -> str:
    return f"partition_forward<{TYPES[dtype]}, {_KINDS[kind].enumerator}, {group_size}>"


def _backward(dtype: torch.dtype, kind: str, step: StraightThrough, group_size: int) -> str:
    enumerators = f"{_KINDS[kind].enumerator}, {_STEPS[step]}"
    return f"partition_backward<{TYPES[dtype]}, {enumerators}, {group_size}>"


def _layout(dtype: torch.dtype, group_size: int) -> tuple[int, int]:
    """How many groups lie side by side in a warp, and how many one after the other in the forward kernel."""
    vectors, lanes = group_size * dtype.itemsize // 16, _FEWEST_LANES
    while lanes < _WARP and _VECTORS * lanes < vectors:
        lanes *= 2
    return _WARP // lanes, _VECTORS // -(-vectors // lanes)


def _check(w: WeightGroups) -> None:
    if w.kind not in _KINDS:
        raise KernelError(f"{w.kind!r} is no kind of quantizer: {', '.join(_KINDS)} are.")
    if w.straight_through not in _STEPS:
        raise KernelError(f"{w.straight_through!r} stands in for no step: {' and '.join(_STEPS)} do.")
    traits = _KINDS[w.kind]
    if w.bits not in traits.bits:
        raise KernelError(f"the quantizer {w.kind} has no codes of {w.bits} bits.")
    check_tensor(w.weight, "weight", dtypes=tuple(TYPES), shape=(None, None))
    if not has_kernel(w.weight.dtype, w.group_size):
        raise KernelError(
            f"groups of {w.group_size} weights have no kernel: a multiple of {_MULTIPLE} up to {LARGEST_GROUP} has."
        )
    rows, columns = w.weight.shape
    if columns % w.group_size:
        raise KernelError(f"group size {w.group_size} does not divide the {columns} columns of a weight.")
    for number, (name, parameter) in enumerate(zip(_NAMES, w.parameters, strict=True)):
        if (parameter is not None) != (number < traits.parameters):
            raise KernelError(f"the quantizer {w.kind} {'needs' if parameter is None else 'has no'} {name}.")
        if parameter is not None:
            check_tensor(parameter, name, dtypes=(torch.float32,), shape=(rows, columns // w.group_size, 1))
            check_same_device(w.weight, **{name: parameter})


def _launch(w: WeightGroups, name: str, groups_of_warp: int, *arguments: Tensor) -> None:
    """Launch a kernel on a weight, each warp taking so many groups of it; `arguments` stand after the weight."""
    groups = w.weight.numel() // w.group_size
    if not groups:
        return
    largest = 2**w.bits - 1
    values = {f"v{i}": value for i, value in enumerate(normal_float(3).tolist())}
    weights = _WEIGHTS.of(
        weight=w.weight,
        **{f"parameters{i}": parameter for i, parameter in enumerate(w.parameters)},
        groups=groups,
        grid={"largest_code": largest, "step": 1 / largest, "values": values},
    )
    grid = (-(-groups // (groups_of_warp * (_THREADS // _WARP))),)
    function = kernel(_source(w.weight.dtype, w.kind, w.group_size), name, w.weight.device)
    launch(function, grid, (_THREADS,), weights, *arguments, device=w.weight.device)


def _forward_cuda(w: WeightGroups) -> Tensor:
    _check(w)
    out = torch.empty_like(w.weight)
    side_by_side, turns = _layout(w.weight.dtype, w.group_size)
    _launch(w, _forward(w.weight.dtype, w.kind, w.group_size), side_by_side * turns, out)
    return out


def _backward_cuda(gradient: Tensor, w: WeightGroups) -> tuple[Tensor, ...]:
    _check(w)
    check_tensor(gradient, "the gradient", dtypes=(w.weight.dtype,), shape=tuple(w.weight.shape))
    check_same_device(w.weight, gradient=gradient)
    gradients = _empty_gradients(gradient, w)
    name = _backward(w.weight.dtype, w.kind, w.straight_through, w.group_size)
    _launch(w, name, _layout(w.weight.dtype, w.group_size)[0], gradient, *gradients)
    return gradients


def _empty_gradients(_: Tensor, w: WeightGroups) -> tuple[Tensor, ...]:
    like = (w.weight.new_empty(0) if parameter is None else torch.empty_like(parameter) for parameter in w.parameters)
    return torch.empty_like(w.weight), *like


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    found = fake_quantize_groups_backward(gradient.contiguous(), *tensors, *ctx.options)
    return *(None if tensor is None else own for tensor, own in zip(tensors, found, strict=True)), *(None,) * 4


#: `WeightGroups`: the weight as the codes of its groups stand for it, of its type; differentiable by it and by the
#: parameters that its kind has.
fake_quantize_groups: Callable[..., Tensor] = operator(
    "fake_quantize_groups",
    reference=forward_reference,
    cuda=_forward_cuda,
    fake=lambda w: torch.empty_like(w.weight),
    gradient=(_setup_context, _differentiate),
)

#: From the gradient of `fake_quantize_groups` [out, in], of the weight's type, and what that took, to those of the
#: weight and of gamma, beta, s1 and s2, [0] for those that are None.
fake_quantize_groups_backward: Callable[..., tuple[Tensor, ...]] = operator(
    "fake_quantize_groups_backward", reference=backward_reference, cuda=_backward_cuda, fake=_empty_gradients
)
