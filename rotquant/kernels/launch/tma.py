"""Tensor maps: what Hopper's copy engine needs to know of a matrix in global memory, made by the driver on the host.

A map is 128 opaque bytes that go to a kernel by value. It holds an address and sizes, never data, so maps are kept for
as long as the process lives.
"""

import ctypes
import functools
from typing import Any

import numpy as np
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import Scalar, Structure

_BYTES = 128
#: `TensorMap` of kernels/include/ptx/instructions.cuh.
TENSOR_MAP = Structure("ptx::TensorMap", bytes=Scalar("unsigned char[128]", np.dtype(("u1", _BYTES)), bytes))


def matrix_map(
    tensor: Tensor, *, element: int, columns: int, rows: int, box: tuple[int, int], swizzled: bool
) -> np.void:
    """The map of a contiguous row-major matrix that starts where `tensor` does.

    Args:
        element: bytes of an element (1, 2 or 4); the engine copies bits and knows no other type here.
        columns, rows: of the matrix, in elements; a row is a multiple of 16 bytes.
        box: columns and rows of what one copy moves, each at most 256. Outside lie zeros, never written.
        swizzled: the 128-byte swizzle of the tensor cores in shared memory; a row of the box is 128 bytes then.

    Raises:
        KernelError: cuda-bindings is missing, or the driver refuses the sizes.
    """
    return _map(tensor.data_ptr(), element, columns, rows, box, swizzled)


@functools.lru_cache(maxsize=16384)
def _map(pointer: int, element: int, columns: int, rows: int, box: tuple[int, int], swizzled: bool) -> np.void:
    driver = _driver()
    kind = driver.CUtensorMapDataType
    types = {1: "UINT8", 2: "UINT16", 4: "UINT32"}
    swizzle = driver.CUtensorMapSwizzle
    status, made = driver.cuTensorMapEncodeTiled(
        getattr(kind, f"CU_TENSOR_MAP_DATA_TYPE_{types[element]}"),
        2,
        pointer,
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(columns * element)],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * 2,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else swizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(f"the driver refuses a tensor map of {rows} x {columns} elements ({status.name}).")
    return TENSOR_MAP.of(bytes=ctypes.string_at(made.getPtr(), _BYTES))


def _driver() -> Any:
    try:
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]  # compiled, without stubs
    except ImportError as error:
        raise KernelError(f"tensor maps need cuda-bindings (pip install cuda-bindings): {error}.") from None
    return driver
