"""Launches of the Hadamard kernels: which of the four takes a transform, and the structures they take.

16-bit rows with at least 64 columns and a moderate left factor go to tensor cores (`hadamard_cuts`), everything
else to kernels/hadamard_any.cu, float16 arithmetic on other types included. Tensors are checked by the operators of
`hadamard` and `activations`, which call this.
"""

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import FLOAT, INT, LONG, POINTER, TYPES, CudaFile, Parameters, Structure
from rotquant.kernels.hadamard.cuts import CHUNK, TILE, Across, Cut, Strips, cut_of, signs, threads
from rotquant.kernels.launch.loading import Kernel, TranslationUnit, kernel
from rotquant.kernels.launch.operators import launch
from rotquant.kernels.launch.tma import TENSOR_MAP, matrix_map
from rotquant.kernels.layouts.codes import CODES, NO_CODES, RowCodes
from rotquant.tensors.hadamard.constructions import core_matrix, decompose

_TILES = {"kChunk": CHUNK, "kTile": TILE}
#: `Share` of kernels/include/pipeline/row_share.cuh.
_SHARE = Structure("Share", blocks=INT, even=INT, run=INT)
_COMMON = {"x": POINTER, "y": POINTER, "signs": POINTER, "codes": CODES}
#: `Problem` of kernels/include/hadamard/strips_shape.cuh, of hadamard_dense.cu and hadamard_across.cu, of
#: hadamard_any.cu.
_STRIPS = Structure("Problem", **_COMMON, elements=LONG, share=_SHARE, rows=INT, blocks_of=INT, norm=FLOAT)
_ROWS = Structure("Problem", **_COMMON, share=_SHARE, rows=INT, norm=FLOAT)
_ANY = Structure("Problem", **_COMMON, core=INT, n=INT, inner=INT, columns=INT, norm=FLOAT)
_FILES = {
    file.name: file
    for file in (
        CudaFile("hadamard_strips.cu", {"hadamard_strips": Parameters(problem=_STRIPS)}, _TILES),
        CudaFile("hadamard_dense.cu", {"hadamard_dense": Parameters(problem=_ROWS)}, _TILES),
        CudaFile("hadamard_across.cu", {"hadamard_across": Parameters(problem=_ROWS, map=TENSOR_MAP)}, _TILES),
    )
}
_ANY_FILE = CudaFile("hadamard_any.cu", {"hadamard_any": Parameters(problem=_ANY)})


def sources(architecture: str) -> list[TranslationUnit]:
    """Sources of the launchers: every kernel, and of its instances those that differ most."""
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
        tensor_cores.append(_source(cut, dtype, output, gated, arithmetic))
    return [
        *tensor_cores,
        TranslationUnit(_ANY_FILE, ("hadamard_any<float,float,kSame,false>", "hadamard_any<__half,__half,kInt4,true>")),
    ]


@lru_cache(maxsize=1024)
def _source(cut: Cut, dtype: torch.dtype, output: str, gated: bool, half: bool) -> TranslationUnit:
    """A unit of one instance, which cuts a row as the host does and has the shared memory that the host gives it."""
    name = cut.instance(dtype, output, gated, half)
    shape = f"Shape<{name.partition('<')[2].rpartition(',')[0]}>"  # a kernel's last argument, its blocks, aside
    counted = {
        "kElements": cut.elements,
        "kWarps": cut.warps,
        "kSharedBytes": cut.shared_bytes(output, gated, half),
    }
    return TranslationUnit(
        _FILES[cut.file], (name,), tuple((f"{shape}::{name}", value) for name, value in counted.items())
    )


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
    source = _source(cut, x.dtype, output, gated, half)
    function = kernel(source, source.instances[0], x.device)
    shared = cut.shared_bytes(output, gated, half)
    elements = x.numel() // (2 if gated else 1)
    rows = -(-elements // cut.elements)
    units = -(-rows // cut.rows_per_block)
    blocks, share = cut.share(units, _resident_blocks(function, threads(cut), shared, x.device.index or 0))
    table = signs(cut.order, cut.blocks_of or cut.order, inverse, cut.sign_rows, x.device)
    common = {**_tensors(x, out, table), "share": share, "rows": units, "norm": 1 / math.sqrt(n)}
    if isinstance(cut, Strips):
        problem = _STRIPS.of(**common, elements=elements, blocks_of=cut.blocks_of or cut.sign_rows)
    else:
        problem = _ROWS.of(**common)
    maps = ()
    if isinstance(cut, Across):  # rows of x as matrices, one below the other; a copy takes 64 columns of one
        shape = {"columns": CHUNK * cut.chunks, "rows": rows * cut.order, "box": (CHUNK, cut.order)}
        maps = (matrix_map(x, element=2, swizzled=True, **shape),)
    launch(function, (blocks,), (threads(cut),), problem, *maps, device=x.device, shared=shared)


def has_kernel(n: int, inner: int, dtype: torch.dtype, device: torch.device, half: bool = False) -> bool:
    """Whether a kernel transforms the middle axis of [rows, n, inner] on this GPU."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    fits = _any_bytes(n * inner, half) <= _shared_limit(device)
    return fits or _fitting_cut(n, inner, dtype, "kSame", False, half, device) is not None


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
    function = kernel(TranslationUnit(_ANY_FILE, (name,)), name, x.device)
    # float16 arithmetic halves the values with every two bits; the norm is what then remains.
    halvings = decompose(n)[1] // 2 if half else 0
    problem = _ANY.of(
        **_tensors(x, out, _core_signs(core, inverse, x.device)),
        core=core,
        n=n,
        inner=inner,
        columns=out.columns if isinstance(out, RowCodes) else elements,
        norm=2**halvings / math.sqrt(n),
    )
    block = 1024 if elements > 16384 or core > 2048 else 512 if elements > 4096 else 128
    launch(function, (x.shape[0],), (block,), problem, device=x.device, shared=shared)


def _tensors(x: Tensor, out: Tensor | RowCodes, table: Tensor) -> dict[str, Any]:
    """The fields that all kernels have in common."""
    if isinstance(out, RowCodes):
        return {"x": x, "y": None, "signs": table, "codes": out.fields}
    return {"x": x, "y": out, "signs": table, "codes": NO_CODES}


def _any_bytes(elements: int, half: bool) -> int:
    return -(-elements * (2 if half else 4) // 16) * 16


@cache
def _core_signs(core: int, inverse: bool, device: torch.device) -> Tensor:
    """Bits of the dense factor for hadamard_any.cu: int32 [core, ceil(core / 32)], row b and bit a for output b.

    Kept for as long as the process lives, since captured graphs hold their address.
    """
    table = core_matrix(core) < 0
    padded = np.zeros((core, -(-core // 32) * 32), dtype=bool)
    padded[:, :core] = table if inverse else table.T
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32)).to(device)


@lru_cache(maxsize=1024)
def _resident_blocks(kernel: Kernel, block: int, shared: int, index: int) -> int:
    """How many blocks of a kernel the GPU holds at once."""
    from cupy.cuda import Device, driver

    with Device(index):
        if shared > 32 * 1024 and kernel.function.max_dynamic_shared_size_bytes < shared:
            kernel.function.max_dynamic_shared_size_bytes = shared
        each = driver.occupancyMaxActiveBlocksPerMultiprocessor(  # pyright: ignore[reportAttributeAccessIssue]  # no stubs
            kernel.function.kernel.ptr, block, shared
        )
    return max(1, each) * torch.cuda.get_device_properties(index).multi_processor_count


def _shared_limit(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
