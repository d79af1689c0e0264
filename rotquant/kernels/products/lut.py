"""Linear layers on 2-bit look-up-table weights: RCP's non-uniform W2A4, and W2A16 (RCP Sec. 4.4, Eqs. 10, 11, 14).

A weight is one of four levels of its output row and group of 128 inputs; y = x W^T with W made of levels. Up to
`MAX_ROWS` rows read the packed weight directly, a few at a time; for more, the weight is written out in 16 bits and
multiplied by the library's product. Nothing here chooses levels or codes: that is the quantizer's business.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import INT, POINTER, CudaFile, Parameters, Structure
from rotquant.kernels.launch.loading import TranslationUnit, kernel
from rotquant.kernels.launch.operators import check_same_device, check_tensor, launch, operator
from rotquant.kernels.launch.overlap import launch_waiting
from rotquant.kernels.layouts.weights import STRIP, padded
from rotquant.kernels.products.output import DTYPE, OUTPUTS, check_output

#: Input features that share a table.
GROUP_SIZE = 128
#: Up to so many rows the packed weight is multiplied directly, by type of the activations.
MAX_ROWS = {torch.int8: 32, torch.float16: 8, torch.bfloat16: 8}


def table_shapes(out_features: int, in_features: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the codes and of the table of a `LutWeight`."""
    strips, groups = padded(out_features, STRIP) // STRIP, padded(in_features, 2 * GROUP_SIZE) // GROUP_SIZE
    return (strips, groups, 32, 16), (strips, groups, 8, 2, 4)


@dataclass(frozen=True)
class LutWeight:
    """A 2-bit weight with tables, as the kernel reads it: 2.5 bits per weight.

    codes: uint8 [strips, groups, 32, 16], strips = ceil(out / 16), groups = in / 128 and one of zeros where that is
        odd. Lane 4g + t of a warp owns 16 bytes: four words, the codes' low bits of row g, their high bits, and the
        same of row g + 8, for inputs 32t..32t+31 of the group; bit 8b + r of a word belongs to input 4r + b of these.
    table: float16 [strips, groups, 8, 2, 4], the levels of rows g and g + 8.
    shape: (out, in).
    """

    codes: Tensor
    table: Tensor
    shape: tuple[int, int]

    @classmethod
    def pack(cls, codes: Tensor, table: Tensor) -> "LutWeight":
        """Pack uint8 codes 0..3 [out, in] and levels [out, in / 128, 4], which are rounded to float16.

        Raises:
            KernelError: codes that are not uint8, inputs that are no multiple of 128, or levels of another shape.
        """
        rows, columns = codes.shape
        if codes.dtype != torch.uint8:
            raise KernelError(f"look-up-table codes are {codes.dtype}, and packing takes uint8.")
        if columns % GROUP_SIZE:
            raise KernelError(f"look-up tables serve groups of {GROUP_SIZE} inputs; {columns} is no multiple of that.")
        groups = columns // GROUP_SIZE
        if table.shape != (rows, groups, 4):
            raise KernelError(
                f"the table has shape {tuple(table.shape)}; codes of shape {(rows, columns)} take {(rows, groups, 4)}."
            )
        fill = padded(rows, STRIP) - rows
        codes = pad(codes, (0, groups % 2 * GROUP_SIZE, 0, fill))
        levels = pad(table.to(torch.float16), (0, 0, 0, groups % 2, 0, fill)).unflatten(0, (-1, 2, 8))
        return cls(_pack_codes(codes), levels.permute(0, 3, 2, 1, 4).contiguous(), (rows, columns))

    def unpack(self) -> tuple[Tensor, Tensor]:
        """The inverse of `pack`: codes uint8 [out, in] and levels float16 [out, in / 128, 4]."""
        rows, columns = self.shape
        groups = columns // GROUP_SIZE
        return _unpack_codes(self.codes)[:rows, :columns], _unpack_table(self.table)[:rows, :groups]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] as floating-point numbers."""
        codes, table = self.unpack()
        return _look_up(codes, table).to(dtype)


def _pack_codes(codes: Tensor) -> Tensor:
    """uint8 0..3 [16 strips, 128 groups] -> uint8 [strips, groups, 32, 16]; see `LutWeight`."""
    strips, groups = codes.shape[0] // STRIP, codes.shape[1] // GROUP_SIZE
    bits = torch.stack([codes & 1, codes >> 1], -1).view(strips, 2, 8, groups, 4, 8, 4, 2)
    r = torch.arange(8, dtype=torch.uint8, device=codes.device).view(8, 1, 1)
    words = (bits << r).sum(5, dtype=torch.uint8)  # [strip, half, g, group, t, byte, plane]
    return words.permute(0, 3, 2, 4, 1, 6, 5).reshape(strips, groups, 32, 16).contiguous()


def _unpack_codes(packed: Tensor) -> Tensor:
    strips, groups = packed.shape[:2]
    words = packed.view(strips, groups, 8, 4, 2, 2, 4).permute(0, 4, 2, 1, 3, 6, 5)
    r = torch.arange(8, dtype=torch.uint8, device=packed.device).view(8, 1, 1)
    bits = words.unsqueeze(5) >> r & 1  # [strip, half, g, group, t, r, byte, plane]
    return (bits[..., 0] | bits[..., 1] << 1).reshape(strips * STRIP, groups * GROUP_SIZE)


def _unpack_table(table: Tensor) -> Tensor:
    """[strips, groups, 8, 2, 4] -> [16 strips, groups, 4]."""
    return table.permute(0, 3, 2, 1, 4).reshape(table.shape[0] * STRIP, table.shape[1], 4)


def _look_up(codes: Tensor, table: Tensor) -> Tensor:
    """float16 [out, in]: the level that each code stands for."""
    return table.gather(2, codes.unflatten(1, (-1, GROUP_SIZE)).long()).flatten(1)


def spread_features(features: int, group_size: int) -> int:
    """Number of inputs after `spread`."""
    return features // group_size * padded(group_size, GROUP_SIZE)


def spread(x: Tensor, group_size: int) -> Tensor:
    """Inputs in groups of any size as whole groups of the kernel, zeros after each: [rows, in] -> [rows, spread in].

    Groups of a multiple of 128 stay as they are; smaller ones cost a weight of 128 for each, which is what small
    models pay for kernels of large ones.
    """
    fill = padded(group_size, GROUP_SIZE) - group_size
    return pad(x.unflatten(-1, (-1, group_size)), (0, fill)).flatten(-2) if fill else x


def spread_weight(codes: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in groups of any size as one in the kernel's groups, which multiplies inputs that are `spread`.

    Args:
        codes: uint8 0..3 [out, in]. table: [out, groups, 4], groups dividing in.

    Returns:
        codes [out, spread in] and table [out, spread in / 128, 4] with each group's levels repeated.
    """
    group_size = codes.shape[1] // table.shape[1]
    repeats = padded(group_size, GROUP_SIZE) // GROUP_SIZE
    return spread(codes, group_size), table.repeat_interleave(repeats, dim=1)


def lut_linear(
    x: Tensor,
    weight: LutWeight,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """Multiply activations with a look-up-table weight.

    Args:
        x: [rows, in], float16 or bfloat16; or int8 holding 4-bit codes -8..7, which `row_scale` multiplies.
        row_scale: float32 [rows], or [1] for a static scale; with int8 codes only.
        bias: [out] of `dtype`.

    Returns:
        [rows, out] of `dtype` (float16, bfloat16 or float32). On a GPU a row with an infinity gives NaN, and a code
        beyond four bits makes the result NaN rather than wrong.

    Raises:
        KernelError: a tensor of another dtype, shape or device, or not contiguous.
    """
    return w2_linear(x, row_scale, weight.codes, weight.table, bias, weight.shape[0], dtype)


class W2Linear(NamedTuple):
    """Arguments of `w2_linear`: see `lut_linear`; codes and table are those of a `LutWeight`."""

    x: Tensor
    row_scale: Tensor | None
    codes: Tensor
    table: Tensor
    bias: Tensor | None
    out_features: int
    dtype: torch.dtype


def _reference(a: W2Linear) -> Tensor:
    """The definition, in float64, rounded once."""
    weight = _look_up(_unpack_codes(a.codes), _unpack_table(a.table))[: a.out_features, : a.x.shape[1]].double()
    y = a.x.double() @ weight.T
    if a.row_scale is not None:
        y = y * a.row_scale.double()[:, None]
    return (y if a.bias is None else y + a.bias.double()).to(a.dtype)


def _cuda(a: W2Linear) -> Tensor:
    _check(a)
    rows = a.x.shape[0]
    y = torch.empty(rows, a.out_features, dtype=a.dtype, device=a.x.device)
    if y.numel() == 0:
        return y
    if rows > MAX_ROWS[a.x.dtype]:
        return _multiply_dequantized(a)
    strips, groups = a.codes.shape[:2]
    processors = torch.cuda.get_device_properties(a.x.device).multi_processor_count
    plan = choose_plan(a.x.dtype, rows, strips, groups, processors)
    for start in range(0, rows, plan.rows):
        part = slice(start, start + plan.rows)
        scale = a.row_scale if a.row_scale is None or a.row_scale.shape[0] == 1 else a.row_scale[part]
        launch_lut_gemv(plan, a.x[part], scale, a.codes, a.table, a.bias, y[part])
    return y


def _check(a: W2Linear) -> None:
    check_tensor(a.x, "activations", dtypes=(torch.int8, torch.float16, torch.bfloat16), shape=(None, None))
    rows, columns = a.x.shape
    if columns % GROUP_SIZE or columns == 0:
        raise KernelError(f"activations have {columns} columns, and look-up tables serve groups of {GROUP_SIZE}.")
    codes_shape, table_shape = table_shapes(a.out_features, columns)
    check_tensor(a.codes, "packed codes", dtypes=(torch.uint8,), shape=codes_shape)
    check_tensor(a.table, "packed table", dtypes=(torch.float16,), shape=table_shape)
    if (a.row_scale is None) != (a.x.dtype != torch.int8):
        raise KernelError("int8 activations take a row scale, and floating-point activations take none.")
    check_output(rows, a.out_features, a.dtype, a.row_scale, a.bias)
    check_same_device(a.x, row_scale=a.row_scale, codes=a.codes, table=a.table, bias=a.bias)


@dataclass(frozen=True)
class LutPlan:
    """How a product is cut up; template arguments of `lut_gemv` in kernels/lut_gemv.cu.

    kind: C++ type that says what the activations are.
    rows: capacity, 1, 2, 4 or 8.
    across: strips of 16 output features that a block has under way.
    along: warps that share a strip; they split the inputs.
    depth: pairs of groups that a warp keeps on their way from memory.
    blocks: of the grid; they split the strips.
    """

    kind: str
    rows: int
    across: int
    along: int
    depth: int
    blocks: int

    @property
    def instance(self) -> str:
        """The C++ name of the kernel."""
        return f"lut_gemv<{self.kind}, {self.rows}, {self.across}, {self.along}, {self.depth}>"

    @property
    def threads(self) -> int:
        return 32 * self.across * self.along

    @property
    def group_bytes(self) -> int:
        """Digits of a row's group of activations in shared memory, and their unit."""
        return 3 * 128 + 4 if self.kind.startswith("Digits24") else 64

    def shared_bytes(self, strips: int, groups: int) -> int:
        """Dynamic shared memory of a block: digits of the activations, their units, partial sums."""
        return self._block_bytes(-(-strips // self.blocks), groups)

    def _block_bytes(self, strips: int, groups: int) -> int:
        return self.rows * (groups * self.group_bytes + strips * self.along * STRIP * 4)

    @functools.cached_property
    def source(self) -> TranslationUnit:
        """A unit of this instance, whose shared memory is counted as here: by the example of 3 strips and 10 groups."""
        counted = (f"shared_bytes<{self.kind}, {self.rows}, {self.along}>(3, 10)", self._block_bytes(3, 10))
        return TranslationUnit(_FILE, (self.instance,), (counted,))


_KINDS = {
    torch.int8: "Codes4<signed char>",
    torch.float16: "Digits24<__half>",
    torch.bfloat16: "Digits24<__nv_bfloat16>",
}
_DEQUANTIZE = {
    torch.float16: "lut_dequantize<__half>",
    torch.bfloat16: "lut_dequantize<__nv_bfloat16>",
}
#: Shared memory that a block may have on every supported architecture.
_SHARED = 99 * 1024
#: Warps of a block of `lut_dequantize`: each writes a strip's group.
_DEQUANTIZE_WARPS = 8
#: `Problem` of kernels/lut_gemv.cu.
_PROBLEM = Structure(
    "Problem",
    **dict.fromkeys(("x", "row_scale", "codes", "table", "bias", "out"), POINTER),
    **dict.fromkeys(("rows", "features", "strips", "groups", "pairs", "row_scale_step", "dtype"), INT),
)
_FILE = CudaFile(
    "lut_gemv.cu",
    kernels={
        "lut_gemv": Parameters(problem=_PROBLEM),
        "lut_dequantize": Parameters(codes=POINTER, table=POINTER, out=POINTER, strips=INT, groups=INT, pairs=INT),
    },
    constants={
        "kStrip": STRIP,
        "kGroup": GROUP_SIZE,
        "kDequantizeWarps": _DEQUANTIZE_WARPS,
        **DTYPE,
    },
)


def choose_plan(dtype: torch.dtype, rows: int, strips: int, groups: int, multiprocessors: int) -> LutPlan:
    """The plan for so many rows; fewer rows at a time where their digits do not fit in shared memory.

    The shapes are the fastest of those tried on an H200 (kernels/notes/lut.md).

    Raises:
        KernelError: not even one row fits.
    """
    codes = dtype == torch.int8
    capacity = next(c for c in (8, 4, 2, 1) if c <= (8 if codes else 4) and c < 2 * rows)
    while capacity:
        if codes:
            across, along, depth, blocks = (1, 8, 4, 2) if capacity == 1 else (2, 8, 2, 1)
        else:
            across, along, depth, blocks = (1, 16, min(capacity, 2), 1)
        plan = LutPlan(_KINDS[dtype], capacity, across, along, depth, min(strips, blocks * multiprocessors))
        if plan.shared_bytes(strips, groups) <= _SHARED:
            return plan
        capacity //= 2
    raise KernelError(f"{groups * GROUP_SIZE} input features do not fit in the shared memory of the look-up kernel.")


def launch_lut_gemv(
    plan: LutPlan, x: Tensor, row_scale: Tensor | None, codes: Tensor, table: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Fill `out` [rows, out_features], at most `plan.rows` rows; arguments as in `w2_linear`, already checked."""
    strips, groups = codes.shape[:2]
    problem = _PROBLEM.of(
        x=x,
        row_scale=row_scale,
        codes=codes,
        table=table,
        bias=bias,
        out=out,
        rows=out.shape[0],
        features=out.shape[1],
        strips=strips,
        groups=x.shape[1] // GROUP_SIZE,
        pairs=groups // 2,
        row_scale_step=row_scale is not None and row_scale.shape[0] > 1,
        dtype=OUTPUTS[out.dtype],
    )
    function = kernel(plan.source, plan.instance, x.device)
    shared = plan.shared_bytes(strips, groups)
    launch_waiting(function, (plan.blocks,), (plan.threads,), problem, device=x.device, shared=shared)


def _multiply_dequantized(a: W2Linear) -> Tensor:
    """Write the weight out and multiply: integers and levels are exact in float16, sums are float32.

    With bfloat16 activations the levels are rounded to bfloat16, as a bfloat16 model's weights are.
    """
    dtype = torch.float16 if a.x.dtype == torch.int8 else a.x.dtype
    weight = launch_dequantize(a.codes, a.table, a.out_features, a.x.shape[1], dtype)
    if a.dtype == a.x.dtype:
        return linear(a.x, weight, a.bias)
    y = torch.mm(a.x.to(dtype), weight.T, out_dtype=torch.float32)
    if a.row_scale is not None:
        y *= a.row_scale[:, None]
    if a.bias is not None:
        y += a.bias
    return y.to(a.dtype)


def launch_dequantize(codes: Tensor, table: Tensor, out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """The weight [out_features, in_features] of `dtype` (float16 or bfloat16), on a GPU."""
    strips, groups = codes.shape[0], in_features // GROUP_SIZE
    weight = torch.empty(strips * STRIP, in_features, dtype=dtype, device=codes.device)
    name = _DEQUANTIZE[dtype]
    function = kernel(TranslationUnit(_FILE, (name,)), name, codes.device)
    arguments = (codes, table, weight, strips, groups, codes.shape[1] // 2)
    blocks = -(-strips * groups // _DEQUANTIZE_WARPS)
    launch(function, (blocks,), (32 * _DEQUANTIZE_WARPS,), *arguments, device=codes.device)
    return weight[:out_features]


def sources(architecture: str) -> list[TranslationUnit]:
    """Everything that the operator may compile for this architecture."""
    del architecture
    plans = [choose_plan(torch.int8, rows, 1, 1, 1) for rows in (1, 2, 4, 8)]
    plans += [choose_plan(dtype, rows, 1, 1, 1) for dtype in _DEQUANTIZE for rows in (1, 2, 4)]
    return [plan.source for plan in plans] + [TranslationUnit(_FILE, (name,)) for name in _DEQUANTIZE.values()]


w2_linear = operator(
    "w2_linear",
    reference=_reference,
    cuda=_cuda,
    fake=lambda a: a.x.new_empty(a.x.shape[0], a.out_features, dtype=a.dtype),
)
