"""The 16-bit decoder's fused elementwise operators: residual add and RMSNorm, SwiGLU, rotary embedding and append.

The baseline of every speed table runs on them, so that the quantized decoder, whose kernels fuse the same steps
(`activations`, `kv`), is compared with the best that 16 bits can do. Nothing here quantizes.
"""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import FLOAT, INT, LONG, POINTER, CudaFile, Parameters
from rotquant.kernels.launch.loading import Kernel, Source, kernel
from rotquant.kernels.launch.operators import check_same_device, check_tensor, launch, operator
from rotquant.kernels.layouts.weights import padded

_TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
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
            **dict.fromkeys(("batch", "tokens", "heads", "kv_heads", "head_dim", "capacity"), INT),
            **dict.fromkeys(("queries", "keys", "values"), POINTER),
        ),
    },
    constants={"sizeof(Eight<__half>) / sizeof(__half)": _VECTOR, "NORM_VECTORS": _PER_THREAD // _VECTOR},
)


def sources(architecture: str) -> list[Source]:
    """The one translation unit, with every kernel for both types."""
    return [_source()]


def _source() -> Source:
    return Source(_FILE, tuple(f"{name}<{kind}>" for name in _FILE.kernels for kind in _TYPES.values()))


def _kernel(name: str, x: Tensor) -> Kernel:
    return kernel(_source(), f"{name}<{_TYPES[x.dtype]}>", x.device)


def _norm_reference(x: Tensor, residual: Tensor | None, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    return rms_norm(total, total.shape[-1:], gain, eps), x.new_empty(0) if residual is None else total


def _norm_cuda(x: Tensor, residual: Tensor | None, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    check_tensor(x, "hidden", dtypes=tuple(_TYPES), shape=(None, None))
    rows, n = x.shape
    if n % _VECTOR or n > 1024 * _PER_THREAD:
        raise KernelError(f"a norm over {n} features has no kernel: a multiple of 8 up to {1024 * _PER_THREAD} has.")
    for name, tensor, shape in (("residual", residual, (rows, n)), ("gain", gain, (n,))):
        if tensor is not None:
            check_tensor(tensor, name, dtypes=(x.dtype,), shape=shape)
    check_same_device(x, residual=residual, gain=gain)
    out, total = torch.empty_like(x), x.new_empty(0) if residual is None else torch.empty_like(x)
    if rows:
        threads = min(1024, padded(-(-n // _VECTOR), 32))
        arguments = (x, residual, gain, eps, n, total, out)
        launch(_kernel("add_rms_norm", x), (rows,), (threads,), *arguments, device=x.device)
    return out, total


#: RMSNorm of x + residual [rows, n], and that sum ([0] without a residual). gain [n] or None.
add_rms_norm = operator(
    "add_rms_norm(Tensor x, Tensor? residual, Tensor? gain, float eps) -> (Tensor, Tensor)",
    reference=_norm_reference,
    cuda=_norm_cuda,
    fake=lambda x, residual, gain, eps: (torch.empty_like(x), x.new_empty(x.shape if residual is not None else 0)),
)


def _swiglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def _swiglu_cuda(gate_up: Tensor) -> Tensor:
    check_tensor(gate_up, "gate and up", dtypes=tuple(_TYPES), shape=(None, None))
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.shape[1] % (2 * _VECTOR):
        raise KernelError(f"{gate_up.shape[1]} columns are not gate and up of a multiple of 8 features each.")
    out = gate_up.new_empty(rows, n)
    vectors = rows * n // _VECTOR
    if vectors:
        blocks = -(-vectors // _THREADS)
        arguments = (gate_up, vectors, n, out)
        launch(_kernel("swiglu", gate_up), (blocks,), (_THREADS,), *arguments, device=gate_up.device)
    return out


#: silu(gate) * up of (gate | up) [rows, 2 n], contiguous.
swiglu = operator(
    "swiglu(Tensor gate_up) -> Tensor",
    reference=_swiglu_reference,
    cuda=_swiglu_cuda,
    fake=lambda gate_up: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2),
)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [batch, tokens, heads, D] by cos, sin [1 or batch, tokens, D]: i turns with i + D / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, :, None] + torch.cat([-second, first], dim=-1) * sin[:, :, None]


def _append_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, keys: Tensor, values: Tensor, heads: int
) -> Tensor:
    batch, capacity, kv_heads, head_dim = keys.shape
    heads_of_all = qkv.view(batch, cos.shape[1], heads + 2 * kv_heads, head_dim)
    queries, new_keys = rotate(heads_of_all[:, :, : heads + kv_heads], cos, sin).split([heads, kv_heads], dim=2)
    positions = lengths.long()[:, None] + torch.arange(cos.shape[1], device=qkv.device)
    texts = torch.arange(batch, device=qkv.device)[:, None].expand_as(positions)
    inside = positions < capacity
    where = (texts[inside], positions[inside])
    keys[where], values[where] = new_keys[inside], heads_of_all[:, :, heads + kv_heads :][inside]
    return queries.contiguous()


def _append_cuda(
    qkv: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, keys: Tensor, values: Tensor, heads: int
) -> Tensor:
    check_tensor(keys, "keys", dtypes=tuple(_TYPES), shape=(None, None, None, None))
    batch, capacity, kv_heads, head_dim = keys.shape
    if head_dim % (2 * _VECTOR):
        raise KernelError(f"head_dim {head_dim} has no rotary kernel: a multiple of 16 has.")
    check_tensor(cos, "cos", dtypes=(keys.dtype,), shape=(None, None, head_dim))
    tokens = cos.shape[1]
    if cos.shape[0] not in (1, batch):
        raise KernelError(f"cos is for {cos.shape[0]} texts; {batch} texts take {batch}, or 1.")
    check_tensor(sin, "sin", dtypes=(keys.dtype,), shape=tuple(cos.shape))
    check_tensor(values, "values", dtypes=(keys.dtype,), shape=tuple(keys.shape))
    check_tensor(lengths, "lengths", dtypes=(torch.int32,), shape=(batch,))
    columns = (heads + 2 * kv_heads) * head_dim
    check_tensor(qkv, "projections", dtypes=(keys.dtype,), shape=(batch * tokens, columns))
    check_same_device(keys, qkv=qkv, cos=cos, sin=sin, lengths=lengths, values=values)
    queries = qkv.new_empty(batch, tokens, heads, head_dim)
    items = batch * tokens * columns // (2 * _VECTOR)
    if items:
        arguments = (qkv, cos, sin, cos.shape[0], lengths, batch, tokens, heads, kv_heads, head_dim, capacity)
        grid = (-(-items // _THREADS),)
        launch(_kernel("rope_append", keys), grid, (_THREADS,), *arguments, queries, keys, values, device=keys.device)
    return queries


#: Rotary embedding of q and k, and append of k and v. qkv [batch * tokens, (heads + 2 kv_heads) * D]; cos, sin
#: [1 or batch, tokens, D]; token t of text b goes to position lengths[b] + t (int32) of keys and values
#: [batch, capacity, kv_heads, D], and is dropped beyond the capacity. Returns q [batch, tokens, heads, D].
rope_append = operator(
    "rope_append(Tensor qkv, Tensor cos, Tensor sin, Tensor lengths, Tensor(a!) keys, Tensor(b!) values, int heads)"
    " -> Tensor",
    reference=_append_reference,
    cuda=_append_cuda,
    fake=lambda qkv, cos, sin, lengths, keys, values, heads: qkv.new_empty(
        keys.shape[0], cos.shape[1], heads, keys.shape[3]
    ),
)
