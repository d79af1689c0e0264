"""Launches of the Hadamard kernels: which of the four takes a transform, and the structures they take.

16-bit rows with at least 64 columns beside a moderate left factor go to tensor cores (`hadamard_cuts`), everything
else to kernels/hadamard_any.cu, float16 arithmetic on other types included. Tensors are checked by the operators of
`hadamard` and `activations`, which call this.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rotquant.errors import KernelError
from rotquant.hadamard.constructions import core_matrix, decompose
from rotquant.kernels.codes import CODES, RowCodes
from rotquant.kernels.hadamard_cuts import CHUNK, TYPES, Across, Cut, Strips, cut_of, signs
from rotquant.kernels.loading import Source, kernel
from rotquant.kernels.operators import launch
from rotquant.kernels.tma import matrix_map

_COMMON = [("x", "u8"), ("y", "u8"), ("signs", "u8"), ("codes", CODES)]
_SHARED = [("share", "i4", 3), ("rows", "i4")]
_STRIPS = np.dtype([*_COMMON, ("elements", "i8"), *_SHARED, ("blocks_of", "i4"), ("norm", "f4")], align=True)
_ROWS = np.dtype([*_COMMON, *_SHARED, ("norm", "f4")], align=True)
_ANY = np.dtype([*_COMMON, ("core", "i4"), ("n", "i4"), ("inner", "i4"), ("columns", "i4"), ("norm", "f4")], align=True)


def sources(architecture: str) -> list[Source]:
    """What the launchers ask for: every kernel, and of its instances those that differ most."""
    half, bfloat = torch.float16, torch.bfloat16
    wanted = (
        (4096, 1, half, "kSame", False, True),
        (8192, 1, half, "kInt4", False, False),
        (11008, 1, half, "kSame", False, False),
        (13824, 1, bfloat, "kInt8", False, False),
        (14336, 1, bfloat, "kInt8", True, False),
        (32, 128, half, "kSame", False, False),
    )
    hopper = architecture == "sm_90a"
    tensor_cores = []
    for n, inner, dtype, output, gated, arithmetic in wanted:
        cut = cut_of(n, inner, dtype, output, across=hopper and not gated and not arithmetic)
        tensor_cores.append(Source(cut.file, (cut.instance(dtype, output, gated, arithmetic),)))
    return [
        *tensor_cores,
        Source("hadamard_any.cu", ("hadamard_any<float,float,kSame,false>", "hadamard_any<__half,__half,kInt4,true>")),
    ]


def launch_transform(
    x: Tensor, out: Tensor | RowCodes, *, heads: int, inverse: bool = False, half: bool = False, gated: bool = False
) -> None:
    """Transform contiguous x into `out`, or quantize its transform into `out`.

    Args:
        x: [rows, width] float16, bfloat16 or float32 on the GPU; [rows, 2 width] = (gate | up) with `gated`.
        out: [rows, width] of the type of x, or room for codes.
        heads: 0 for the whole last axis, else the number of heads that are mixed.
        half: float16 arithmetic.

    Raises:
        KernelError: no kernel holds such a row.
    """
    if x.shape[0] == 0:
        return
    width = x.shape[1] // (2 if gated else 1)
    n = heads or width
    output = out.output if isinstance(out, RowCodes) else "kSame"
    cut = _fitting_cut(n, width // n, x.dtype, output, gated, half, x.device)
    if cut is not None:
        launch_cut(cut, x, out, n=n, inverse=inverse, gated=gated, half=half)
    else:
        _launch_any(x, out, n=n, inner=width // n, inverse=inverse, half=half, gated=gated)


@lru_cache(maxsize=1024)
def _fitting_cut(
    n: int, inner: int, dtype: torch.dtype, output: str, gated: bool, half: bool, device: torch.device
) -> Cut | None:
    """The cut for a GPU, with a shorter ring and a smaller exchange where its shared memory does not hold more."""
    if half and dtype != torch.float16:
        return None
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    cut = cut_of(n, inner, dtype, output, across=hopper and not gated and not half)
    while cut is not None and cut.shared_bytes(output, gated, half and cut.columns) > _shared_limit(device):
        cut = cut.smaller(output, half)
    return cut


def launch_cut(
    cut: Cut, x: Tensor, out: Tensor | RowCodes, *, n: int, inverse: bool, gated: bool, half: bool = False
) -> None:
    """Run a tensor-core kernel, `n` being the order of one transform.

    half: float16 arithmetic, in which every factor's result is rounded; that of heads, one factor, is rounded anyway.
    """
    output = out.output if isinstance(out, RowCodes) else "kSame"
    half = half and cut.columns
    name = cut.instance(x.dtype, output, gated, half)
    function = kernel(Source(cut.file, (name,)), name, x.device)
    shared = cut.shared_bytes(output, gated, half)
    elements = x.numel() // (2 if gated else 1)
    rows = -(-elements // cut.elements)
    units = -(-rows // cut.rows_per_block)
    blocks, share = cut.share(units, _resident_blocks(function, cut.threads, shared, x.device.index or 0))
    table = signs(cut.order, cut.blocks_of or cut.order, inverse, cut.sign_rows, x.device)
    problem = _problem(_STRIPS if isinstance(cut, Strips) else _ROWS, x, out, table)
    problem["share"], problem["rows"], problem["norm"] = share, units, 1 / math.sqrt(n)
    maps = ()
    if isinstance(cut, Strips):
        problem["elements"], problem["blocks_of"] = elements, cut.blocks_of or cut.sign_rows
    elif isinstance(cut, Across):
        maps = (_row_map(cut, x, rows),)
    launch(function, (blocks,), (cut.threads,), problem[()], *maps, device=x.device, shared=shared)


def _row_map(cut: Across, x: Tensor, rows: int) -> np.void:
    """Rows of x as matrices, one below the other; a copy takes 64 columns of one."""
    columns, box = CHUNK * cut.chunks, (CHUNK, cut.order)
    return matrix_map(x, element=2, columns=columns, rows=rows * cut.order, box=box, swizzled=True)


def row_problem(n: int, inner: int, dtype: torch.dtype, device: torch.device, half: bool = False) -> str | None:
    """Why no kernel transforms the middle axis of [rows, n, inner] on this GPU; None where one does."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernels need a GPU of compute capability 8.0 or newer"
    if _fitting_cut(n, inner, dtype, "kSame", False, half, device) is not None:
        return None
    if _any_bytes(n * inner, half) > _shared_limit(device):
        return f"a row of {n * inner} values does not fit in shared memory"
    return None


def _launch_any(
    x: Tensor, out: Tensor | RowCodes, *, n: int, inner: int, inverse: bool, half: bool, gated: bool
) -> None:
    elements, core = n * inner, decompose(n)[0]
    shared = _any_bytes(elements, half)
    if shared > _shared_limit(x.device):
        raise KernelError(
            f"a row of {elements} values takes {shared} bytes of shared memory, and this GPU has"
            f" {_shared_limit(x.device)}."
        )
    output = out.output if isinstance(out, RowCodes) else "kSame"
    arithmetic = "__half" if half else "float"
    name = f"hadamard_any<{TYPES[x.dtype]},{arithmetic},{output},{str(gated).lower()}>"
    function = kernel(Source("hadamard_any.cu", (name,)), name, x.device)
    problem = _problem(_ANY, x, out, _core_signs(core, inverse, x.device))
    problem["core"], problem["n"], problem["inner"] = core, n, inner
    problem["columns"] = out.columns if isinstance(out, RowCodes) else elements
    # float16 arithmetic halves the values with every two bits; the norm is what then remains.
    halvings = decompose(n)[1] // 2 if half else 0
    problem["norm"] = 2**halvings / math.sqrt(n)
    threads = 1024 if elements > 16384 or core > 2048 else 512 if elements > 4096 else 128
    launch(function, (x.shape[0],), (threads,), problem[()], device=x.device, shared=shared)


def _problem(dtype: np.dtype, x: Tensor, out: Tensor | RowCodes, table: Tensor) -> np.ndarray:
    problem = np.zeros((), dtype=dtype)
    problem["x"], problem["signs"] = x.data_ptr(), table.data_ptr()
    if isinstance(out, RowCodes):
        problem["codes"] = out.record()
    else:
        problem["y"] = out.data_ptr()
    return problem


def _any_bytes(elements: int, half: bool) -> int:
    return -(-elements * (2 if half else 4) // 16) * 16


@lru_cache(maxsize=64)
def _core_signs(core: int, inverse: bool, device: torch.device) -> Tensor:
    """Bits of the dense factor for hadamard_any.cu: int32 [core, ceil(core / 32)], row b and bit a for output b."""
    table = core_matrix(core) < 0
    padded = np.zeros((core, -(-core // 32) * 32), dtype=bool)
    padded[:, :core] = table if inverse else table.T
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32)).to(device)


@lru_cache(maxsize=1024)
def _resident_blocks(function: Any, threads: int, shared: int, index: int) -> int:
    """How many blocks of a kernel the GPU holds at once."""
    from cupy.cuda import Device, driver

    with Device(index):
        if shared > 32 * 1024 and function.max_dynamic_shared_size_bytes < shared:
            function.max_dynamic_shared_size_bytes = shared
        each = driver.occupancyMaxActiveBlocksPerMultiprocessor(function.kernel.ptr, threads, shared)
    return max(1, each) * torch.cuda.get_device_properties(index).multi_processor_count


def _shared_limit(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
