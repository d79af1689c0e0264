"""W4A4 and W4A8 products of many rows on tensor cores, QuaRot Sec. 4 (stage 2a) and App. A.10.

Hopper multiplies int8 with warpgroup instructions (kernels/gemm_sm90.cu), every other architecture with `mma.sync`
(kernels/gemm_mma.cu), both exactly. Here a tile is chosen, tensor maps are made and the kernel is launched; arguments
have been checked by `linear`.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import INT, LONG, POINTER, CudaFile, Parameters, Structure
from rotquant.kernels.launch.loading import TranslationUnit, kernel
from rotquant.kernels.launch.operators import launch
from rotquant.kernels.launch.tma import TENSOR_MAP, matrix_map
from rotquant.kernels.layouts.weights import K_BLOCK, padded
from rotquant.kernels.products.output import DTYPE, OUTPUTS

#: Sums are of 16 times the products, |sum| <= 16 * 8 * 128 * K, and must stay below 2^31.
MAX_INNER = 131008

#: Of the Hopper kernel: what a stage holds along K, threads of a warpgroup, tokens and features that the copy engine
#: writes at a time.
_STEP, _WARPGROUP, _CHUNK = 128, 128, 64
#: `Problem` of kernels/include/gemm/problem.cuh.
_PROBLEM = Structure(
    "Problem",
    **dict.fromkeys(("row_scale", "column_scale", "bias", "out"), POINTER),
    **dict.fromkeys(("rows", "features", "k_steps", "row_scale_stride", "dtype", "tensor_store", "box_rows"), INT),
)
_SM90 = CudaFile(
    "gemm_sm90.cu",
    kernels={"w4_gemm": Parameters(weight=TENSOR_MAP, codes=TENSOR_MAP, out=TENSOR_MAP, problem=_PROBLEM)},
    constants={"kStep": _STEP, "kWarpgroup": _WARPGROUP, "kChunk": _CHUNK, **DTYPE},
)


@dataclass(frozen=True)
class Tile:
    """Tile that a block of the Hopper kernel holds at a time.

    consumers: warpgroups that multiply.
    strips: 64 features each, of a warpgroup.
    tokens: rows of the output.
    stages: of 128 along K in shared memory.
    cluster: blocks that share their tokens.
    grouped: column scales are of groups of 128 along K.
    """

    consumers: int
    strips: int
    tokens: int
    stages: int
    cluster: int
    grouped: bool = False

    @property
    def features(self) -> int:
        return 64 * self.consumers * self.strips

    def clusters(self, rows: int, features: int) -> int:
        """Number of clusters that cover an output."""
        return -(-rows // self.tokens) * -(-features // (self.features * self.cluster))

    def box_rows(self, rows: int) -> int:
        """Rows of activations that one block fetches for its cluster: no more than there are, in eights."""
        return padded(-(-min(rows, self.tokens) // self.cluster), 8)

    @property
    def instance(self) -> str:
        return f"w4_gemm<{self._sizes}>"

    @property
    def _sizes(self) -> str:
        sizes = (self.consumers, self.strips, self.tokens, self.stages, self.cluster)
        return f"{', '.join(map(str, sizes))}, {str(self.grouped).lower()}"

    @functools.cached_property
    def source(self) -> TranslationUnit:
        shape = f"Shape<{self._sizes}>"
        counted = ((f"{shape}::kFeatures", self.features), (f"{shape}::kSharedBytes", self.shared_bytes))
        return TranslationUnit(_SM90, (self.instance,), counted)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory, counted as by `Shape` in the kernel."""
        stages = self.stages * (self.features * _STEP // 2 + self.tokens * _STEP)
        staging, scales = 2 * _CHUNK * _WARPGROUP, 4 * (self.tokens + 64 * self.strips)
        return stages + self.consumers * (staging + scales) + 16 * self.stages


#: Largest first: of two that take equally long, the first is taken.
TILES = (
    Tile(2, 2, 128, 6, 2),
    Tile(2, 1, 128, 6, 1),
    Tile(2, 2, 64, 7, 2),
    Tile(2, 1, 64, 10, 1),
    Tile(1, 1, 64, 12, 1),
)
GROUPED_TILES = (
    Tile(2, 1, 128, 6, 2, grouped=True),
    Tile(2, 1, 64, 10, 1, grouped=True),
    Tile(1, 1, 64, 12, 1, grouped=True),
)
#: What a stage costs besides its products, in units of a product's features x tokens: measured (kernels/notes/gemm.md).
_STAGE_COST = 5000

#: Features, tokens, threads and shared memory per block of the `mma.sync` kernel.
_MMA_FEATURES, _MMA_TOKENS, _MMA_THREADS, _MMA_STAGES = 128, 128, 256, 4
_MMA = CudaFile(
    "gemm_mma.cu",
    kernels={"w4_gemm_mma": Parameters(weight=POINTER, codes=POINTER, problem=_PROBLEM)},
    constants={"kFeatures": _MMA_FEATURES, "kTokens": _MMA_TOKENS, "kThreads": _MMA_THREADS, **DTYPE},
)
_UNPACK = CudaFile("unpack.cu", kernels={"unpack_codes": Parameters(packed=POINTER, codes=POINTER, blocks=LONG)})


def sources(architecture: str) -> list[TranslationUnit]:
    """Everything that `launch_gemm` may compile."""
    mma = [_mma_source(packed, grouped) for packed in (False, True) for grouped in (False, True)]
    if architecture != "sm_90a":
        return mma
    return [*(tile.source for tile in TILES + GROUPED_TILES), TranslationUnit(_UNPACK)]


def launch_gemm(
    codes: Tensor, row_scale: Tensor, weight: Tensor, column_scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Fill `out` [rows, out_features]; arguments as in `linear.w4_linear`, already checked.

    Raises:
        KernelError: the contraction is too long for int32 sums.
    """
    inner = weight.shape[1] * K_BLOCK
    if inner > MAX_INNER:
        raise KernelError(f"{inner} input features may overflow 32-bit sums; the kernel takes at most {MAX_INNER}.")
    major, _ = torch.cuda.get_device_capability(out.device)
    if codes.dtype == torch.uint8 and major >= 9:  # newer tensor cores have no 4-bit integers
        codes = _unpacked(codes)
    if major == 9:
        tile = _best_tile(*out.shape, column_scale.dim() == 2, out.device)  # pyright: ignore[reportCallIssue]  # [rows, features]
        launch_tile(tile, codes, row_scale, weight, column_scale, bias, out)
    else:
        launch_mma(codes, row_scale, weight, column_scale, bias, out)


def launch_mma(
    codes: Tensor, row_scale: Tensor, weight: Tensor, column_scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """The `mma.sync` kernel, on any architecture; codes int8, or packed for 4-bit tensor cores."""
    rows, features = out.shape
    packed = codes.dtype == torch.uint8
    source = _mma_source(packed, column_scale.dim() == 2)
    blocks = -(-rows // _MMA_TOKENS) * -(-features // _MMA_FEATURES)
    launch(
        kernel(source, source.instances[0], out.device),
        (blocks, 1, 1),
        (_MMA_THREADS, 1, 1),
        weight,
        codes,
        _problem(row_scale, column_scale, bias, out, weight.shape[1]),
        device=out.device,
        shared=_mma_bytes(packed),
    )


def launch_tile(
    tile: Tile,
    codes: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    column_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """The Hopper kernel with this tile; codes int8."""
    rows, features = out.shape
    strips, k_blocks = weight.shape[:2]
    inner = codes.shape[1]
    tensor_store = out.element_size() == 2 and features % 8 == 0
    weight_map = matrix_map(
        weight, element=4, columns=k_blocks * 128, rows=strips, box=(256, tile.features // 16), swizzled=False
    )
    code_map = matrix_map(codes, element=1, columns=inner, rows=rows, box=(_STEP, tile.box_rows(rows)), swizzled=True)
    out_map = weight_map  # any: not used
    if tensor_store:
        out_map = matrix_map(out, element=2, columns=features, rows=rows, box=(_CHUNK, _CHUNK), swizzled=True)
    launch(
        kernel(tile.source, tile.instance, out.device),
        (min(tile.clusters(rows, features), _at_once(tile, out.device)) * tile.cluster, 1, 1),
        (_WARPGROUP * (tile.consumers + 1), 1, 1),
        weight_map,
        code_map,
        out_map,
        _problem(row_scale, column_scale, bias, out, -(-inner // _STEP), tensor_store, tile.box_rows(rows)),
        device=out.device,
        shared=tile.shared_bytes,
    )


def _best_tile(rows: int, features: int, grouped: bool, device: torch.device) -> Tile:
    """The tile with which a multiprocessor has the least to do, its idle share of the last round included."""

    def cost(tile: Tile) -> int:
        rounds = -(-tile.clusters(rows, features) // _at_once(tile, device))
        return rounds * (tile.features * tile.tokens + _STAGE_COST)

    return min(GROUPED_TILES if grouped else TILES, key=cost)


def _at_once(tile: Tile, device: torch.device) -> int:
    """Clusters that run at the same time: one block on each multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count // tile.cluster


@functools.cache
def _mma_source(packed: bool, grouped: bool) -> TranslationUnit:
    flags = [str(flag).lower() for flag in (packed, grouped)]
    shared = (f"kStages * kStageBytes<{flags[0]}>", _mma_bytes(packed))
    return TranslationUnit(_MMA, (f"w4_gemm_mma<{', '.join(flags)}>",), (shared,))


def _mma_bytes(packed: bool) -> int:
    """Dynamic shared memory of a block of the `mma.sync` kernel."""
    return _MMA_STAGES * (_MMA_FEATURES * K_BLOCK // 2 + _MMA_TOKENS * (K_BLOCK // 2 if packed else K_BLOCK))


def _problem(
    row_scale: Tensor,
    column_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    k_steps: int,
    tensor_store: bool = False,
    box_rows: int = 0,
) -> np.void:
    return _PROBLEM.of(
        row_scale=row_scale,
        column_scale=column_scale,
        bias=bias,
        out=out,
        rows=out.shape[0],
        features=out.shape[1],
        k_steps=k_steps,
        row_scale_stride=row_scale.shape[0] > 1,
        dtype=OUTPUTS[out.dtype],
        tensor_store=tensor_store,
        box_rows=box_rows,
    )


def _unpacked(codes: Tensor) -> Tensor:
    """Packed 4-bit activations as int8."""
    held = torch.empty(codes.shape[0], 2 * codes.shape[1], dtype=torch.int8, device=codes.device)
    blocks = codes.numel() // 16
    function = kernel(TranslationUnit(_UNPACK), "unpack_codes", codes.device)
    launch(function, (-(-blocks // 256), 1, 1), (256, 1, 1), codes, held, blocks, device=codes.device)
    return held
