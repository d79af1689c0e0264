"""Operators on a 4-bit KV cache: append, decode attention, dequantize for prefill, and the rotation of queries.

Keys pass RoPE and an online Hadamard transform before they are quantized, and queries the same transform, so scores are
those of the unrotated model (QuaRot Sec. 4, stages 1d and 2c). Attention multiplies the integers as they are, on tensor
cores, and applies scales and zero points to sums; it never writes dequantized keys or values. Head sizes 64 and 128 on
a GPU; `attention_reference` defines every operator on any device and for any head size of the layout.
"""

from torch import Tensor

from rotquant.errors import KernelError
from rotquant.kernels import attention_reference as reference
from rotquant.kernels.loading import Source
from rotquant.kernels.operators import operator

HEAD_DIMS = (64, 128)


def sources(architecture: str) -> list[Source]:
    """Every translation unit that the papers' shapes ask for."""
    return []


def _append_cuda(*arguments: object) -> None:
    raise KernelError("not built yet.")


def _attend_cuda(*arguments: object) -> Tensor:
    raise KernelError("not built yet.")


def _dequantize_cuda(*arguments: object) -> tuple[Tensor, Tensor]:
    raise KernelError("not built yet.")


def _rotate_cuda(*arguments: object) -> Tensor:
    raise KernelError("not built yet.")


_POOLS = "Tensor k_codes, Tensor v_codes, Tensor k_params, Tensor v_params"

#: Quantize tokens and write them. k, v [batch, tokens, kv_heads, D] float16 or bfloat16, contiguous along heads and D,
#: any strides of batch and tokens (views of a merged projection); cos, sin [1 or batch, tokens, D] of the same dtype,
#: or None for no RoPE; pools as in `kv.Int4KVCache`, written in place; token i of sequence b goes to position
#: starts[b] + i (int32), and is dropped beyond the capacity. rotate: Hadamard transform of the keys.
kv_append = operator(
    "kv_append(Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor(a!) k_codes, Tensor(b!) v_codes,"
    " Tensor(c!) k_params, Tensor(d!) v_params, Tensor starts, Tensor? block_table, bool rotate, float clip_k,"
    " float clip_v) -> ()",
    reference=reference.append,
    cuda=_append_cuda,
    fake=lambda *arguments: None,
)

#: Decode attention. q [batch, heads, D], contiguous along heads and D; cos, sin [1 or batch, 1, D]; the query of
#: sequence b sees its first lengths[b] + new_tokens tokens; counters int32 [batch * kv_heads], zero before and after.
#: Returns [batch, heads, D] of q's dtype.
kv_attention = operator(
    f"kv_attention(Tensor q, Tensor? cos, Tensor? sin, {_POOLS}, Tensor lengths, int new_tokens,"
    " Tensor? block_table, Tensor? counters, bool rotate) -> Tensor",
    reference=reference.attend,
    cuda=_attend_cuda,
    fake=lambda q, *arguments: q.new_empty(q.shape),
)

#: The first `tokens` keys (rotated) and values of every sequence, [batch, kv_heads, tokens, D] of dtype.
kv_dequantize = operator(
    f"kv_dequantize({_POOLS}, Tensor? block_table, int batch, int tokens, ScalarType dtype) -> (Tensor, Tensor)",
    reference=reference.dequantize,
    cuda=_dequantize_cuda,
    fake=lambda codes, *rest: tuple(
        codes.new_empty(rest[-3], codes.shape[1], rest[-2], 2 * codes.shape[3], dtype=rest[-1]) for _ in range(2)
    ),
)

#: RoPE and the Hadamard transform of x [batch, tokens, heads, D] (strides as in `kv_append`); contiguous, of x's dtype.
kv_rotate = operator(
    "kv_rotate(Tensor x, Tensor? cos, Tensor? sin, bool rotate) -> Tensor",
    reference=lambda x, cos, sin, rotate: reference.rotate(x, cos, sin, rotate).clone(),
    cuda=_rotate_cuda,
    fake=lambda x, *arguments: x.new_empty(x.shape),
)
