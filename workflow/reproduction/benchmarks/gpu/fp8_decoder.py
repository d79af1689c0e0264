"""A decoder with float8 weights and float8 activations, with and without R4: SpinQuant Appendix A.6 and Table 14.

The decoder is the 16-bit one with other linear layers: weights have a scale for each output feature, inputs one for
each token, found while they are made. Embedding, head, attention and KV cache stay in 16 bits. Nothing here converts or
stores a model: weights are random, since time does not depend on them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from reproduction.benchmarks.gpu.fp8_operators import fp8_linear, quantize_fp8, rms_norm_quantize_fp8
from rotquant.decoder.config import LINEARS, DecoderConfig, Precision
from rotquant.decoder.model import Decoder
from rotquant.kernels.hadamard.operator import hadamard
from rotquant.kernels.rows.elementwise import swiglu

#: Standard deviation of the weights, as models are initialised.
_SPREAD = 0.02


@dataclass(frozen=True)
class Fp8Rows:
    """codes: float8_e4m3fn [rows, features]; scale: float32 [rows]."""

    codes: Tensor
    scale: Tensor


class Fp8Inputs(nn.Module):
    """Inputs that become float8, after an online Hadamard transform of the whole row with `rotate` (R4)."""

    def __init__(self, rotate: bool = False) -> None:
        super().__init__()
        self.rotate = rotate

    def forward(self, x: Tensor) -> Fp8Rows:
        """x [rows, features], transformed and quantized."""
        return Fp8Rows(*quantize_fp8(hadamard(x, 0, False, False) if self.rotate else x, False))

    def after_norm(self, hidden: Tensor, update: Tensor | None, gain: None, eps: float) -> tuple[Tensor, Fp8Rows]:
        """hidden + update [rows, hidden], and its RMS norm, quantized; gains are in the weights, as R1 needs."""
        codes, scale, total = rms_norm_quantize_fp8(hidden, update, eps)
        return hidden if update is None else total, Fp8Rows(codes, scale)

    def after_gate(self, gate_up: Tensor) -> Fp8Rows:
        """silu(gate) * up of [rows, 2 * features], transformed and quantized."""
        return self(swiglu(gate_up)) if self.rotate else Fp8Rows(*quantize_fp8(gate_up, True))


class Fp8Linear(nn.Module):
    """A linear layer of float8 weights and float8 inputs.

    Buffers: codes float8_e4m3fn [out, in], scale float32 [out]. dtype: of its results.
    """

    codes: Tensor
    scale: Tensor

    def __init__(self, codes: Tensor, scale: Tensor, inputs: Fp8Inputs, dtype: torch.dtype) -> None:
        super().__init__()
        self.inputs, self.dtype = inputs, dtype
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)

    def product(self, x: Fp8Rows) -> Tensor:
        """Float8 [rows, in] -> [rows, out] of `dtype`."""
        return fp8_linear(x.codes, x.scale, self.codes, self.scale, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`product` of the transformed and quantized input [rows, in]."""
        return self.product(self.inputs(x))


def random_fp8_decoder(
    config: DecoderConfig,
    *,
    rotate: bool,
    dtype: str = "bfloat16",
    device: torch.device | str = "cuda",
    seed: int = 0,
) -> Decoder:
    """A decoder whose weights are drawn on its device, layer by layer, all of them different.

    Args:
        config: its norm gains are taken to be in the weights.
        rotate: R4, the online Hadamard transform before the down projection.
        dtype: of everything that is not float8; a GPU has products for bfloat16 alone.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    decoder = Decoder(
        config.model_copy(update={"norm_gains": False}),
        Precision(dtype=dtype),  # pyright: ignore[reportArgumentType]  # checked at run time
        "meta",
    )
    decoder.embedding = _normal(decoder.embedding.shape, 1.0, decoder.dtype, generator)
    if decoder.head is not None:
        decoder.head = _normal(decoder.head.shape, _SPREAD, decoder.dtype, generator)
    for layer in decoder.layers:
        for name in LINEARS:
            in_features, out_features = config.features(name)
            weight = _normal((out_features, in_features), _SPREAD, decoder.dtype, generator)
            inputs = Fp8Inputs(rotate and name == "down")
            setattr(
                layer,
                name,
                Fp8Linear(*quantize_fp8(weight, False), inputs, decoder.dtype),  # pyright: ignore[reportCallIssue]  # two
            )
    return decoder.eval()


def _normal(shape: tuple[int, ...], spread: float, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    values = torch.empty(shape, dtype=dtype, device=generator.device)
    return values.normal_(0.0, spread, generator=generator)
