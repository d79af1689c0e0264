"""W4A4 and W4A8 products of few rows (QuaRot Sec. 4, stage 2, decode): weights stream from memory once.

The kernel is kernels/gemv.cu; here are its launch and the choice of how a product is cut up. Results do not depend on
the cut where scales are per output feature: sums are integers. With group scales they are floats, added in an order
that is fixed by shape and GPU, so equal inputs always give equal outputs.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import INT, POINTER, CudaFile, Parameters, Structure
from rotquant.kernels.launch.loading import TranslationUnit, architecture_of_device, kernel
from rotquant.kernels.launch.overlap import launch_waiting, overlaps
from rotquant.kernels.layouts.weights import K_BLOCK, STRIP, padded
from rotquant.kernels.products.output import DTYPE, OUTPUTS

#: Rows that this kernel has room for.
MAX_ROWS = 64
#: On Hopper, rows up to which it is the faster one whatever the weight; and strips that are too few to fill the GPU
#: with tiles of `gemm`, so that it stays the faster one up to `MAX_ROWS`.
_HOPPER_ROWS, _HOPPER_FEW_STRIPS = 32, 264
#: Largest contraction length whose sums surely fit 32 bits, products counted in units of 1/16 and 1/256.
MAX_INNER = 2**17 - K_BLOCK

#: Input features of one stage of a ring.
STAGE_K = 128
_OTHER_OPERANDS = ((False, False), (True, True), (False, True))
#: `Problem` of kernels/include/gemv/ring.cuh.
PROBLEM = Structure(
    "Problem",
    **dict.fromkeys(("activations", "row_scale", "weight", "column_scale", "bias", "out"), POINTER),
    **dict.fromkeys(("rows", "features", "inner"), INT),
    **dict.fromkeys(("row_scale_step", "feature_step", "group_step"), INT),
    **dict.fromkeys(("dtype", "early"), INT),
)
#: Of the same header.
CONSTANTS = {
    "kStrip": STRIP,
    "kBlockK": K_BLOCK,
    "kStageK": STAGE_K,
    **DTYPE,
}
_FILE = CudaFile(
    "gemv.cu",
    kernels=dict.fromkeys(("gemv", "gemv_cluster"), Parameters(problem=PROBLEM)),
    constants=CONSTANTS,
)


@dataclass(frozen=True)
class GemvPlan:
    """How a product is cut up; the template arguments of `gemv` in kernels/gemv.cu.

    rows: capacity; the smallest of 1, 8, 16, 32 and 64 that holds them is best.
    strips: strips of 16 output features per warp.
    across: warps of a group; they share activations.
    along: groups of a block; they share strips and split the contraction.
    depth: stages of 128 input features that a group keeps under way, plus one.
    cluster: blocks that split the contraction further (1, 2, 4 or 8; above 1 on Hopper and newer).
    """

    rows: int
    strips: int
    across: int
    along: int
    depth: int
    cluster: int = 1

    @property
    def block_strips(self) -> int:
        return self.strips * self.across

    @property
    def threads(self) -> int:
        return 32 * self.across * self.along

    @property
    def sizes(self) -> list[str]:
        """The numbers in the C++ name of a kernel."""
        numbers = (self.rows, self.strips, self.across, self.along, self.depth)
        return [str(number) for number in (numbers if self.cluster == 1 else (*numbers, self.cluster))]

    def bytes(self, row_bits: int, grouped: bool) -> int:
        """Dynamic shared memory of a block: the rings, or the partial sums that replace them.

        Args:
            row_bits: of an activation, 4, 8 or 16.
        """
        features = self.block_strips * STRIP
        slot = features * STAGE_K // 2 + self.rows * STAGE_K * row_bits // 8 + 4 * features * grouped
        slot = padded(slot, 1024 if row_bits == 16 and self.rows >= 16 else 16)
        return self.along * max(self.depth * slot, 4 * self.rows * (features + 4)) + 4 * (self.rows + features)

    def check(self, row_bits: int, grouped: bool) -> tuple[str, int]:
        """What the compiler must find these bytes to be."""
        sizes = (self.rows, self.strips, self.across, self.along, self.depth, self.cluster, row_bits)
        shape = f"Shape<{', '.join(map(str, sizes))}, {str(grouped).lower()}>"
        return f"{shape}::kSharedBytes", self.bytes(row_bits, grouped)

    def shared_bytes(self, packed: bool, grouped: bool) -> int:
        """`bytes` with codes as activations."""
        return self.bytes(4 if packed else 8, grouped)

    def instance(self, packed: bool, grouped: bool) -> str:
        """The C++ name of the kernel."""
        flags = [str(flag).lower() for flag in (packed, grouped)]
        return f"{'gemv' if self.cluster == 1 else 'gemv_cluster'}<{', '.join([*self.sizes, *flags])}>"


#: By rows: (strips up to which it is taken, plan), measured on an H200, 132 multiprocessors: kernels/notes/gemv.md.
_HOPPER: dict[int, tuple[tuple[float, GemvPlan], ...]] = {
    1: (
        (132, GemvPlan(1, 1, 1, 16, 5)),
        (528, GemvPlan(1, 2, 1, 16, 4)),
        (1056, GemvPlan(1, 2, 2, 4, 5)),
        (math.inf, GemvPlan(1, 1, 1, 8, 4)),
    ),
    8: ((528, GemvPlan(8, 2, 1, 8, 5)), (math.inf, GemvPlan(8, 2, 2, 4, 5))),
    16: ((264, GemvPlan(16, 2, 1, 8, 4)), (math.inf, GemvPlan(16, 2, 2, 4, 5))),
    32: ((264, GemvPlan(32, 2, 2, 4, 4, 2)), (1056, GemvPlan(32, 2, 2, 4, 4)), (math.inf, GemvPlan(32, 2, 7, 2, 4))),
    64: ((264, GemvPlan(64, 2, 2, 4, 4, 2)), (math.inf, GemvPlan(64, 2, 4, 2, 4))),
}
#: Before Hopper: within the 99 KB of shared memory of sm_86 and sm_89; not measured.
_AMPERE: dict[int, tuple[tuple[float, GemvPlan], ...]] = {
    1: ((math.inf, GemvPlan(1, 1, 1, 8, 5)),),
    8: ((math.inf, GemvPlan(8, 2, 1, 8, 3)),),
    16: ((math.inf, GemvPlan(16, 2, 2, 4, 3)),),
    32: ((math.inf, GemvPlan(32, 2, 4, 2, 3)),),
    64: ((math.inf, GemvPlan(64, 2, 4, 1, 4)),),
}


def is_preferred(rows: int, strips: int, architecture: str) -> bool:
    """Whether this kernel rather than `gemm` should multiply so many rows with so many strips of 16 output features.

    Measured on an H200 (kernels/notes/gemv.md); elsewhere it does wherever it has room.
    """
    everywhere = _HOPPER_ROWS if architecture == "sm_90a" else MAX_ROWS
    return rows <= everywhere or (rows <= MAX_ROWS and strips <= _HOPPER_FEW_STRIPS)


def choose_plan(rows: int, strips: int, architecture: str) -> GemvPlan:
    """The plan for 1 to `MAX_ROWS` rows and so many strips of 16 output features."""
    table = _plans(architecture)
    capacity = min(capacity for capacity in table if capacity >= rows)
    return next(plan for most, plan in table[capacity] if strips <= most)


def _plans(architecture: str) -> dict[int, tuple[tuple[float, GemvPlan], ...]]:
    # Hopper and newer form clusters of blocks and have its shared memory.
    return _HOPPER if int(architecture.removeprefix("sm_").rstrip("a")) >= 90 else _AMPERE


def launch_gemv(
    codes: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    column_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    plan: GemvPlan | None = None,
) -> None:
    """Fill `out` [rows, out_features]; arguments as in `linear.w4_linear`, already checked.

    Args:
        plan: how to cut the product up; chosen by shape if None.

    Raises:
        KernelError: more than `MAX_ROWS` rows or `MAX_INNER` input features, or what `loading.kernel` raises.
    """
    rows, features = out.shape
    packed, grouped = codes.dtype == torch.uint8, column_scale.dim() == 2
    inner = codes.shape[1] * (2 if packed else 1)
    if rows > MAX_ROWS:
        raise KernelError(f"the kernel for few rows takes up to {MAX_ROWS}, not {rows}.")
    if inner > MAX_INNER:
        raise KernelError(f"{inner} input features could overflow 32-bit sums; the kernel takes up to {MAX_INNER}.")
    plan = plan or choose_plan(rows, weight.shape[0], architecture_of_device(out.device))
    problem = PROBLEM.of(
        activations=codes,
        row_scale=row_scale,
        weight=weight,
        column_scale=column_scale,
        bias=bias,
        out=out,
        rows=rows,
        features=features,
        inner=inner,
        row_scale_step=row_scale.shape[0] > 1,
        feature_step=column_scale.shape[1] if grouped else 1,
        group_step=1,
        dtype=OUTPUTS[out.dtype],
        early=overlaps(out.device),
    )
    blocks = -(-weight.shape[0] // plan.block_strips) * plan.cluster
    shared = plan.shared_bytes(packed, grouped)
    if overlaps(out.device):
        shared = max(shared, spreading_bytes(blocks, out.device))
    source = _source(plan, packed, grouped)
    function = kernel(source, source.instances[0], out.device)
    launch_waiting(function, (blocks,), (plan.threads,), problem, device=out.device, shared=shared)


@functools.cache
def _source(plan: GemvPlan, packed: bool, grouped: bool) -> TranslationUnit:
    """A unit of one instance, whose rings have as many bytes as the host gives them."""
    return TranslationUnit(_FILE, (plan.instance(packed, grouped),), (plan.check(4 if packed else 8, grouped),))


def spreading_bytes(blocks: int, device: torch.device) -> int:
    """Shared memory per block with which no multiprocessor takes more than its share of the blocks.

    Blocks that move in while an earlier launch runs would otherwise crowd where it left first.
    """
    properties = torch.cuda.get_device_properties(device)
    share = -(-blocks // properties.multi_processor_count)
    return properties.shared_memory_per_multiprocessor // (share + 1)


def sources(architecture: str) -> list[TranslationUnit]:
    """A unit for every plan with packed activations, and one for each of the other kinds of operands."""
    plans = [plan for choices in _plans(architecture).values() for _, plan in choices]
    units = [_source(plan, packed=True, grouped=False) for plan in plans]
    return units + [_source(plans[-1], packed=packed, grouped=grouped) for packed, grouped in _OTHER_OPERANDS]
