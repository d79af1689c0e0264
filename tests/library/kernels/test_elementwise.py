"""The 16-bit decoder's elementwise operators: their references against plain formulas, their kernels against those."""

import pytest
import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.rows.elementwise import add_rms_norm, rope_append, swiglu

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")

TYPES = (torch.float16, torch.bfloat16)


def angles(batch: int, tokens: int, head_dim: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    turn = torch.rand(batch, tokens, head_dim // 2, device=device).repeat(1, 1, 2) * 6
    return turn.cos().to(dtype), turn.sin().to(dtype)


def test_the_norm_adds_first() -> None:
    x, residual, gain = torch.randn(3, 40), torch.randn(3, 40), torch.rand(40)
    out, total = add_rms_norm(x, residual, gain, 1e-5)
    assert torch.equal(total, x + residual)
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain
    torch.testing.assert_close(out, expected)


def test_rope_turns_pairs_and_append_writes_at_the_lengths() -> None:
    batch, tokens, heads, kv_heads, head_dim, capacity = 2, 3, 4, 2, 16, 8
    qkv = torch.randn(batch * tokens, (heads + 2 * kv_heads) * head_dim)
    cos, sin = angles(batch, tokens, head_dim, torch.float32)
    lengths = torch.tensor([0, 6], dtype=torch.int32)
    keys, values = torch.zeros(2, batch, capacity, kv_heads, head_dim)
    queries = rope_append(qkv, cos, sin, lengths, keys, values, heads, 2)
    assert queries[:, :2].count_nonzero() == 0
    queries = queries[:, 2:]
    parts = qkv.view(batch, tokens, heads + 2 * kv_heads, head_dim)
    pair = torch.view_as_complex(torch.stack([parts[..., :8], parts[..., 8:]], dim=-1).contiguous())
    turned = torch.view_as_real(pair * torch.complex(cos, sin)[:, :, None, :8]).movedim(-1, -2).flatten(-2)
    torch.testing.assert_close(queries, turned[:, :, :heads])
    torch.testing.assert_close(keys[0, :3], turned[0, :, heads:-kv_heads])
    torch.testing.assert_close(keys[1, 6:], turned[1, :2, heads:-kv_heads])  # the third lies beyond the capacity
    assert torch.equal(values[0, :3], parts[0, :, -kv_heads:])
    assert not keys[0, 3:].any()
    assert not keys[1, :6].any()


@pytest.mark.unflipped  # torch.library.opcheck has dispatch modes of its own
def test_the_operators_have_shape_rules() -> None:
    x, cos, lengths = torch.randn(2, 64), torch.randn(1, 1, 16), torch.zeros(2, dtype=torch.int32)
    ops = torch.ops.rotquant
    torch.library.opcheck(ops.add_rms_norm.default, (x, x.clone(), None, 1e-5))
    torch.library.opcheck(ops.add_rms_norm.default, (x, None, torch.ones(64), 1e-5))
    torch.library.opcheck(ops.swiglu.default, (x,))
    keys, values = torch.zeros(2, 2, 8, 1, 16)
    torch.library.opcheck(ops.rope_append.default, (x, cos, cos, lengths, keys, values, 2, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "n"), [(1, 4096), (3, 8), (17, 5120), (2, 8192), (5, 11008), (1, 16384)])
def test_norm_and_swiglu_kernels(rows: int, n: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, rows, n, dtype=dtype, device="cuda")
    gain = torch.rand(n, dtype=dtype, device="cuda")
    out, total = add_rms_norm(x, residual, gain, 1e-5)
    assert torch.equal(total, x + residual)
    wide = total.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain.double()
    # One rounding to 16 bits: half a unit in the last place.
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=0.51 * step, atol=1e-6)
    gate_up = torch.randn(rows, 2 * n, dtype=dtype, device="cuda")
    gate, up = gate_up.double().chunk(2, dim=-1)
    # Two roundings, of silu and of the product.
    torch.testing.assert_close(swiglu(gate_up).double(), gate.sigmoid() * gate * up, rtol=1.1 * step, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 4, 4, 128), (3, 17, 8, 2, 64), (2, 5, 20, 20, 16), (16, 1, 32, 8, 128)])
def test_rope_append_kernel(shape: tuple[int, ...], shared: bool, gap: int, dtype: torch.dtype) -> None:
    batch, tokens, heads, kv_heads, head_dim = shape
    qkv = torch.randn(batch * tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device="cuda")
    cos, sin = angles(1 if shared else batch, tokens, head_dim, dtype, "cuda")
    lengths = torch.arange(batch, device="cuda", dtype=torch.int32)
    sizes = (2, batch, tokens + batch, kv_heads, head_dim)
    keys, values = torch.full(sizes, torch.nan, dtype=dtype, device="cuda")
    queries = rope_append(qkv, cos, sin, lengths, keys, values, heads, gap)
    wide_keys, wide_values = torch.full(sizes, torch.nan, dtype=torch.float64)
    expected = rope_append(
        qkv.cpu().double(), cos.cpu().double(), sin.cpu().double(), lengths.cpu(), wide_keys, wide_values, heads, gap
    )
    step = torch.finfo(dtype).eps  # one rounding; where the two products cancel, of the order of the summands
    for found, wide in ((queries, expected), (keys, wide_keys), (values, wide_values)):
        torch.testing.assert_close(found.cpu().double(), wide, rtol=0.51 * step, atol=step * 1e-2, equal_nan=True)


@pytest.mark.gpu
def test_what_the_kernels_refuse() -> None:
    x = torch.randn(4, 64, device="cuda", dtype=torch.float16)
    for call, message in (
        (lambda: add_rms_norm(x.float(), None, None, 1e-5), "hidden is float32"),
        (lambda: add_rms_norm(x[:, ::2], None, None, 1e-5), "not contiguous"),
        (lambda: add_rms_norm(x[:, :63].contiguous(), None, None, 1e-5), "multiple of 8"),
        (lambda: add_rms_norm(x, x[:2], None, 1e-5), "residual has shape"),
        (lambda: swiglu(x[:, :24].contiguous()), "gate and up"),
    ):
        with pytest.raises(KernelError, match=message):
            call()
