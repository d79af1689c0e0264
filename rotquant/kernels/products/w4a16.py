"""Linear layers on 4-bit weights and 16-bit activations (W4A16): integers times a scale for each group of 128 inputs.

y[m, n] = sum_g scale[g, n] sum_{k in g} x[m, k] q[n, k] + bias[n], the format of GPTQ and AWQ checkpoints without zero
points. Up to `MAX_ROWS` rows at a time read the packed weight directly (kernels/w4a16.cu); for very many the weight is
written out in 16 bits and multiplied by the library's product. Codes lie as in `layouts.pack_weight`, inputs in an
order of their own, and are never rounded again. Nothing here chooses codes or scales.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import INT, POINTER, TYPES_16, CudaFile, Parameters
from rotquant.kernels.launch.loading import TranslationUnit, architecture_of_device, kernel
from rotquant.kernels.launch.operators import check_same_device, check_tensor, launch, operator
from rotquant.kernels.launch.overlap import launch_waiting, overlaps
from rotquant.kernels.layouts.weights import K_BLOCK, pack_weight, padded, unpack_weight
from rotquant.kernels.products.gemv import CONSTANTS, PROBLEM, GemvPlan, spreading_bytes
from rotquant.kernels.products.linear import GROUP_SIZE, PackedWeight, packed_shapes
from rotquant.kernels.products.output import OUTPUTS, check_output

#: Rows that one launch has room for.
MAX_ROWS = 64
#: Up to so many rows the packed weight is read once for every `MAX_ROWS` of them: kernels/notes/w4a16.md.
DIRECT_ROWS = 128
#: Inputs are read 16 bytes at a time.
_ALIGNMENT = 8


@dataclass(frozen=True)
class HalfWeight:
    """A 4-bit weight for 16-bit activations, as the kernel reads it.

    codes: uint8 [strips, k_blocks, 32, 16], see `layouts.pack_weight`, of inputs in the order of `_interleaved`.
    scale: float32 [in / 128, out], or [1, out] for one scale per output feature; a strip's are neighbours.
    shape: (out, in).
    """

    codes: Tensor
    scale: Tensor
    shape: tuple[int, int]

    @classmethod
    def pack(cls, codes: Tensor, scale: Tensor) -> "HalfWeight":
        """Pack int8 codes -8..7 [out, in] and scales [out], [out, 1] or [out, in / 128].

        Raises:
            KernelError: scales of another shape, or codes that are not int8.
        """
        rows, columns = codes.shape
        packed = PackedWeight.pack(codes, scale)
        ordered = _interleaved(pad(codes, (0, padded(columns, K_BLOCK) - columns)))
        return cls(pack_weight(ordered), packed.scale.view(rows, -1).T.contiguous(), packed.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] as floating-point numbers, each product rounded once."""
        return _dequantize(self.codes, self.scale, self.shape[1], torch.promote_types(dtype, torch.float32)).to(dtype)


def _interleaved(codes: Tensor) -> Tensor:
    """Of each 16 inputs the first eight and the last eight in turn: 0, 8, 1, 9, 2, 10, ...

    A word of `layouts.pack_weight` then holds what one thread takes of 16 inputs for `mma.m16n8k16` and
    `wgmma.m64nNk16`, a pair in its bytes 0 and 2, a pair in its bytes 1 and 3, and activations stay in their order.
    """
    return codes.unflatten(-1, (-1, 2, 8)).transpose(-2, -1).flatten(-3)


def half_shapes(out_features: int, in_features: int, grouped: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the codes and of the scale of a `HalfWeight`.

    Raises:
        KernelError: groups that do not divide the input features.
    """
    codes, _ = packed_shapes(out_features, in_features, grouped)
    return codes, (in_features // GROUP_SIZE if grouped else 1, out_features)


def half_linear(x: Tensor, weight: HalfWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply 16-bit activations with a 4-bit weight.

    Args:
        x: [rows, in], float16 or bfloat16.
        bias: [out] of the type of x.

    Returns:
        [rows, out] of the type of x; sums are float32.

    Raises:
        KernelError: a tensor of another dtype, shape or device, or not contiguous, or inputs that are no multiple of 8.
    """
    return w4a16_linear(x, weight.codes, weight.scale, bias)


def _reference(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The definition, in float64, rounded once; arguments as of `half_linear`, codes and scale a `HalfWeight`'s."""
    y = x.double() @ _dequantize(codes, scale, x.shape[1], torch.float64).T
    return (y if bias is None else y + bias.double()).to(x.dtype)


def _dequantize(codes: Tensor, scale: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    groups, out_features = scale.shape
    ordered = unpack_weight(codes, out_features, padded(in_features, K_BLOCK))
    natural = ordered.unflatten(-1, (-1, 8, 2)).transpose(-2, -1).flatten(-3)  # the inverse of `_interleaved`
    integers = natural[:, :in_features].to(dtype)
    return (integers.unflatten(1, (groups, -1)) * scale.T.to(dtype)[..., None]).flatten(1)


def _cuda(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    _check(x, codes, scale, bias)
    rows, out_features = x.shape[0], scale.shape[1]
    y = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    if rows > DIRECT_ROWS:
        return linear(x, launch_dequantize(codes, scale, x.shape[1], x.dtype), bias)
    for start in range(0, rows, MAX_ROWS):
        part = slice(start, start + MAX_ROWS)
        launch_w4a16(x[part], codes, scale, bias, y[part])
    return y


def _check(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    check_tensor(x, "activations", dtypes=tuple(TYPES_16), shape=(None, None))
    rows, columns = x.shape
    if columns % _ALIGNMENT or columns == 0:
        raise KernelError(f"activations have {columns} columns, and the kernel reads {_ALIGNMENT} at a time.")
    check_tensor(scale, "weight scale", dtypes=(torch.float32,), shape=(None, None))
    groups, out_features = scale.shape
    if groups != 1 and groups * GROUP_SIZE != columns:
        raise KernelError(f"weight scale has {groups} groups of {GROUP_SIZE} for {columns} input features.")
    expected, _ = half_shapes(out_features, columns, grouped=groups > 1)
    check_tensor(codes, "packed codes", dtypes=(torch.uint8,), shape=expected)
    check_output(rows, out_features, x.dtype, None, bias)
    check_same_device(x, codes=codes, scale=scale, bias=bias)


@dataclass(frozen=True)
class HalfPlan(GemvPlan):
    """How a product is cut up; the template arguments of kernels/w4a16.cu.

    warpgroups: whether four warps multiply together, on sm_90a: 16 to 64 rows, `across` a multiple of 4.
    """

    warpgroups: bool = False

    def half_instance(self, dtype: torch.dtype) -> str:
        """The C++ name of the kernel."""
        if not self.warpgroups:
            return f"{'w4a16' if self.cluster == 1 else 'w4a16_cluster'}<{', '.join([TYPES_16[dtype], *self.sizes])}>"
        numbers = (self.rows, self.strips, self.across, self.along, self.depth, self.cluster)
        return f"w4a16_warpgroups<{', '.join([TYPES_16[dtype], *map(str, numbers)])}>"


def _together(rows: int, strips: int, across: int, along: int, depth: int, cluster: int = 1) -> HalfPlan:
    return HalfPlan(rows, strips, across, along, depth, cluster, warpgroups=True)


_Plans = dict[int, tuple[tuple[float, HalfPlan], ...]]

#: By rows: (strips of 16 output features up to which it is taken, plan), for 132 multiprocessors, by a sweep on an H200
#: (kernels/notes/w4a16.md).
_HOPPER: _Plans = {
    1: (
        (576, HalfPlan(1, 2, 1, 8, 4)),
        (1136, HalfPlan(1, 2, 2, 4, 5)),
        (math.inf, HalfPlan(1, 2, 1, 8, 4)),
    ),
    8: (
        (576, HalfPlan(8, 2, 2, 8, 3)),
        (1136, HalfPlan(8, 2, 2, 4, 4)),
        (math.inf, HalfPlan(8, 2, 7, 2, 4)),
    ),
    16: (
        (320, _together(16, 1, 4, 4, 4, 2)),
        (576, _together(16, 1, 4, 4, 4)),
        (768, _together(16, 1, 4, 2, 6, 2)),
        (1584, HalfPlan(16, 2, 4, 2, 4, 2)),
        (math.inf, HalfPlan(16, 2, 7, 2, 4)),
    ),
    32: (
        (320, _together(32, 1, 4, 2, 6, 2)),
        (448, _together(32, 1, 4, 4, 3)),
        (576, _together(32, 1, 8, 2, 4, 2)),
        (768, _together(32, 1, 8, 1, 4, 4)),
        (1136, _together(32, 1, 8, 2, 4)),
        (1584, _together(32, 1, 12, 1, 6)),
        (math.inf, _together(32, 1, 8, 2, 4)),
    ),
    64: (
        (320, _together(64, 1, 4, 2, 4, 2)),
        (576, _together(64, 1, 8, 2, 4, 2)),
        (768, _together(64, 1, 8, 1, 4, 4)),
        (1136, _together(64, 1, 16, 1, 6, 2)),
        (1584, _together(64, 1, 12, 1, 6)),
        (math.inf, _together(64, 1, 16, 1, 6)),
    ),
}
#: Elsewhere: within the 99 KB of shared memory of sm_86 and sm_89; not measured.
_OTHERS: _Plans = {
    1: ((math.inf, HalfPlan(1, 1, 1, 8, 5)),),
    8: ((math.inf, HalfPlan(8, 2, 2, 4, 3)),),
    16: ((math.inf, HalfPlan(16, 2, 4, 2, 3)),),
    32: ((math.inf, HalfPlan(32, 2, 4, 1, 4)),),
    64: ((math.inf, HalfPlan(64, 2, 4, 1, 3)),),
}


def choose_plan(rows: int, strips: int, architecture: str) -> HalfPlan:
    """The plan for 1 to `MAX_ROWS` rows and so many strips of 16 output features."""
    table = _plans(architecture)
    capacity = min(capacity for capacity in table if capacity >= rows)
    return next(plan for most, plan in table[capacity] if strips <= most)


def _plans(architecture: str) -> _Plans:
    return _HOPPER if architecture == "sm_90a" else _OTHERS


def launch_w4a16(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor, plan: HalfPlan | None = None
) -> None:
    """Fill `out` [rows, out_features]; arguments as in `w4a16_linear`, already checked.

    Args:
        plan: how to cut the product up; chosen by shape if None.

    Raises:
        KernelError: more than `MAX_ROWS` rows, or what `loading.kernel` raises.
    """
    rows, features = out.shape
    if rows > MAX_ROWS:
        raise KernelError(f"the kernel for few rows takes up to {MAX_ROWS}, not {rows}.")
    plan = plan or choose_plan(rows, codes.shape[0], architecture_of_device(out.device))
    problem = PROBLEM.of(
        activations=x,
        row_scale=None,
        weight=codes,
        column_scale=scale,
        bias=bias,
        out=out,
        rows=rows,
        features=features,
        inner=x.shape[1],
        row_scale_step=0,
        feature_step=1,
        group_step=features if scale.shape[0] > 1 else 0,
        dtype=OUTPUTS[out.dtype],
        early=overlaps(out.device),
    )
    blocks = -(-codes.shape[0] // plan.block_strips) * plan.cluster
    shared = plan.bytes(16, grouped=True)
    if overlaps(out.device):
        shared = max(shared, spreading_bytes(blocks, out.device))
    source = _source(plan, x.dtype)
    function = kernel(source, source.instances[0], out.device)
    launch_waiting(function, (blocks,), (plan.threads,), problem, device=out.device, shared=shared)


def launch_dequantize(codes: Tensor, scale: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    """The weight [out_features, in_features] of `dtype` (float16 or bfloat16), on a GPU."""
    groups, out_features = scale.shape
    weight = torch.empty(out_features, in_features, dtype=dtype, device=codes.device)
    name = _DEQUANTIZE[dtype]
    function = kernel(TranslationUnit(_FILE, (name,)), name, codes.device)
    strips, k_blocks = codes.shape[:2]
    arguments = (codes, scale, weight, strips, out_features, in_features, out_features if groups > 1 else 0)
    blocks = -(-strips * k_blocks // _DEQUANTIZE_WARPS)
    launch(function, (blocks,), (32 * _DEQUANTIZE_WARPS,), *arguments, device=codes.device)
    return weight


_DEQUANTIZE = {dtype: f"w4a16_dequantize<{cpp}>" for dtype, cpp in TYPES_16.items()}
#: Warps of a block of `w4a16_dequantize`: each writes 64 inputs of a strip.
_DEQUANTIZE_WARPS = 8
_FILE = CudaFile(
    "w4a16.cu",
    kernels={
        **dict.fromkeys(("w4a16", "w4a16_cluster", "w4a16_warpgroups"), Parameters(problem=PROBLEM)),
        "w4a16_dequantize": Parameters(
            codes=POINTER, scale=POINTER, out=POINTER, strips=INT, features=INT, inner=INT, group_step=INT
        ),
    },
    constants=CONSTANTS | {"kDequantizeWarps": _DEQUANTIZE_WARPS},
)


@functools.cache
def _source(plan: HalfPlan, dtype: torch.dtype) -> TranslationUnit:
    """A unit of one instance, whose rings have as many bytes as the host gives them."""
    return TranslationUnit(_FILE, (plan.half_instance(dtype),), (plan.check(16, grouped=True),))


def sources(architecture: str) -> list[TranslationUnit]:
    """A unit for every plan with float16, some with bfloat16, and the weight itself in both types."""
    plans = [plan for choices in _plans(architecture).values() for _, plan in choices]
    units = [_source(plan, torch.float16) for plan in plans]
    units += [_source(choose_plan(rows, 1, architecture), torch.bfloat16) for rows in (1, 16, 64)]
    return units + [TranslationUnit(_FILE, (name,)) for name in _DEQUANTIZE.values()]


w4a16_linear = operator(
    "w4a16_linear",
    reference=_reference,
    cuda=_cuda,
    fake=lambda x, codes, scale, bias: x.new_empty(x.shape[0], scale.shape[1]),
)
