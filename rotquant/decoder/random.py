"""Decoders with random weights at a model's shape: enough to measure time and memory, never accuracy."""

import torch

from rotquant.decoder.config import KINDS, DecoderConfig, Precision
from rotquant.decoder.linear import LinearInputs, PackedLinear
from rotquant.decoder.model import Decoder, DecoderLayer
from rotquant.foundation.errors import RecipeError, nearest

#: Standard deviation of the weights, as models are initialised.
_SPREAD = 0.02
#: Quantization step of values of standard deviation one that 4 bits cover up to three deviations.
_STEP = 3.0 / 7


def random_decoder(
    config: DecoderConfig,
    kind: str | Precision,
    *,
    layers: int | None = None,
    device: torch.device | str = "cuda",
    seed: int = 0,
) -> Decoder:
    """A decoder whose weights are drawn on its device; a quantized one never exists in floating point.

    Args:
        kind: a precision, or a name in `config.KINDS`.
        layers: fewer layers than the configuration has; one is a block of QuaRot Table 17.

    Raises:
        RecipeError: an unknown kind.
    """
    if isinstance(kind, str) and kind not in KINDS:
        raise RecipeError(f"unknown kind of decoder {kind!r}{nearest(kind, list(KINDS))}.")
    precision = KINDS[kind] if isinstance(kind, str) else kind
    config = config.model_copy(update={"layers": layers or config.layers})
    generator = torch.Generator(device=device).manual_seed(seed)
    decoder = Decoder(config, precision, device)
    for table in (decoder.embedding, decoder.head):
        if table is not None:
            table.normal_(0.0, 1.0 if table is decoder.embedding else _SPREAD, generator=generator)
    for module in decoder.modules():
        _fill(module, generator)
    return decoder.eval()


def _fill(module: torch.nn.Module, generator: torch.Generator) -> None:
    if isinstance(module, DecoderLayer):
        for part in module.cache_init.prefix or ():
            part.normal_(generator=generator)
        for scale in module.cache_init.scales or ():
            scale.fill_(_STEP)
    if isinstance(module, PackedLinear):
        for name, buffer in module.named_buffers(recurse=False):
            if name == "codes":
                buffer.random_(0, 256, generator=generator)  # every byte is a valid pair of codes
            elif name in ("scale", "bias"):
                buffer.fill_(_SPREAD * _STEP if name == "scale" else 0.0)
            else:
                buffer.normal_(0.0, _SPREAD, generator=generator)
    elif isinstance(module, LinearInputs) and module.static_scale is not None:
        module.static_scale.fill_(_STEP)
