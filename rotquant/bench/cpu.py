"""Time of decoding one token on a CPU: a whole network, its linear layers beside torch's own, and its transforms.

SpinQuant Table 6. Everything runs in torch's threads. Weights are cold: a network reads more than the caches hold, and
copies of a single layer take turns.
"""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from rotquant.bench.cpu_arguments import CpuDecodeArguments, CpuLinearArguments, CpuTransformArguments
from rotquant.bench.cpu_decoder import CpuCache, CpuDecoder, CpuShape, random_cpu_decoder, random_dot_weight
from rotquant.bench.cpu_timing import COLD_BYTES, time_cpu
from rotquant.bench.records import Measurement
from rotquant.errors import KernelError
from rotquant.hadamard import hadamard_transform
from rotquant.kernels.cpu.operators import hadamard, linear, linear16, read

#: Seconds of each network, and of each reading of weights.
_DECODING_SECONDS = 13.0
#: Calls of a short function that are timed as one.
_CALLS = 200


def cpu_decode(arguments: CpuDecodeArguments) -> dict[str, Measurement]:
    """Seconds of one token in every precision, taking turns, and of reading the same weights with all threads.

    Quantities: bf16_seconds (our product of 16-bit weights), bf16_torch_seconds (`torch.nn.functional.linear`),
    w4a8_seconds, w4a8_hadamard_seconds (with R3 and R4 online); floors: bf16_read_seconds, w4a8_read_seconds; what a
    token reads: bf16_bytes, w4a8_bytes.

    Raises:
        ConfigError: an unknown shape.
        KernelError: there is no C++ compiler.
    """
    shape, layers = CpuShape.named(arguments.shape), arguments.layers_in_memory
    wide, narrow = (random_cpu_decoder(shape, weights, layers=layers) for weights in ("bf16", "w4a8"))
    decoders = {
        "bf16": wide,
        "bf16_torch": wide.changed(product=functional.linear),
        "w4a8": narrow,
        "w4a8_hadamard": narrow.changed(rotates=True),
    }
    calls = {name: decoding_step(decoder, arguments.context) for name, decoder in decoders.items()}
    several = {"bf16": wide.weights, "w4a8": narrow.weights}
    calls |= {f"{name}_read": functools.partial(_read, weights) for name, weights in several.items()}
    timings = time_cpu(*calls.values(), seconds=_DECODING_SECONDS)
    seconds = {f"{name}_seconds": Measurement.of(timing) for name, timing in zip(calls, timings, strict=True)}
    return seconds | {
        f"{name}_bytes": Measurement(sum(weight.nbytes for weight in weights), "B") for name, weights in several.items()
    }


def decoding_step(decoder: CpuDecoder, context: int) -> Callable[[], Tensor]:
    """A step of decoding that sees `context` tokens, itself among them, and can be repeated."""
    cache = CpuCache(decoder.shape, context, decoder.embedding.dtype)
    for part in (cache.keys, cache.values):
        part.normal_()

    def step() -> Tensor:
        cache.length = context - 1
        return decoder.decode(0, cache)

    return step


def cpu_linear(arguments: CpuLinearArguments) -> dict[str, Measurement]:
    """Seconds of one linear layer on one token, and the bytes of its weight.

    Raises:
        KernelError: there is no C++ compiler, or torch does not have the implementation on this machine.
    """
    a = arguments
    make = _LAYERS[a.implementation]
    call, size = make(a.in_features, a.out_features)
    calls = [call, *(make(a.in_features, a.out_features)[0] for _ in range(COLD_BYTES // size))]
    try:
        call()
    except (NotImplementedError, RuntimeError) as error:
        raise KernelError(f"torch cannot run {a.implementation} here: {str(error).splitlines()[0]}.") from None
    (timing,) = time_cpu(lambda: [layer() for layer in calls])
    return {"seconds": Measurement.of(timing, len(calls)), "bytes": Measurement(size, "B")}


def cpu_transform(arguments: CpuTransformArguments) -> dict[str, Measurement]:
    """Seconds of the Hadamard transform of a few rows that lie in the cache, as they do when a network has made them.

    Raises:
        HadamardSizeError: no construction for the number of features.
        KernelError: there is no C++ compiler.
    """
    x = torch.randn(arguments.rows, arguments.features).bfloat16()
    transform = hadamard if arguments.implementation == "ours" else hadamard_transform
    (timing,) = time_cpu(lambda: [transform(x) for _ in range(_CALLS)], seconds=2.0)
    return {"seconds": Measurement.of(timing, _CALLS)}


def _read(weights: Iterable[Tensor]) -> None:
    for weight in weights:
        read(weight)


Layer = tuple[Callable[[], Tensor], int]
"""A linear layer with random weights on one token, and the bytes of its weight."""


def _bf16(in_features: int, out_features: int, product: Callable[[Tensor, Tensor], Tensor] = linear16) -> Layer:
    x, weight = _token(in_features), _weight(in_features, out_features)
    return lambda: product(x, weight), weight.nbytes


def _bf16_torch(in_features: int, out_features: int) -> Layer:
    return _bf16(in_features, out_features, functional.linear)


def _w4a8(in_features: int, out_features: int) -> Layer:
    x, weight = _token(in_features), random_dot_weight((out_features, in_features), torch.Generator())
    return lambda: linear(x, weight), weight.nbytes


def _int8_weights(in_features: int, out_features: int) -> Layer:
    x, scale = _token(in_features), torch.full((out_features,), 0.001, dtype=torch.bfloat16)
    weight = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8)
    return lambda: torch._weight_int8pack_mm(x, weight, scale), weight.nbytes


def _int8_torch(in_features: int, out_features: int) -> Layer:
    layer = nn.Sequential(nn.Linear(in_features, out_features, bias=False))
    quantized = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, dtype=torch.qint8)
    x = _token(in_features).float()
    return lambda: quantized(x), in_features * out_features


def _int4_torch(in_features: int, out_features: int) -> Layer:
    codes = torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8)
    weight = torch._dyn_quant_pack_4bit_weight(
        codes, torch.full((out_features, 1), 0.005), None, in_features, in_features, out_features
    )
    x = _token(in_features).float()
    return lambda: torch._dyn_quant_matmul_4bit(x, weight, in_features, in_features, out_features), codes.nbytes


_LAYERS: dict[str, Callable[[int, int], Layer]] = {
    "bf16": _bf16,
    "bf16-torch": _bf16_torch,
    "int8-weights": _int8_weights,
    "int8-torch": _int8_torch,
    "int4-torch": _int4_torch,
    "w4a8": _w4a8,
}


def _token(features: int) -> Tensor:
    return torch.randn(1, features).bfloat16()


def _weight(in_features: int, out_features: int) -> Tensor:
    return torch.empty(out_features, in_features, dtype=torch.bfloat16).normal_(0.0, 0.02)
