"""Launches of the Hadamard kernels: which of the four takes a transform, and the structures they take.

16-bit rows with at least 64 columns and a moderate left factor go to tensor cores (`hadamard_cuts`), everything
else to kernels/hadamard_any.cu, float16 arithmetic on other types included. Tensors are checked by the operators of
`hadamard` and `activations`, which call this.
"""

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import FLOAT, INT, LONG, POINTER, TYPES, CudaFile, Parameters, Structure
from rotquant.kernels.hadamard.cuts import CHUNK, TILE, Across, Cut, Strips, cut_of, signs, threads
from rotquant.kernels.launch.loading import Kernel, TranslationUnit, kernel
from rotquant.kernels.launch.overlap import launch_waiting
from rotquant.kernels.launch.tma import TENSOR_MAP, matrix_map
from rotquant.kernels.layouts.codes import CODES, NO_CODES, RowCodes, RowFloats
from rotquant.tensors.hadamard.constructions import core_matrix, decompose

_TILES = {"kChunk": CHUNK, "kTile": TILE}
#: `Share` of kernels/include/pipeline/row_share.cuh.
_SHARE = Structure("Share", blocks=INT, even=INT, run=INT)
#: `RowNorm` of kernels/include/pipeline/row_kind.cuh; and what kernels get that norm nothing.
_ROW_NORM = Structure("RowNorm", weight=POINTER, eps=FLOAT)
_NO_NORM = _ROW_NORM.read({"weight": None, "eps": 0.0})
_COMMON = {"x": POINTER, "y": POINTER, "signs": POINTER, "codes": CODES}
_LAST = {"norm": FLOAT, "row_norm": _ROW_NORM}
#: `Problem` of kernels/include/hadamard/strips_shape.cuh, of hadamard_dense.cu and hadamard_across.cu, of
#: hadamard_any.cu.
_STRIPS = Structure("Problem", **_COMMON, elements=LONG, share=_SHARE, rows=INT, blocks_of=INT, **_LAST)
_ROWS = Structure("Problem", **_COMMON, share=_SHARE, rows=INT, **_LAST)
_ANY = Structure("Problem", **_COMMON, core=INT, n=INT, inner=INT, columns=INT, **_LAST)
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
        (4096, 1, half, "kSame", "kPlain", True),
        (4096, 1, bfloat, "kNvfp4", "kNorm", False),
        (8192, 1, half, "kInt4", "kPlain", False),
        (8192, 1, half, "kMxfp4", "kPlain", False),
        (11008, 1, half, "kSame", "kPlain", False),
        (13824, 1, bfloat, "kInt8", "kPlain", False),
        (13824, 1, half, "kFp8", "kNorm", False),
        (14336, 1, bfloat, "kInt8", "kGated", False),
        (2048, 1, half, "kMxfp4", "kNorm", False),
        (5120, 1, half, "kNvfp4", "kGated", False),
        (5120, 1, bfloat, "kFp8", "kPlain", False),
        (11008, 1, half, "kMxfp4", "kGated", False),
        (32, 128, half, "kSame", "kPlain", False),
    )
    hopper = architecture == "sm_90a"
    tensor_cores = []
    for n, inner, dtype, output, kind, arithmetic in wanted:
        cut = cut_of(n, inner, dtype, output, across=hopper and kind != "kGated" and not arithmetic)
        tensor_cores.append(_source(cut, dtype, output, kind, arithmetic))
    any_names = (
        "hadamard_any<float,float,kSame,kPlain>",
        "hadamard_any<__half,__half,kInt4,kGated>",
        "hadamard_any<__nv_bfloat16,float,kNvfp4,kNorm>",
        "hadamard_any<float,float,kMxfp4,kGated>",
        "hadamard_any<__half,float,kFp8,kNorm>",
    )
    return [*tensor_cores, TranslationUnit(_ANY_FILE, any_names)]


@lru_cache(maxsize=1024)
def _source(cut: Cut, dtype: torch.dtype, output: str, kind: str, half: bool) -> TranslationUnit:
    """A unit of one instance, which cuts a row as the host does and has the shared memory that the host gives it."""
    name = cut.instance(dtype, output, kind, half)
    shape = f"Shape<{name.partition('<')[2].rpartition(',')[0]}>"  # a kernel's last argument, its blocks, aside
    counted = {
        "kElements": cut.elements,
        "kWarps": cut.warps,
        "kSharedBytes": cut.shared_bytes(output, kind, half),
    }
    return TranslationUnit(
        _FILES[cut.file], (name,), tuple((f"{shape}::{name}", value) for name, value in counted.items())
    )


class RowNorm(NamedTuple):
    """RMSNorm of rows before their transform. weight: [n] of the type of x, or None."""

    weight: Tensor | None
    eps: float


#: What a launch writes: a tensor like x, integers or floats of low bits.
Out = Tensor | RowCodes | RowFloats


def launch_transform(
    x: Tensor,
    out: Out,
    *,
    heads: int,
    inverse: bool = False,
    half: bool = False,
    gated: bool = False,
    norm: RowNorm | None = None,
) -> None:
    """Transform contiguous x into `out`, or quantize its transform into `out`.

    Args:
        x: [rows, width] float16, bfloat16 or float32 on the GPU; [rows, 2 width] = (gate | up) with `gated`.
        out: [rows, width] of the type of x, or room for codes.
        heads: 0 for the whole last axis, else the number of heads that are mixed.
        half: float16 arithmetic.
        norm: of rows that are not gated.

    Raises:
        KernelError: no kernel holds such a row.
    """
    if x.shape[0] == 0:
        return
    width = x.shape[1] // (2 if gated else 1)
    n = heads or width
    cut = _fitting_cut(n, width // n, x.dtype, _output(out), _kind(gated, norm), half, x.device)
    if cut is not None:
        launch_cut(cut, x, out, n=n, inverse=inverse, gated=gated, half=half, norm=norm)
    else:
        _launch_any(x, out, n=n, inner=width // n, inverse=inverse, half=half, gated=gated, norm=norm)


def _output(out: Out) -> str:
    return "kSame" if isinstance(out, Tensor) else out.output


def _kind(gated: bool, norm: RowNorm | None) -> str:
    return "kGated" if gated else "kPlain" if norm is None else "kNorm"


@lru_cache(maxsize=1024)
def _fitting_cut(
    n: int, inner: int, dtype: torch.dtype, output: str, kind: str, half: bool, device: torch.device
) -> Cut | None:
    """The cut for a GPU, with a shorter ring and a smaller exchange where its shared memory does not hold more."""
    if half and dtype != torch.float16:
        return None
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    cut = cut_of(n, inner, dtype, output, across=hopper and kind != "kGated" and not half)
    while cut is not None and cut.shared_bytes(output, kind, half and cut.columns) > _shared_limit(device):
        cut = cut.smaller(output, half)
    return cut


def launch_cut(
    cut: Cut,
    x: Tensor,
    out: Out,
    *,
    n: int,
    inverse: bool,
    gated: bool,
    half: bool = False,
    norm: RowNorm | None = None,
) -> None:
    """Run a tensor-core kernel, `n` being the order of one transform.

    half: float16 arithmetic, in which every factor's result is rounded; that of heads, one factor, is rounded anyway.
    """
    output, kind = _output(out), _kind(gated, norm)
    half = half and cut.columns
    source = _source(cut, x.dtype, output, kind, half)
    function = kernel(source, source.instances[0], x.device)
    shared = cut.shared_bytes(output, kind, half)
    elements = x.numel() // (2 if gated else 1)
    rows = -(-elements // cut.elements)
    units = -(-rows // cut.rows_per_block)
    blocks, share = cut.share(units, _resident_blocks(function, threads(cut), shared, x.device.index or 0))
    table = signs(cut.order, cut.blocks_of or cut.order, inverse, cut.sign_rows, x.device)
    common = {**_tensors(x, out, table, norm), "share": share, "rows": units, "norm": 1 / math.sqrt(n)}
    if isinstance(cut, Strips):
        problem = _STRIPS.of(**common, elements=elements, blocks_of=cut.blocks_of or cut.sign_rows)
    else:
        problem = _ROWS.of(**common)
    maps = ()
    if isinstance(cut, Across):  # rows of x as matrices, one below the other; a copy takes 64 columns of one
        shape = {"columns": CHUNK * cut.chunks, "rows": rows * cut.order, "box": (CHUNK, cut.order)}
        maps = (matrix_map(x, element=2, swizzled=True, **shape),)
    launch_waiting(function, (blocks,), (threads(cut),), problem, *maps, device=x.device, shared=shared)


def has_kernel(n: int, inner: int, dtype: torch.dtype, device: torch.device, half: bool = False) -> bool:
    """Whether a kernel transforms the middle axis of [rows, n, inner] on this GPU."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    fits = _any_bytes(n * inner, half) <= _shared_limit(device)
    return fits or _fitting_cut(n, inner, dtype, "kSame", "kPlain", half, device) is not None


def _launch_any(
    x: Tensor, out: Out, *, n: int, inner: int, inverse: bool, half: bool, gated: bool, norm: RowNorm | None
) -> None:
    elements, core = n * inner, decompose(n)[0]
    shared = _any_bytes(elements, half)
    if shared > _shared_limit(x.device):
        raise KernelError(
            f"a row of {elements} values takes {shared} bytes of shared memory, and this GPU has"
            f" {_shared_limit(x.device)}."
        )
    arithmetic = "__half" if half else "float"
    name = f"hadamard_any<{TYPES[x.dtype]},{arithmetic},{_output(out)},{_kind(gated, norm)}>"
    function = kernel(TranslationUnit(_ANY_FILE, (name,)), name, x.device)
    # float16 arithmetic halves the values with every two bits; the norm is what then remains.
    halvings = decompose(n)[1] // 2 if half else 0
    problem = _ANY.of(
        **_tensors(x, out, _core_signs(core, inverse, x.device), norm),
        core=core,
        n=n,
        inner=inner,
        columns=elements if isinstance(out, Tensor) else out.columns,
        norm=2**halvings / math.sqrt(n),
    )
    block = 1024 if elements > 16384 or core > 2048 else 512 if elements > 4096 else 128
    launch_waiting(function, (x.shape[0],), (block,), problem, device=x.device, shared=shared)


def _tensors(x: Tensor, out: Out, table: Tensor, norm: RowNorm | None) -> dict[str, Any]:
    """The fields that all kernels have in common."""
    row_norm = _NO_NORM if norm is None else norm._asdict()
    if isinstance(out, Tensor):
        return {"x": x, "y": out, "signs": table, "codes": NO_CODES, "row_norm": row_norm}
    return {"x": x, "y": None, "signs": table, "codes": out.fields, "row_norm": row_norm}


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
