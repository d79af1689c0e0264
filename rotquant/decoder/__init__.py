"""Quantized decoders that compute with integers: what `rotquant convert` makes of a fake-quantized model."""

from rotquant.decoder.config import KINDS, CacheScheme, DecoderConfig, InputScheme, Precision
from rotquant.decoder.conversion import convert
from rotquant.decoder.generation import Generation
from rotquant.decoder.linear import PackedLinear
from rotquant.decoder.model import Decoder
from rotquant.decoder.random import random_decoder
from rotquant.decoder.storage import load_decoder, save_decoder

__all__ = [
    "KINDS",
    "CacheScheme",
    "Decoder",
    "DecoderConfig",
    "Generation",
    "InputScheme",
    "PackedLinear",
    "Precision",
    "convert",
    "load_decoder",
    "random_decoder",
    "save_decoder",
]
