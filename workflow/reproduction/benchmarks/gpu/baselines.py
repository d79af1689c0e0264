"""The best baselines in torch without this library: cuBLAS, fp8 and int8 products, attention's fastest form.

Every function takes tensors and enqueues work; none of them uses a kernel of ours.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from reproduction.benchmarks.timing.case import Case, fastest

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def copy_case(x: Tensor) -> Case:
    """Reading and writing a tensor once, by which kernels that do as much are judged: a copy, or an elementwise kernel.

    On an H200 the copy is up to 3 % faster, but in a CUDA graph it reaches 2.7 instead of 4.2 TB/s at some sizes.
    """
    target = torch.empty_like(x)
    return fastest([Case(target.copy_, (x,)), Case(lambda x: torch.neg(x, out=target), (x,))])


def fp8_linear(x: Tensor, weight: Tensor, row_scale: Tensor, column_scale: Tensor) -> Tensor:
    """float8_e4m3fn [rows, in] and [out, in], float32 scales [rows, 1] and [1, out] -> bfloat16 [rows, out].

    torch offers scales for each row with this output type alone.
    """
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]  # no public name
        x, weight.T, scale_a=row_scale, scale_b=column_scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """int8 [rows, in] and [out, in] -> int32 [rows, out]."""
    return torch._int_mm(x, weight.T)  # pyright: ignore[reportPrivateImportUsage]  # no public name


def int8_linear(x: Tensor, weight: Tensor, row_scale: Tensor, column_scale: Tensor) -> Tensor:
    """int8 [rows, in] and [out, in], float32 scales [rows, 1] and [out] -> float16 [rows, out]."""
    y = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float16, device=x.device)
    # Two passes over the sums; an expression of torch's that ends in .half() would need a third.
    return torch.mul(int8_product(x, weight) * row_scale, column_scale, out=y)


def int4pack_weight(out_features: int, in_features: int, device: torch.device) -> Tensor:
    """Random codes in the order of `torch._weight_int4pack_mm`, eight 16-input tiles together: int32."""
    shape = (out_features // 8, in_features // 128, 32, 4)
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)


def int4pack_linear(x: Tensor, weight: Tensor, scale_and_zero: Tensor) -> Tensor:
    """bfloat16 [rows, in], an `int4pack_weight`, bfloat16 [groups, out, 2] -> bfloat16 [rows, out]; groups of 128."""
    return torch._weight_int4pack_mm(  # pyright: ignore[reportPrivateImportUsage]  # no public name
        x, weight, 128, scale_and_zero
    )


def decode_attentions() -> dict[str, Attention]:
    """Ways to attend with one query token: q [batch, heads, 1, d], k and v [batch, kv_heads, cache, d].

    Query heads that share a key head can be left to torch (enable_gqa) or be given to it as rows of one query. The
    memory-efficient backend is left out: it does not split the sequence over multiprocessors, and took 1.7 to 5 times
    as long on an H200.
    """

    def grouped(backend: SDPBackend) -> Attention:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

        return attend

    def rows(backend: SDPBackend) -> Attention:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                queries = q.view(q.shape[0], k.shape[1], -1, q.shape[3])
                return scaled_dot_product_attention(queries, k, v).reshape(q.shape)

        return attend

    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    return {
        f"{backend.name.lower()}, {form.__name__}": form(backend) for form in (grouped, rows) for backend in backends
    }


def fastest_attention(q: Tensor, k: Tensor, v: Tensor) -> Attention:
    """The fastest of `decode_attentions` on these tensors, found by timing each.

    Raises:
        KernelError: none of them runs.
    """
    same = q.shape[1] == k.shape[1]  # every head has its own keys: both forms are one call
    return fastest(
        Case(attend, (q, k, v)) for name, attend in decode_attentions().items() if not (same and name.endswith("rows"))
    ).run
