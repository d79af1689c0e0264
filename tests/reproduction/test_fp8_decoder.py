"""The float8 decoder against the same network written out in floats, its activations and weights rounded to float8."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from reproduction.benchmarks.fp8 import Fp8Linear, random_fp8_decoder
from rotquant.decoder import Decoder, DecoderConfig
from rotquant.kernels.launch.operators import references
from rotquant.tensors.hadamard import hadamard_matrix
from tests.helpers.models import TINY_SHAPE

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")

CONFIG = DecoderConfig.from_shape(TINY_SHAPE)


def rounded(x: Tensor) -> Tensor:
    """Each row rounded to float8, its largest magnitude becoming 448."""
    scale = (x.abs().amax(dim=-1, keepdim=True) / 448).float()
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def product(x: Tensor, linear: Fp8Linear) -> Tensor:
    return rounded(x) @ (linear.codes.to(x.dtype) * linear.scale[:, None]).T


def turned(x: Tensor) -> Tensor:
    """Rotary embedding of x [tokens, heads, head_dim]."""
    angles = torch.arange(len(x))[:, None].float() * torch.tensor(CONFIG.inverse_frequencies)
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def reference(decoder: Decoder, tokens: Tensor, rotate: bool) -> Tensor:
    """Logits [tokens, vocabulary] of one text."""
    hidden = decoder.embedding[tokens]
    sizes = [size * CONFIG.head_dim for size in (CONFIG.heads, CONFIG.kv_heads, CONFIG.kv_heads)]
    for layer in decoder.layers:
        x = rms_norm(hidden, hidden.shape[-1:], eps=CONFIG.norm_eps)
        q, k, v = (part.unflatten(1, (-1, CONFIG.head_dim)) for part in product(x, layer.qkv).split(sizes, dim=1))
        q, k, v = (part.transpose(0, 1) for part in (turned(q), turned(k), v))
        attended = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        hidden = hidden + product(attended.transpose(0, 1).flatten(1), layer.o)
        x = rms_norm(hidden, hidden.shape[-1:], eps=CONFIG.norm_eps)
        gate, up = product(x, layer.gate_up).chunk(2, dim=1)
        x = silu(gate) * up
        if rotate:
            x = x @ hadamard_matrix(CONFIG.intermediate).to(x.dtype) / CONFIG.intermediate**0.5
        hidden = hidden + product(x, layer.down)
    return rms_norm(hidden, hidden.shape[-1:], eps=CONFIG.norm_eps) @ decoder.head.T


@pytest.mark.parametrize("rotate", [False, True])
def test_the_decoder_computes_the_network_with_rounded_rows(rotate: bool) -> None:
    decoder = random_fp8_decoder(CONFIG, rotate=rotate, dtype="float64", device="cpu")
    tokens = torch.randint(CONFIG.vocabulary, (9,), generator=torch.Generator().manual_seed(0))
    logits = decoder.logits(tokens[None])[0]
    # Rotary angles and scales are float32 on both sides; a value beside the middle of two codes may take the other.
    torch.testing.assert_close(logits, reference(decoder, tokens, rotate), rtol=1e-4, atol=1e-4)


def test_a_prompt_then_tokens_see_what_the_whole_text_sees() -> None:
    decoder = random_fp8_decoder(CONFIG, rotate=True, dtype="float64", device="cpu")
    tokens = torch.randint(CONFIG.vocabulary, (2, 7))
    cache = decoder.new_cache(2, 7)
    decoder.prefill(tokens[:, :5], cache)
    steps = [decoder.decode(tokens[:, place], cache) for place in (5, 6)]
    torch.testing.assert_close(torch.stack(steps, dim=1), decoder.logits(tokens)[:, 5:], rtol=1e-4, atol=1e-4)


def test_layers_have_weights_of_their_own() -> None:
    first, second = random_fp8_decoder(CONFIG, rotate=False, device="cpu").layers
    assert not torch.equal(first.down.codes.float(), second.down.codes.float())


@pytest.mark.gpu
@pytest.mark.parametrize("rotate", [False, True])
def test_the_kernels_compute_what_their_references_do(rotate: bool) -> None:
    decoder = random_fp8_decoder(CONFIG, rotate=rotate, device="cuda")
    tokens = torch.randint(CONFIG.vocabulary, (3, 33), device="cuda")
    logits = decoder.logits(tokens).double()
    with references():
        expected = decoder.logits(tokens).double()
    # Sums in another order round some bfloat16 to its neighbour, and some of these take another float8 code.
    assert (logits - expected).norm() < 0.03 * expected.norm()
