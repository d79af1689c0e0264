"""Operators on a 4-bit KV cache: append, decode attention, dequantize for prefill, and the rotation of queries.

Keys pass RoPE and an online Hadamard transform before they are quantized, and queries the same transform, so scores are
those of the unrotated model (QuaRot Sec. 4, stages 1d and 2c). Attention multiplies the integers as they are, on tensor
cores, and applies scales and zero points to sums; it never writes dequantized keys or values. A prefix of
floating-point keys and values may stand in the first places of every sequence (PrefixQuant Sec. 5.1). Head sizes 64 and
128 on a GPU; `attention.reference` defines every operator on any device and for any head size of the layout.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import FLOAT, INT, LONG, POINTER, TYPES_16, CudaFile, Parameters
from rotquant.kernels.attention import reference
from rotquant.kernels.attention.reference import Append, Attend, Dequantize
from rotquant.kernels.launch.loading import TranslationUnit, architecture_of_device, kernel
from rotquant.kernels.launch.operators import check_same_device, check_tensor, launch, operator
from rotquant.kernels.launch.overlap import launch_waiting
from rotquant.kernels.layouts.weights import padded

HEAD_DIMS = (64, 128)
#: Query heads that may share a key and value head.
MAX_GROUP = 16

#: As in the sources: warps of a block, bytes of codes that a warp takes at a time, blocks that may share a sequence.
_WARPS, _TILE_BYTES, _MAX_SPLITS = 8, 4096, 64
#: In the place of a number of groups: each head has one scale for all tokens.
_STATIC = 0

_POOL_POINTERS = dict.fromkeys(("k_codes", "v_codes", "k_params", "v_params"), POINTER)
_PREFIX = {"k_prefix": POINTER, "v_prefix": POINTER, "prefix": INT}
_PAGES = {"table": POINTER, "pages": INT, "per_sequence": INT, "page_size": INT}
_ROPE = {"cos": POINTER, "sin": POINTER, "cos_batch": INT}
_APPEND = CudaFile(
    "kv_append.cu",
    kernels={
        "kv_append": Parameters(
            **dict.fromkeys(("k", "v"), POINTER),
            **dict.fromkeys(("k_batch", "k_token", "v_batch", "v_token"), LONG),
            **_ROPE,
            **_POOL_POINTERS,
            starts=POINTER,
            **_PAGES,
            **dict.fromkeys(("batch", "tokens", "kv_heads", "rotate"), INT),
            **dict.fromkeys(("clip_k", "clip_v"), FLOAT),
        ),
        "kv_rotate": Parameters(
            x=POINTER,
            x_batch=LONG,
            x_token=LONG,
            **_ROPE,
            out=POINTER,
            **dict.fromkeys(("batch", "gap", "tokens", "heads", "rotate"), INT),
        ),
        "kv_dequantize": Parameters(
            **_POOL_POINTERS,
            **_PREFIX,
            **_PAGES,
            **dict.fromkeys(("batch", "tokens", "kv_heads"), INT),
            k=POINTER,
            v=POINTER,
        ),
    },
    constants={"kWarps": _WARPS, "kStatic": _STATIC, "int(kStaticZero)": reference.STATIC_ZERO},
)
_ATTENTION = CudaFile(
    "kv_attention.cu",
    kernels={
        "kv_attention": Parameters(
            q=POINTER,
            q_batch=LONG,
            **_ROPE,
            **_POOL_POINTERS,
            **_PREFIX,
            lengths=POINTER,
            new_tokens=INT,
            **_PAGES,
            group=INT,
            rotate=INT,
            scale=FLOAT,
            **dict.fromkeys(("workspace", "counters", "out"), POINTER),
        )
    },
    constants={"kWarps": _WARPS, "kMaxSplits": _MAX_SPLITS, "kStatic": _STATIC},
)


def sources(architecture: str) -> list[TranslationUnit]:
    """Every translation unit that the papers' shapes ask for: a scale per head, up to 8 query heads per key head."""
    shapes = [_Shape(head_dim, groups, torch.float16) for head_dim in HEAD_DIMS for groups in (1, _STATIC)]
    names = [name for shape in shapes for name in (*map(shape.append, (False, True)), shape.rotate, shape.dequantize)]
    units = [TranslationUnit(_APPEND, (name,)) for name in dict.fromkeys(names)]
    return units + [_attention_source(shape, 1, _stages(architecture)) for shape in shapes]


@dataclass(frozen=True)
class _Shape:
    """The sizes and types that select a kernel's instance; groups: scales of a head and token, or `_STATIC`."""

    head_dim: int
    groups: int
    dtype: torch.dtype

    def append(self, blocked: bool) -> str:
        return f"kv_append<{TYPES_16[self.dtype]}, {self.head_dim}, {self.groups}, {str(blocked).lower()}>"

    @property
    def rotate(self) -> str:
        return f"kv_rotate<{TYPES_16[self.dtype]}, {self.head_dim}>"

    @property
    def dequantize(self) -> str:
        return f"kv_dequantize<{TYPES_16[self.dtype]}, {self.head_dim}, {self.groups}>"

    def attention(self, column_tiles: int, stages: int) -> str:
        return f"kv_attention<{TYPES_16[self.dtype]}, {self.head_dim}, {self.groups}, {column_tiles}, {stages}>"

    def shared_bytes(self, stages: int) -> int:
        """Dynamic shared memory of the attention kernel: rings of tiles, later the sums of warps and prefix for eight
        heads."""
        tile = _TILE_BYTES + 8 * self.groups * _TILE_BYTES // self.head_dim
        ring = padded(stages * (tile + 8), 16)
        return max(_WARPS * ring, (_WARPS + 1) * 8 * (self.head_dim + 6) * 4)


@functools.cache
def _attention_source(shape: _Shape, column_tiles: int, stages: int) -> TranslationUnit:
    """A unit of one instance, whose rings have as many bytes as the host gives them."""
    head_dim, groups = shape.head_dim, shape.groups
    rings = f"kWarps * sizeof(Ring<{head_dim}, {groups}, kTile<{head_dim}>, {stages}>)"
    merge = f"sizeof(Merge<{head_dim}>)"
    shared = (f"{rings} > {merge} ? {rings} : {merge}", shape.shared_bytes(stages))
    tile = (f"kTile<{head_dim}> * {head_dim}", _TILE_BYTES)
    return TranslationUnit(_ATTENTION, (shape.attention(column_tiles, stages),), (shared, tile))


def _stages(architecture: str) -> int:
    """Tiles in a warp's ring: three, and two where a block gets no more than 99 KiB of shared memory."""
    return 2 if architecture in ("sm_86", "sm_89") else 3


def _append_cuda(a: Append) -> None:
    k, v = a.k, a.v
    batch, tokens, kv_heads, head_dim = _check_heads(k, "keys", 4)
    if v.shape != k.shape or v.dtype != k.dtype:
        raise KernelError(f"keys are {k.dtype} {tuple(k.shape)} and values {v.dtype} {tuple(v.shape)}.")
    _check_heads(v, "values", 4)
    shape = _check_pools(a, kv_heads, head_dim, k.dtype)
    cos_batch = _check_rope(a.cos, a.sin, batch, tokens, head_dim, k.dtype)
    check_tensor(a.starts, "starts", dtypes=(torch.int32,), shape=(batch,))
    per_sequence = _check_table(a.block_table, batch, a.k_codes)
    check_same_device(k, v=v, cos=a.cos, sin=a.sin, **_pools(a), starts=a.starts)
    if k.numel() == 0:
        return
    blocked = tokens >= 16
    blocks = batch * (-(-tokens // 16) + 1) * kv_heads if blocked else -(-batch * tokens * kv_heads // _WARPS)
    name = shape.append(blocked)
    launch_waiting(
        kernel(TranslationUnit(_APPEND, (name,)), name, k.device),
        (blocks, 2),
        (32 * _WARPS,),
        *(k, v, k.stride(0), k.stride(1), v.stride(0), v.stride(1), a.cos, a.sin, cos_batch),
        *(a.k_codes, a.v_codes, a.k_params, a.v_params, a.starts, a.block_table, a.k_codes.shape[0], per_sequence),
        *(a.k_codes.shape[2], batch, tokens, kv_heads, a.rotate, a.clip_k, a.clip_v),
        device=k.device,
    )


def _attend_cuda(a: Attend) -> Tensor:
    q = a.q
    batch, heads, head_dim = _check_heads(q, "queries", 3)
    pages, kv_heads, page_size = a.k_codes.shape[:3]
    shape = _check_pools(a, kv_heads, head_dim, q.dtype)
    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        raise KernelError(
            f"{heads} query heads on {kv_heads} key heads: the kernel takes 1 to {MAX_GROUP} query heads per key head."
        )
    prefix = _check_prefix(a, kv_heads, head_dim, q)
    cos_batch = _check_rope(a.cos, a.sin, batch, 1, head_dim, q.dtype)
    check_tensor(a.lengths, "lengths", dtypes=(torch.int32,), shape=(batch,))
    per_sequence = _check_table(a.block_table, batch, a.k_codes)
    check_same_device(q, cos=a.cos, sin=a.sin, **_pools(a), lengths=a.lengths)
    out = torch.empty(batch, heads, head_dim, dtype=q.dtype, device=q.device)
    if batch == 0:
        return out
    group = heads // kv_heads
    column_tiles = -(-group // 8)
    splits = _splits(batch * kv_heads, per_sequence * page_size, head_dim, q.device)
    counters = a.counters
    if counters is None:
        counters = torch.zeros(batch * kv_heads, dtype=torch.int32, device=q.device)
    check_tensor(counters, "counters", dtypes=(torch.int32,), shape=(batch * kv_heads,))
    check_same_device(q, counters=counters)
    workspace = torch.empty(batch * heads * splits * (head_dim + 4) * (splits > 1), device=q.device)
    stages = _stages(architecture_of_device(q.device))
    source = _attention_source(shape, column_tiles, stages)
    launch_waiting(
        kernel(source, source.instances[0], q.device),
        (splits, kv_heads, batch),
        (32 * _WARPS,),
        *(q, q.stride(0), a.cos, a.sin, cos_batch, a.k_codes, a.v_codes, a.k_params, a.v_params),
        *(a.k_prefix, a.v_prefix, prefix, a.lengths, a.new_tokens),
        *(a.block_table, pages, per_sequence, page_size, group, a.rotate),
        *(math.log2(math.e) * head_dim**-0.5, workspace, counters, out),
        device=q.device,
        shared=shape.shared_bytes(stages),
    )
    return out


def _dequantize_cuda(a: Dequantize) -> tuple[Tensor, Tensor]:
    pages, kv_heads, page_size, row = a.k_codes.shape
    shape = _check_pools(a, kv_heads, 2 * row, a.dtype)
    per_sequence = _check_table(a.block_table, a.batch, a.k_codes)
    check_same_device(a.k_codes, **_pools(a))
    if not 0 <= a.tokens <= per_sequence * page_size:
        raise KernelError(f"{a.tokens} tokens are asked for, and a sequence has room for {per_sequence * page_size}.")
    k, v = _dequantize_fake(a)
    prefix = _check_prefix(a, kv_heads, 2 * row, k)
    if k.numel():
        launch(
            kernel(TranslationUnit(_APPEND, (shape.dequantize,)), shape.dequantize, k.device),
            (-(-a.batch * kv_heads * -(-a.tokens // 16) // _WARPS), 2),
            (32 * _WARPS,),
            *(a.k_codes, a.v_codes, a.k_params, a.v_params, a.k_prefix, a.v_prefix, prefix),
            *(a.block_table, pages, per_sequence, page_size),
            *(a.batch, a.tokens, kv_heads, k, v),
            device=k.device,
        )
    return k, v


def _dequantize_fake(a: Dequantize) -> tuple[Tensor, Tensor]:
    shape = (a.batch, a.k_codes.shape[1], a.tokens, 2 * a.k_codes.shape[3])
    return a.k_codes.new_empty(shape, dtype=a.dtype), a.k_codes.new_empty(shape, dtype=a.dtype)


def _rotate_reference(x: Tensor, cos: Tensor | None, sin: Tensor | None, rotate: bool, gap: int) -> Tensor:
    out = _rotate_fake(x, cos, sin, rotate, gap)
    out[:, :gap], out[:, gap:] = 0, reference.rotated(x, cos, sin, rotate)
    return out


def _rotate_fake(x: Tensor, cos: Tensor | None, sin: Tensor | None, rotate: bool, gap: int) -> Tensor:
    return x.new_empty(x.shape[0], gap + x.shape[1], *x.shape[2:])


def _rotate_cuda(x: Tensor, cos: Tensor | None, sin: Tensor | None, rotate: bool, gap: int) -> Tensor:
    batch, tokens, heads, head_dim = _check_heads(x, "queries", 4)
    cos_batch = _check_rope(cos, sin, batch, tokens, head_dim, x.dtype)
    check_same_device(x, cos=cos, sin=sin)
    out = _rotate_fake(x, cos, sin, rotate, gap)
    name = _Shape(head_dim, 1, x.dtype).rotate
    if out.numel():
        launch(
            kernel(TranslationUnit(_APPEND, (name,)), name, x.device),
            (-(-out.numel() // head_dim // _WARPS),),
            (32 * _WARPS,),
            *(x, x.stride(0), x.stride(1), cos, sin, cos_batch, out),
            *(batch, gap, tokens, heads, rotate),
            device=x.device,
        )
    return out


@functools.cache
def _splits(pairs: int, capacity: int, head_dim: int, device: torch.device) -> int:
    """Blocks that share the tokens of one (sequence, key head): the fewest that give every multiprocessor its share.

    A block costs some microseconds before and after its tokens, and one for each multiprocessor saturates memory.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    most = max(1, min(_MAX_SPLITS, capacity * head_dim // (_WARPS * _TILE_BYTES)))
    return min(range(1, most + 1), key=lambda splits: -(-pairs * splits // processors) / splits * (1 + 0.03 * splits))


def _check_heads(x: Tensor, name: str, dims: int) -> torch.Size:
    """Raise one sentence unless x [batch, (tokens,) heads, D] is dense along heads and D; returns its shape."""
    if x.device.type != "cuda":
        raise KernelError(f"{name} are on {x.device}, and the kernel needs them on the GPU.")
    if x.dtype not in TYPES_16:
        raise KernelError(f"{name} are {x.dtype}, and the kernel takes float16 or bfloat16.")
    if x.dim() != dims or x.shape[-1] not in HEAD_DIMS:
        raise KernelError(
            f"{name} have shape {tuple(x.shape)}, and the kernel needs {dims} axes, the last of 64 or 128 elements."
        )
    if x.stride(-1) != 1 or (x.shape[-2] > 1 and x.stride(-2) != x.shape[-1]):
        raise KernelError(f"{name} are not contiguous along heads and head_dim (strides {x.stride()}).")
    return x.shape


def _pools(a: Append | Attend | Dequantize) -> dict[str, Tensor]:
    return {"k_codes": a.k_codes, "v_codes": a.v_codes, "k_params": a.k_params, "v_params": a.v_params}


def _check_pools(a: Append | Attend | Dequantize, kv_heads: int, head_dim: int, dtype: torch.dtype) -> _Shape:
    """Raise one sentence unless the pools are those of `Int4KVCache` and the kernels have an instance for them."""
    if dtype not in TYPES_16 or head_dim not in HEAD_DIMS:
        raise KernelError(
            f"the 4-bit KV kernels take float16 or bfloat16 and head_dim 64 or 128, not {dtype}, {head_dim}."
        )
    pages, _, page_size, _ = a.k_codes.shape
    static = reference.is_static(a.k_params)
    groups = _STATIC if static else a.k_params.shape[-2]
    for codes, name in ((a.k_codes, "key codes"), (a.v_codes, "value codes")):
        check_tensor(codes, name, dtypes=(torch.uint8,), shape=(pages, kv_heads, page_size, head_dim // 2))
    wanted = (kv_heads,) if static else (pages, kv_heads, page_size, groups, 2)
    for params, name in ((a.k_params, "key scales"), (a.v_params, "value scales")):
        check_tensor(params, name, dtypes=(torch.float32 if static else torch.float16,), shape=wanted)
    if page_size % 64:
        raise KernelError(f"a page holds {page_size} tokens, and the kernel needs a multiple of 64.")
    if not static and (head_dim % (32 * groups) or groups & (groups - 1)):
        raise KernelError(f"{groups} scales per head of {head_dim}: groups have 32, 64 or 128 elements.")
    return _Shape(head_dim, groups, dtype)


def _check_prefix(a: Attend | Dequantize, kv_heads: int, head_dim: int, like: Tensor) -> int:
    """Raise one sentence unless a prefix fits the pools and is like `like` in dtype and device; returns its tokens."""
    k_prefix, v_prefix = a.k_prefix, a.v_prefix
    if (k_prefix is None) != (v_prefix is None):
        raise KernelError("a prefix has both keys and values.")
    if k_prefix is None or v_prefix is None:
        return 0
    check_tensor(k_prefix, "prefix keys", dtypes=(like.dtype,), shape=(kv_heads, None, head_dim))
    check_tensor(v_prefix, "prefix values", dtypes=(like.dtype,), shape=tuple(k_prefix.shape))
    check_same_device(like, prefix_keys=k_prefix, prefix_values=v_prefix)
    return k_prefix.shape[1]


def _check_rope(
    cos: Tensor | None, sin: Tensor | None, batch: int, tokens: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Raise one sentence unless cos and sin fit; returns rows from one sequence to the next, 0 where they share."""
    if (cos is None) != (sin is None):
        raise KernelError("RoPE needs both cos and sin.")
    if cos is None or sin is None:
        return 0
    check_tensor(cos, "cos", dtypes=(dtype,), shape=(None, tokens, head_dim))
    check_tensor(sin, "sin", dtypes=(dtype,), shape=tuple(cos.shape))
    if cos.shape[0] not in (1, batch):
        raise KernelError(f"cos has {cos.shape[0]} rows of angles; {batch} sequences take {batch}, or 1.")
    return tokens if cos.shape[0] > 1 else 0


def _check_table(block_table: Tensor | None, batch: int, pool: Tensor) -> int:
    """Raise one sentence unless pages are assigned to sequences; returns the pages of a sequence."""
    if block_table is not None:
        check_tensor(block_table, "block table", dtypes=(torch.int32,), shape=(batch, None))
        check_same_device(pool, block_table=block_table)
        return block_table.shape[1]
    if batch == 0 or pool.shape[0] % batch:
        raise KernelError(f"{pool.shape[0]} pages do not divide among {batch} sequences without a block table.")
    return pool.shape[0] // batch


#: Write tokens, quantized, to the pools.
kv_append = operator("kv_append", reference=reference.append, cuda=_append_cuda, fake=lambda a: None)

#: Decode attention: [batch, heads, D] of q's dtype.
kv_attention = operator(
    "kv_attention", reference=reference.attend, cuda=_attend_cuda, fake=lambda a: a.q.new_empty(a.q.shape)
)

#: Keys (rotated) and values of every sequence, [batch, kv_heads, tokens, D] of dtype.
kv_dequantize = operator("kv_dequantize", reference=reference.dequantize, cuda=_dequantize_cuda, fake=_dequantize_fake)

#: RoPE and the Hadamard transform of x [batch, tokens, heads, D] (strides as in `kv_append`), behind a gap of zeros:
#: [batch, gap + tokens, heads, D], contiguous, of x's dtype.
kv_rotate = operator("kv_rotate", reference=_rotate_reference, cuda=_rotate_cuda, fake=_rotate_fake)
