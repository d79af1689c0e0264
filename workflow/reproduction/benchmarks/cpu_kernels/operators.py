"""The functions of decoding.cpp as torch operators: `torch.ops.rotquant.w4a8_linear` and the steps it is made of.

SpinQuant Table 6 decodes with 4-bit weights, symmetric with a scale per output feature, and 8-bit activations,
asymmetric with a scale per token; their products are summed in integers, exactly. Tensors lie on a CPU. With
`launch.operators.references()` plain torch computes the same.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from reproduction.benchmarks.cpu_kernels import reference
from reproduction.benchmarks.cpu_kernels.compiling import functions
from reproduction.benchmarks.cpu_kernels.layout import BLOCK, STRIP, DotWeight
from rotquant.foundation.errors import KernelError
from rotquant.kernels.launch.operators import check_tensor, operator
from rotquant.tensors.hadamard.constructions import decompose, hadamard_matrix

_FLOATS = (torch.bfloat16, torch.float32)
#: Neighbours that one dense factor of a transform covers: a vector of decoding.cpp.
_LANES = 16


def _kernel(name: str, plain: Callable[..., Any], fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a kernel with its reference and its shape rule; what is decorated becomes the torch operator."""
    return lambda kernel: operator(name, reference=plain, fake=fake, cpu=kernel)


@_kernel(
    "w4a8_quantize",
    reference.quantize,
    lambda x: (
        torch.empty_like(x, dtype=torch.uint8),
        x.new_empty(x.shape[0], dtype=torch.float32),
        x.new_empty(x.shape[0], dtype=torch.int32),
    ),
)
def quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, features], bfloat16 or float32 -> codes uint8, scale float32 [tokens], zero point int32 [tokens].

    Raises:
        KernelError: a tensor that the function cannot read.
    """
    _check(x, "x", _FLOATS)
    codes = torch.empty_like(x, dtype=torch.uint8)
    scale, zero_point = torch.empty(len(x)), torch.empty(len(x), dtype=torch.int32)
    pointers = (codes.data_ptr(), scale.data_ptr(), zero_point.data_ptr())
    functions().quantize(x.data_ptr(), x.dtype == torch.bfloat16, *x.shape, *pointers)
    return codes, scale, zero_point


@_kernel(
    "w4a8_product",
    reference.product,
    lambda codes, zero_point, weight, sums: sums.new_empty(codes.shape[0], sums.numel()),
)
def product(codes: Tensor, zero_point: Tensor, weight: Tensor, sums: Tensor) -> Tensor:
    """Codes uint8 [tokens, in] with zero points int32 [tokens], times a weight -> int32 [tokens, out], exactly.

    Args:
        weight, sums: `DotWeight.codes` and `.sums`.

    Raises:
        KernelError: a tensor that the function cannot read, or sizes that do not fit.
    """
    _check(codes, "codes", (torch.uint8,))
    _check(zero_point, "zero_point", (torch.int32,), (codes.shape[0],))
    _check_weight(weight, sums, codes.shape[1])
    y = torch.empty(len(codes), len(sums), dtype=torch.int32)
    pointers = (weight.data_ptr(), sums.data_ptr(), len(sums), y.data_ptr())
    functions().product(codes.data_ptr(), zero_point.data_ptr(), *codes.shape, *pointers)
    return y


@_kernel("w4a8_linear", reference.linear, lambda x, weight, scale, sums: x.new_empty(x.shape[0], sums.numel()))
def w4a8_linear(x: Tensor, weight: Tensor, scale: Tensor, sums: Tensor) -> Tensor:
    """x [tokens, in], bfloat16 or float32, quantized, times a weight -> [tokens, out] of its dtype.

    Args:
        weight, scale, sums: of a `DotWeight`.

    Raises:
        KernelError: a tensor that the function cannot read, or sizes that do not fit.
    """
    _check(x, "x", _FLOATS)
    _check_weight(weight, sums, x.shape[1])
    _check(scale, "scale", (torch.float32,), (len(sums),))
    y = x.new_empty(len(x), len(sums))
    pointers = (weight.data_ptr(), scale.data_ptr(), sums.data_ptr(), len(sums), y.data_ptr())
    functions().linear(x.data_ptr(), x.dtype == torch.bfloat16, *x.shape, *pointers)
    return y


@_kernel("cpu_hadamard", reference.hadamard, torch.empty_like)
def hadamard(x: Tensor) -> Tensor:
    """Rows [rows, n], bfloat16 or float32, times H / sqrt(n) as `hadamard_transform` has it, in float32.

    Raises:
        HadamardSizeError: no construction for n.
        KernelError: a tensor that the function cannot read.
    """
    _check(x, "x", _FLOATS)
    core, width, core_table, low, low_table = _factors(x.shape[1])
    y = torch.empty_like(x)
    tables = (core, width, core_table.data_ptr(), low, low_table.data_ptr())
    functions().hadamard(x.data_ptr(), x.dtype == torch.bfloat16, len(x), *tables, y.data_ptr())
    return y


@_kernel("cpu_attention", reference.attention, lambda queries, keys, values, length: torch.empty_like(queries))
def attention(queries: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
    """Attend with one token's queries [heads, dim] over the first `length` tokens of a cache [kv_heads, capacity, dim],
    in float32.

    All bfloat16 or all float32; dim a multiple of 16. `scaled_dot_product_attention` takes 0.3 ms for 128 tokens of
    Llama-3-8B's heads on two cores, and 6 ms for 2048, where this takes 0.02 ms and 0.2 ms.

    Raises:
        KernelError: a tensor that the function cannot read, or sizes that do not fit.
    """
    (heads, dim), kv_heads, capacity = queries.shape, keys.shape[0], keys.shape[1]
    _check(queries, "queries", _FLOATS)
    for name, part in (("keys", keys), ("values", values)):
        _check(part, name, (queries.dtype,), (kv_heads, capacity, dim))
    if dim % _LANES or heads % kv_heads or not 0 < length <= capacity:
        raise KernelError(
            f"{heads} heads of {dim} features cannot attend to {length} tokens of {kv_heads} heads in a cache of "
            f"{capacity}: the CPU kernel needs heads of a multiple of {_LANES} features, and groups of equal size."
        )
    y = torch.empty_like(queries)
    cached = (keys.data_ptr(), values.data_ptr(), length, capacity)
    functions().attention(
        queries.data_ptr(), queries.dtype == torch.bfloat16, heads, kv_heads, dim, *cached, y.data_ptr()
    )
    return y


@_kernel("cpu_linear16", reference.linear16, lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))
def linear16(x: Tensor, weight: Tensor) -> Tensor:
    """bfloat16 [tokens, in] times a bfloat16 weight [out, in], summed in float32: as fast as the weight can be read.

    Raises:
        KernelError: a tensor that the function cannot read, or sizes that do not fit.
    """
    _check(x, "x", (torch.bfloat16,))
    _check(weight, "weight", (torch.bfloat16,), (None, x.shape[1]))
    y = x.new_empty(len(x), len(weight))
    functions().linear16(x.data_ptr(), *x.shape, weight.data_ptr(), len(weight), y.data_ptr())
    return y


def linear(x: Tensor, weight: DotWeight) -> Tensor:
    """`w4a8_linear` of a packed weight."""
    return w4a8_linear(x, weight.codes, weight.scale, weight.sums)


def read(x: Tensor) -> int:
    """Read a tensor whose bytes are a multiple of 1024 with all threads, and do as little else as can be.

    Raises:
        KernelError: there is no C++ compiler, or the size is another.
    """
    if x.nbytes % 1024 or not x.is_contiguous():
        raise KernelError(f"reading takes a contiguous multiple of 1024 bytes, not {x.nbytes}.")
    return functions().read(x.data_ptr(), x.nbytes)


def instructions() -> str:
    """The instructions that products of integers are compiled to."""
    return functions().instructions().decode()


@functools.lru_cache(maxsize=64)
def _factors(n: int) -> tuple[int, int, Tensor, int, Tensor]:
    """Core order, power of two, H_core, order of the dense factor of the latter, and that factor; float32."""
    core, doublings = decompose(n)
    low = min(_LANES, 2**doublings)
    tables = [hadamard_matrix(order, torch.float32, "cpu").contiguous() for order in (core, low)]
    return core, 2**doublings, tables[0], low, tables[1]


def _check_weight(weight: Tensor, sums: Tensor, features: int) -> None:
    _check(sums, "sums", (torch.int32,), (None,))
    strips, blocks = -(-len(sums) // STRIP), -(-features // BLOCK)
    _check(weight, "weight", (torch.uint8,), (strips, blocks, STRIP, BLOCK // 2))


def _check(
    tensor: Tensor, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...] = (None, None)
) -> None:
    check_tensor(tensor, name, dtypes=dtypes, shape=shape, device="cpu")
