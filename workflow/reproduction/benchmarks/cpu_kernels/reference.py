"""Reference of decoding.cpp's functions, in plain torch: slow, obvious, and the definition.

Integers agree bit for bit; the quantizer is `rotquant.tensors.quantization`. Arithmetic is float32, or
float64 for float64 tensors, which the compiled functions do not take.
"""

from typing import cast

import torch
from torch import Tensor

from reproduction.benchmarks.cpu_kernels.layout import unpack
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.hadamard import hadamard_transform
from rotquant.tensors.quantization import choose_qparams
from rotquant.tensors.quantization import quantize as library_quantize

#: SpinQuant's activations (A.4) at 8 bits: asymmetric, one scale per token, no clipping.
ACTIVATIONS = QuantizationScheme(bits=8, symmetric=False, granularity="token")


def quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, features] -> codes uint8 of its shape, scale float32 [tokens], zero point int32 [tokens]."""
    qparams = choose_qparams(x, ACTIVATIONS)
    codes = library_quantize(x, qparams, ACTIVATIONS)
    return codes, qparams.scale.squeeze(-1), cast(Tensor, qparams.zero_point).squeeze(-1).to(torch.int32)


def product(codes: Tensor, zero_point: Tensor, weight: Tensor, sums: Tensor) -> Tensor:
    """int32 [tokens, out]: the sum over features of (code - zero point) times the weight's integer, exactly."""
    integers = unpack(weight, (sums.numel(), codes.shape[1])).long()
    return ((codes.long() - zero_point.long()[:, None]) @ integers.T).to(torch.int32)


def linear(x: Tensor, weight: Tensor, scale: Tensor, sums: Tensor) -> Tensor:
    """[tokens, out] in the dtype of x: the product of quantized x, times both scales in float32."""
    codes, step, zero_point = quantize(x)
    return (product(codes, zero_point, weight, sums).to(step.dtype) * step[:, None] * scale).to(x.dtype)


def hadamard(x: Tensor) -> Tensor:
    """Rows times the normalized Hadamard matrix, rounded once to the dtype of x."""
    return hadamard_transform(_wide(x)).to(x.dtype)


def linear16(x: Tensor, weight: Tensor) -> Tensor:
    """bfloat16 rows times a bfloat16 weight [out, in], summed in float32."""
    return (x.float() @ weight.float().T).to(x.dtype)


def attention(queries: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
    """Attend with one token's queries [heads, dim] over the first `length` tokens of [kv_heads, capacity, dim]."""
    group = len(queries) // len(keys)
    k, v = (_wide(part[:, :length]).repeat_interleave(group, 0) for part in (keys, values))  # [heads, length, dim]
    weights = torch.softmax((k @ _wide(queries)[:, :, None]).squeeze(-1) * queries.shape[1] ** -0.5, dim=1)
    return (weights[:, None] @ v).squeeze(1).to(queries.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
