"""The 16-bit decoder's fused elementwise operators: residual add and RMSNorm, SwiGLU, rotary embedding and append.

The baseline of every speed table runs on them, so that the quantized decoder, whose kernels fuse the same steps
(`activations`, `kv`), is compared with the best that 16 bits can do. Nothing here quantizes.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import FLOAT, INT, LONG, POINTER, TYPES_16, CudaFile, Parameters
from rotquant.kernels.launch.loading import Kernel, TranslationUnit, kernel
from rotquant.kernels.launch.operators import Written, check_same_device, check_tensor, operator
from rotquant.kernels.launch.overlap import launch_waiting
from rotquant.kernels.layouts.weights import padded

_THREADS = 256
#: Values that a thread of `add_rms_norm` takes at most, and at once.
_PER_THREAD, _VECTOR = 16, 8
_FILE = CudaFile(
    "elementwise.cu",
    kernels={
        "add_rms_norm": Parameters(
            x=POINTER, residual=POINTER, gain=POINTER, eps=FLOAT, n=INT, sum=POINTER, out=POINTER
        ),
        "swiglu": Parameters(gate_up=POINTER, vectors=LONG, n=INT, out=POINTER),
        "rope_append": Parameters(
            **dict.fromkeys(("qkv", "cos", "sin"), POINTER),
            cos_batch=INT,
            lengths=POINTER,
            **dict.fromkeys(("batch", "gap", "tokens", "heads", "kv_heads", "head_dim", "capacity"), INT),
            **dict.fromkeys(("queries", "keys", "values"), POINTER),
        ),
    },
    constants={"sizeof(Eight<__half>) / sizeof(__half)": _VECTOR, "kNormVectors": _PER_THREAD // _VECTOR},
)
_UNIT = TranslationUnit(_FILE, tuple(f"{name}<{kind}>" for name in _FILE.kernels for kind in TYPES_16.values()))


def sources(architecture: str) -> list[TranslationUnit]:
    """The one translation unit, with every kernel for both types."""
    return [_UNIT]


def _kernel(name: str, x: Tensor) -> Kernel:
    return kernel(_UNIT, f"{name}<{TYPES_16[x.dtype]}>", x.device)


def _norm_reference(x: Tensor, residual: Tensor | None, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    return rms_norm(total, total.shape[-1:], gain, eps), x.new_empty(0) if residual is None else total


def check_norm(x: Tensor, residual: Tensor | None, gain: Tensor | None, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise one sentence unless a kernel can read x [rows, n], and residual [rows, n] and gain [n] of its type.

    Raises:
        KernelError: as `check_tensor` and `check_same_device`.
    """
    check_tensor(x, "hidden", dtypes=dtypes, shape=(None, None))
    for name, tensor, shape in (("residual", residual, tuple(x.shape)), ("gain", gain, (x.shape[1],))):
        if tensor is not None:
            check_tensor(tensor, name, dtypes=(x.dtype,), shape=shape)
    check_same_device(x, residual=residual, gain=gain)


def empty_sum(x: Tensor, residual: Tensor | None) -> Tensor:
    """Room for x + residual; [0] without a residual."""
    return x.new_empty(0) if residual is None else torch.empty_like(x)


def _norm_cuda(x: Tensor, residual: Tensor | None, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    check_norm(x, residual, gain, tuple(TYPES_16))
    rows, n = x.shape
    if n % _VECTOR or n > 1024 * _PER_THREAD:
        raise KernelError(f"a norm over {n} features has no kernel: a multiple of 8 up to {1024 * _PER_THREAD} has.")
    out, total = torch.empty_like(x), empty_sum(x, residual)
    if rows:
        threads = min(1024, padded(-(-n // _VECTOR), 32))
        arguments = (x, residual, gain, eps, n, total, out)
        launch_waiting(_kernel("add_rms_norm", x), (rows,), (threads,), *arguments, device=x.device)
    return out, total


#: RMSNorm of x + residual [rows, n], and that sum ([0] without a residual). gain [n] or None.
add_rms_norm = operator(
    "add_rms_norm",
    reference=_norm_reference,
    cuda=_norm_cuda,
    fake=lambda x, residual, gain, eps: (torch.empty_like(x), empty_sum(x, residual)),
)


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of (gate | up) [rows, 2 n], each operation rounded to its type, as a model does it."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def _swiglu_cuda(gate_up: Tensor) -> Tensor:
    check_tensor(gate_up, "gate and up", dtypes=tuple(TYPES_16), shape=(None, None))
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.shape[1] % (2 * _VECTOR):
        raise KernelError(f"{gate_up.shape[1]} columns are not gate and up of a multiple of 8 features each.")
    out = gate_up.new_empty(rows, n)
    vectors = rows * n // _VECTOR
    if vectors:
        blocks = -(-vectors // _THREADS)
        arguments = (gate_up, vectors, n, out)
        launch_waiting(_kernel("swiglu", gate_up), (blocks,), (_THREADS,), *arguments, device=gate_up.device)
    return out


#: silu(gate) * up of (gate | up) [rows, 2 n], contiguous.
swiglu = operator(
    "swiglu",
    reference=gated,
    cuda=_swiglu_cuda,
    fake=lambda gate_up: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2),
)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [batch, tokens, heads, D] by cos, sin [1 or batch, tokens, D]: i turns with i + D / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, :, None] + torch.cat([-second, first], dim=-1) * sin[:, :, None]


class RopeAppend(NamedTuple):
    """Rotary embedding of q and k, and append of k and v.

    qkv: [batch * tokens, (heads + 2 kv_heads) * D]. cos, sin: [1 or batch, tokens, D]. lengths: int32 [batch]; token t
    of text b goes to position lengths[b] + t of keys and values [batch, capacity, kv_heads, D], and is dropped beyond
    the capacity. gap: how many queries of zeros stand before those of the tokens in the result.
    """

    qkv: Tensor
    cos: Tensor
    sin: Tensor
    lengths: Tensor
    keys: Written
    values: Written
    heads: int
    gap: int


def _append_reference(a: RopeAppend) -> Tensor:
    batch, capacity, kv_heads, head_dim = a.keys.shape
    tokens = a.cos.shape[1]
    every_head = a.qkv.view(batch, tokens, a.heads + 2 * kv_heads, head_dim)
    rotated, new_values = every_head.split([a.heads + kv_heads, kv_heads], dim=2)
    queries, new_keys = rotate(rotated, a.cos, a.sin).split([a.heads, kv_heads], dim=2)
    positions = a.lengths.long()[:, None] + torch.arange(tokens, device=a.qkv.device)
    texts = torch.arange(batch, device=a.qkv.device)[:, None].expand_as(positions)
    inside = positions < capacity
    where = (texts[inside], positions[inside])
    a.keys[where], a.values[where] = new_keys[inside], new_values[inside]
    out = _append_fake(a)
    out[:, : a.gap], out[:, a.gap :] = 0, queries
    return out


def _append_fake(a: RopeAppend) -> Tensor:
    return a.qkv.new_empty(a.keys.shape[0], a.gap + a.cos.shape[1], a.heads, a.keys.shape[3])


def _append_cuda(a: RopeAppend) -> Tensor:
    keys = a.keys
    check_tensor(keys, "keys", dtypes=tuple(TYPES_16), shape=(None, None, None, None))
    batch, capacity, kv_heads, head_dim = keys.shape
    if head_dim % (2 * _VECTOR):
        raise KernelError(f"head_dim {head_dim} has no rotary kernel: a multiple of 16 has.")
    check_tensor(a.cos, "cos", dtypes=(keys.dtype,), shape=(None, None, head_dim))
    rows, tokens, _ = a.cos.shape
    if rows not in (1, batch):
        raise KernelError(f"cos is for {rows} texts; {batch} texts take {batch}, or 1.")
    check_tensor(a.sin, "sin", dtypes=(keys.dtype,), shape=tuple(a.cos.shape))
    check_tensor(a.values, "values", dtypes=(keys.dtype,), shape=tuple(keys.shape))
    check_tensor(a.lengths, "lengths", dtypes=(torch.int32,), shape=(batch,))
    columns = (a.heads + 2 * kv_heads) * head_dim
    check_tensor(a.qkv, "projections", dtypes=(keys.dtype,), shape=(batch * tokens, columns))
    check_same_device(keys, qkv=a.qkv, cos=a.cos, sin=a.sin, lengths=a.lengths, values=a.values)
    queries = _append_fake(a)
    items = batch * (a.gap + tokens) * columns // (2 * _VECTOR)
    if items:
        sizes = (batch, a.gap, tokens, a.heads, kv_heads, head_dim, capacity)
        arguments = (a.qkv, a.cos, a.sin, rows, a.lengths, *sizes, queries, keys, a.values)
        grid = (-(-items // _THREADS),)
        launch_waiting(_kernel("rope_append", keys), grid, (_THREADS,), *arguments, device=keys.device)
    return queries


#: `RopeAppend`: q [batch, gap + tokens, heads, D], rotated.
rope_append = operator("rope_append", reference=_append_reference, cuda=_append_cuda, fake=_append_fake)
