"""W4A4 and W4A8 products of few rows (QuaRot Sec. 4, stage 2, decode): weights stream from memory once.

The kernel is kernels/gemv.cu; here are its launch and the choice of how a product is cut up, by shape and by how many
multiprocessors there are. Nothing here depends on values, and results do not depend on the cut: sums are integers, and
with group scales they are added in one fixed order.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rotquant.errors import KernelError
from rotquant.kernels.layouts import K_BLOCK, STRIP
from rotquant.kernels.loading import Source, architecture_of_device, kernel
from rotquant.kernels.operators import launch

#: Up to so many rows this kernel is faster than `gemm`.
MAX_ROWS = 64
#: Largest contraction length whose sums surely fit 32 bits, products counted in units of 1/16 and 1/256.
MAX_INNER = 2**17 - K_BLOCK

_STAGE_K = 128
_DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_PROBLEM = np.dtype(
    [(name, np.uint64) for name in ("activations", "row_scale", "weight", "column_scale", "bias", "out")]
    + [(name, np.int32) for name in ("rows", "features", "inner", "row_scale_step", "groups", "dtype", "early")]
)


@dataclass(frozen=True)
class Plan:
    """How a product is cut up; the template arguments of `gemv` in kernels/gemv.cu.

    rows: capacity; the smallest of 1, 4, 8, 16, 32 and 64 that holds them is best.
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

    def shared_bytes(self, packed: bool, grouped: bool) -> int:
        """Dynamic shared memory of a block: the rings, or the partial sums that replace them."""
        features = self.block_strips * STRIP
        slot = features * _STAGE_K // 2 + self.rows * _STAGE_K // (2 if packed else 1) + 4 * features * grouped
        return self.along * max(self.depth * slot, 4 * self.rows * (features + 4)) + 4 * (self.rows + features)

    def instance(self, packed: bool, grouped: bool) -> str:
        """The C++ name of the kernel."""
        numbers = [self.rows, self.strips, self.across, self.along, self.depth]
        flags = [str(flag).lower() for flag in (packed, grouped)]
        if self.cluster == 1:
            return f"gemv<{', '.join([*map(str, numbers), *flags])}>"
        return f"gemv_cluster<{', '.join([*map(str, numbers), str(self.cluster), *flags])}>"


def choose_plan(rows: int, strips: int, clusters: bool) -> Plan:
    """The plan for so many rows and strips of 16 output features; `clusters`: the GPU has them."""
    del strips, clusters
    if rows <= 1:
        return Plan(1, 1, 1, 8, 6)
    if rows <= 4:
        return Plan(4, 1, 1, 8, 6)
    if rows <= 8:
        return Plan(8, 2, 1, 8, 5)
    if rows <= 16:
        return Plan(16, 2, 2, 4, 5)
    if rows <= 32:
        return Plan(32, 2, 4, 2, 5)
    return Plan(64, 2, 8, 1, 5)


def launch_gemv(
    codes: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    column_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    plan: Plan | None = None,
    early: bool = False,
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
    clusters = int(architecture_of_device(out.device).removeprefix("sm_").rstrip("a")) >= 90
    plan = plan or choose_plan(rows, weight.shape[0], clusters)
    instance = plan.instance(packed, grouped)
    problem = np.zeros((), _PROBLEM)
    tensors = (codes, row_scale, weight, column_scale, bias, out)
    for name, tensor in zip(_PROBLEM.names, tensors, strict=False):
        problem[name] = 0 if tensor is None else tensor.data_ptr()
    problem["rows"], problem["features"], problem["inner"] = rows, features, inner
    problem["row_scale_step"] = int(row_scale.shape[0] > 1)
    problem["groups"] = column_scale.shape[1] if grouped else 0
    problem["dtype"] = _DTYPES[out.dtype]
    problem["early"] = early
    blocks = -(-weight.shape[0] // plan.block_strips) * plan.cluster
    launch(
        kernel(Source("gemv.cu", (instance,)), instance, out.device),
        (blocks,),
        (plan.threads,),
        problem[()],
        device=out.device,
        shared=plan.shared_bytes(packed, grouped),
    )


def sources(architecture: str) -> list[Source]:
    """Every instance that the launcher asks for with packed and held activations and scales per output feature."""
    return []
