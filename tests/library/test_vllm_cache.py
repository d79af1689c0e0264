"""Keys and values by vLLM's rule for `int4_per_token_head`, bit for bit against a slow reading of its description.

The reference takes one number after another: Python's integers for bits, exact sums, numpy's float32 for all else.
"""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rotquant.models.simulation.kv_cache import KVQuantizer, QuantizedCache
from rotquant.models.simulation.vllm_rotation import VllmRotation
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import QuantizationScheme

VLLM = QuantizationScheme(bits=4, symmetric=False, granularity="head", rule="vllm")
#: Signs of a block of 64, as vLLM's generator draws them: +1 where a bit is set, the last sign first.
SIGNS = 0x808035B16573590D


def bfloat16(x: float) -> np.float32:
    """Rounded to 8 bits of mantissa, halves to even."""
    bits = int(np.float32(x).view(np.uint32))
    bits += 0x7FFF + (bits >> 16 & 1)
    return np.uint32(bits & 0xFFFF0000).view(np.float32)


def rotated(x: list[float], signs: list[int]) -> list[np.float32]:
    """H (d x) of one block: the sign of entry (i, j) of H is the parity of the bits that i and j share."""
    inputs = [float(bfloat16(sign * one)) for sign, one in zip(signs, x, strict=True)]
    return [
        bfloat16(math.fsum((-1) ** (i & j).bit_count() * one for j, one in enumerate(inputs))) for i in range(len(x))
    ]


def half_away(x: np.float32) -> int:
    return int(x + np.float32(0.5)) if x >= 0 else int(x - np.float32(0.5))


def coded(y: list[np.float32]) -> tuple[list[int], int, list[np.float32]]:
    """Codes of a head's token, the 32 bits of its scale with the zero point in the last four, and what is read back."""
    low, high = min(y), max(y)
    scale = max((high - low) / np.float32(15), np.float32(1e-6))
    zero_point = min(max(half_away(-low / scale), 0), 15)
    reciprocal = np.float32(1) / scale
    codes = [min(max(half_away(one * reciprocal + np.float32(zero_point)), 0), 15) for one in y]
    packed = int(scale.view(np.uint32)) & ~0xF | zero_point
    read = np.uint32(packed & ~0xF).view(np.float32)
    return codes, packed, [np.float32(code - zero_point) * read for code in codes]


def signs_of(size: int) -> list[int]:
    drawn = torch.bernoulli(torch.full((size,), 0.5), generator=torch.Generator().manual_seed(0x9E3779B9))
    return [1 if one else -1 for one in drawn.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 24])  # 24: three blocks of 8
def test_codes_scales_and_zero_points_are_vllms_to_the_last_bit(head_dim: int, dtype: torch.dtype) -> None:
    generator, block = torch.Generator().manual_seed(3), head_dim & -head_dim
    x = torch.randn(1, 2, 6, head_dim, generator=generator)
    x[0, 0, 0] += 40  # a range without zero, whose top is lost
    x[0, 0, 1] = 0  # the smallest scale
    x[0, 1, 2, ::7] *= 30
    x = x.to(dtype)
    cache = QuantizedCache(KVQuantizer(VLLM, VLLM))
    keys, values = cache.update(x, -x, 0)
    layer = cache.layers[0]
    for states, codes, (scale, zero_point), read in (
        (x, layer.keys, layer.key_qparams, keys),
        (-x, layer.values, layer.value_qparams, values),
    ):
        bits = scale.view(torch.int32) & -16 | zero_point.int()
        for head in range(2):
            for token in range(6):
                row = states[0, head, token].tolist()
                parts = [rotated(row[i : i + block], signs_of(block)) for i in range(0, head_dim, block)]
                expected, packed, back = coded([one for part in parts for one in part])
                assert codes[0, head, token].tolist() == expected
                assert bits[0, head, token].item() & 0xFFFFFFFF == packed
                unturned = turned_back(back, signs_of(block))
                # What is stored is of float32, so that returning it turned back costs its last bits, or the type's.
                error = (read[0, head, token].double() - unturned).abs().max()
                assert error <= 8 * torch.finfo(dtype).eps * unturned.abs().max()


def turned_back(y: list[np.float32], signs: list[int]) -> Tensor:
    """d (H y) / n of each block, in float64."""
    found, size = [], len(signs)
    for start in range(0, len(y), size):
        part = [float(one) for one in y[start : start + size]]
        for j in range(size):
            found.append(signs[j] * math.fsum((-1) ** (i & j).bit_count() * one for i, one in enumerate(part)) / size)
    return torch.tensor(found, dtype=torch.float64)


def test_the_signs_are_those_that_vllm_draws() -> None:
    """A generator that another torch seeded otherwise would give other signs: these were written down from vLLM's."""
    assert sum((sign > 0) << i for i, sign in enumerate(signs_of(64))) == SIGNS


def test_what_is_differentiated_is_what_is_read() -> None:
    x = torch.randn(1, 2, 5, 32, generator=torch.Generator().manual_seed(1))
    quantizer, leaf = KVQuantizer(VLLM, VLLM), x.clone().requires_grad_()
    plain, _ = quantizer.fake(x, x, 0)
    keys, _ = quantizer.fake(leaf, leaf, 0)
    assert torch.allclose(keys, plain, atol=1e-5)  # x + (read - x): the last bits of a sum
    keys.sum().backward()
    # Straight through, rounded to bfloat16 on its way: H d d H / n is the identity.
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad, torch.ones_like(x), atol=2e-2)


def test_turning_there_and_back_loses_no_more_than_bfloat16() -> None:
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(2))
    back = VllmRotation().inverse(VllmRotation()(x))
    assert (back - x).abs().max() < 2**-6 * x.abs().max()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"keys": {**VLLM.model_dump(), "bits": 8}}, "rule 'vllm' takes 4 bits"),
        ({"activations": VLLM.model_dump()}, "granularity tensor, token or group"),
        ({"keys": VLLM.model_dump(), "rotation": {}}, "set rotation.keys to false"),
    ],
)
def test_what_vllm_does_not_do_is_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Recipe.model_validate(changes)
