"""Faster kernels of a network's pass: the same numbers, and only where they are meant."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from rotquant.tensors import faster
from rotquant.tensors.faster import FasterKernels


def test_modules_go_through_onednn_inside_the_mode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.Linear(8, 4), torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    calls = []
    original = faster.linear
    monkeypatch.setattr(faster, "linear", lambda *args: calls.append(1) or original(*args))
    with torch.no_grad():
        with FasterKernels():
            inside = module(x)
        assert len(calls) == 1
        torch.testing.assert_close(module(x), inside)
        assert len(calls) == 1


def heads(device: str = "cpu") -> list[torch.Tensor]:
    """Queries of 6 heads, keys and values of 2: [2, heads, 40, 64]."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, count, 40, 64, generator=generator).to(device) for count in (6, 2, 2)]


def test_repeated_heads_attend_as_groups_do(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = functional.scaled_dot_product_attention
    operands = heads()
    expected = original(*operands, is_causal=True, enable_gqa=True)
    monkeypatch.setattr(faster, "_is_written_out", lambda query: seen.append(query.shape) or True)
    with FasterKernels():
        found = functional.scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=True)
        functional.scaled_dot_product_attention(*operands[1:], operands[2])
    torch.testing.assert_close(found, expected)
    assert seen == [operands[0].shape]  # heads of equal number are nothing to repeat


@pytest.mark.gpu
def test_grouped_attention_in_float32_is_fused_on_a_gpu() -> None:
    operands = heads("cuda")
    exact = functional.scaled_dot_product_attention(*(x.double() for x in operands), is_causal=True, enable_gqa=True)
    for x in operands:
        x.requires_grad_()
    with FasterKernels(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        found = functional.scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=True)
        found.sum().backward()
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
