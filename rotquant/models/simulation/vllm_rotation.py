"""The transform of keys and values before vLLM's INT4 cache type `int4_per_token_head`.

y = H (d x) in blocks of the largest power of two that divides a head: H is Sylvester's matrix of 1 and -1, not
normalized, d are signs that a fixed seed draws. x is rounded to bfloat16 before and y after, as vLLM's kernel in Triton
does. Queries, which vLLM turns and rounds too, stay. Source: vllm/v1/attention/ops/int4_per_token_head.py, vLLM 0.33.0.
"""

import functools

import torch
from torch import Tensor

from rotquant.tensors.hadamard import hadamard_matrix

_SEED = 0x9E3779B9


class VllmRotation:
    """The transform and its inverse, of tensors [..., head_dim] of any floating-point type.

    Sums are of float64, exact for bfloat16 numbers; vLLM adds in float32, which may round a y otherwise now and then.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """H (d x), rounded to bfloat16, as the type of x."""
        blocks, signs, matrix = _blocks(x)
        return _flat((blocks * signs).bfloat16().double() @ matrix, x, torch.bfloat16)

    def inverse(self, y: Tensor) -> Tensor:
        """d (H y) / n for blocks of n, as the type of y."""
        blocks, signs, matrix = _blocks(y)
        return _flat(blocks.double() @ matrix * signs / len(matrix), y, y.dtype)


def _blocks(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x as [..., blocks, n], signs [n], and H [n, n] in float64."""
    size = x.shape[-1] & -x.shape[-1]
    signs, matrix = _transform(size, x.device)
    return x.unflatten(-1, (-1, size)), signs.to(x.dtype), matrix


@functools.cache
@torch.inference_mode(False)  # they serve other calls too
def _transform(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Signs [size], float32, and H [size, size], float64: drawn and made once, for all layers and tokens."""
    drawn = torch.bernoulli(torch.full((size,), 0.5), generator=torch.Generator().manual_seed(_SEED))
    return (2 * drawn - 1).to(device), hadamard_matrix(size, dtype=torch.float64).to(device)


def _flat(blocks: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    return blocks.flatten(-2).to(dtype).to(like.dtype)
