"""Time of one linear layer, from 16-bit activations in to 16-bit activations out: ours and what torch offers.

QuaRot Table 14 and Figure 7, PrefixQuant Table 9, RCP Tables 5 and 17-20. The 16-bit baseline is cuBLAS. The fp8 and
int8 baselines get their inputs quantized beforehand and for free, which a model would have to pay for. `ceiling` is the
GPU's maximum rates, of torch's own calls at a size that fills it: the kernels' reports are drawn against them.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from reproduction.benchmarks import peers
from reproduction.benchmarks.arguments import CeilingArguments, LinearArguments
from reproduction.benchmarks.timing import Case, Measurements, fastest, gpu, measure
from rotquant.kernels.hadamard.operator import hadamard
from rotquant.kernels.launch.overlap import overlapping_launches
from rotquant.kernels.layouts.weights import K_BLOCK, STRIP, pack_rows, padded
from rotquant.kernels.products import gemm, gemv, lut
from rotquant.kernels.products.linear import GROUP_SIZE, w4_linear
from rotquant.kernels.products.w4a16 import half_shapes, w4a16_linear
from rotquant.kernels.rows.activations import hadamard_quantize, quantize_rows

#: QuaRot's clip of activations; it does not change the time.
_CLIP = 0.9


def linear(arguments: LinearArguments) -> Measurements:
    """Seconds of one layer; of int8 also `product_seconds`, without its dequantization."""
    case = linear_case(arguments, gpu())
    measured = measure(case, regime=arguments.regime)
    if arguments.implementation == "int8":
        product = Case(int8_product, case.inputs[:2])
        measured["product_seconds"] = measure(product, regime=arguments.regime)["seconds"]
    return measured


def linear_case(arguments: LinearArguments, device: torch.device) -> Case:
    """The tensors and the call that `linear` times."""
    build = peers.BUILDERS.get(arguments.implementation) or _BUILDERS[arguments.implementation]
    run, inputs = build(arguments, device)
    if arguments.overlapped:
        run = _overlapped(run)
    return Case(run, inputs, 2.0 * arguments.tokens * arguments.in_features * arguments.out_features)


Built = peers.Built


def _overlapped(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def within(*inputs: Tensor) -> Tensor:
        with overlapping_launches():
            return run(*inputs)

    return within


def _cublas(a: LinearArguments, device: torch.device) -> Built:
    dtype = torch.bfloat16 if a.implementation == "bf16" else torch.float16
    return functional.linear, (_input(a, device, dtype), _weight(a, device, dtype))


def _fp8(a: LinearArguments, device: torch.device) -> Built:
    x, weight = (tensor.to(torch.float8_e4m3fn) for tensor in (_input(a, device), _weight(a, device)))
    if a.implementation == "fp8-tensor":
        return fp8_linear, (x, weight, _scales(device, 1), _scales(device, 1))
    return fp8_linear, (x, weight, _scales(device, a.tokens, 1), _scales(device, 1, a.out_features))


def _int8(a: LinearArguments, device: torch.device) -> Built:
    x = torch.randint(-127, 128, (a.tokens, a.in_features), dtype=torch.int8, device=device)
    weight = torch.randint(-127, 128, (a.out_features, a.in_features), dtype=torch.int8, device=device)
    return int8_linear, (x, weight, _scales(device, a.tokens, 1), _scales(device, a.out_features))


def _w4(a: LinearArguments, device: torch.device) -> Built:
    quantize, inputs = _online(a, device)
    strips, blocks = padded(a.out_features, STRIP) // STRIP, padded(a.in_features, K_BLOCK) // K_BLOCK
    weight = torch.randint(0, 256, (strips, blocks, 32, 16), dtype=torch.uint8, device=device)
    groups = (a.in_features // GROUP_SIZE,) if a.implementation == "int4-grouped" else ()

    launch = {"gemm": gemm.launch_gemm, "gemv": gemv.launch_gemv}.get(a.product)

    def run(weight: Tensor, column_scale: Tensor, *inputs: Tensor) -> Tensor:
        codes, row_scale = quantize(*inputs)
        if launch is None:
            return w4_linear(codes, row_scale, weight, column_scale, None, a.out_features, torch.float16)
        y = torch.empty(a.tokens, a.out_features, dtype=torch.float16, device=codes.device)
        launch(codes, row_scale, weight, column_scale, None, y)
        return y

    return run, (weight, _scales(device, a.out_features, *groups), *inputs)


def _w4a16(a: LinearArguments, device: torch.device) -> Built:
    codes, scale = half_shapes(a.out_features, a.in_features, grouped=True)
    weight = torch.randint(0, 256, codes, dtype=torch.uint8, device=device)

    def run(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return w4a16_linear(x, weight, scale, None)

    return run, (_input(a, device), weight, _scales(device, *scale))


def _int4pack(a: LinearArguments, device: torch.device) -> Built:
    weight = int4pack_weight(a.out_features, a.in_features, device)
    scale_and_zero = _scales(device, a.in_features // GROUP_SIZE, a.out_features, 2).bfloat16()
    return int4pack_linear, (_input(a, device, torch.bfloat16), weight, scale_and_zero)


def _w2a16(a: LinearArguments, device: torch.device) -> Built:
    weight = random_lut_weight(a.out_features, a.in_features, device)

    def run(x: Tensor, codes: Tensor, table: Tensor) -> Tensor:
        return lut.w2_linear(x, None, codes, table, None, a.out_features, torch.float16)

    return run, (_input(a, device), weight.codes, weight.table)


def _w2a4(a: LinearArguments, device: torch.device) -> Built:
    quantize, inputs = _online(a, device, packed=False)
    weight = random_lut_weight(a.out_features, a.in_features, device)

    def run(codes: Tensor, table: Tensor, *inputs: Tensor) -> Tensor:
        x, row_scale = quantize(*inputs)
        return lut.w2_linear(x, row_scale, codes, table, None, a.out_features, torch.float16)

    return run, (weight.codes, weight.table, *inputs)


def _w16a4(a: LinearArguments, device: torch.device) -> Built:
    quantize, inputs = _online(a, device, packed=False)

    def run(weight: Tensor, *inputs: Tensor) -> Tensor:
        codes, row_scale = quantize(*inputs)
        return functional.linear((codes * row_scale[:, None]).half(), weight)

    return run, (_weight(a, device), *inputs)


_BUILDERS: dict[str, Callable[[LinearArguments, torch.device], Built]] = {
    "fp16": _cublas,
    "bf16": _cublas,
    "fp8": _fp8,
    "fp8-tensor": _fp8,
    "int8": _int8,
    "int4": _w4,
    "int4-grouped": _w4,
    "int4-a8": _w4,
    "w4a16": _w4a16,
    "int4pack": _int4pack,
    "w2a16": _w2a16,
    "w2a4": _w2a4,
    "w16a4": _w16a4,
}


def _online(
    a: LinearArguments, device: torch.device, packed: bool | None = None
) -> tuple[Callable[..., tuple[Tensor, Tensor]], tuple[Tensor, ...]]:
    """The online part of a layer: a function of the returned tensors that gives codes and row scale."""
    bits = 8 if a.implementation == "int4-a8" else 4
    packed = packed if packed is not None else bits == 4 and not reads_bytes(device)
    half = a.hadamard == "float16"
    if a.quantization == "none" and a.hadamard == "none":
        return lambda codes, row_scale: (codes, row_scale), _random_codes(a, bits, packed, device)

    def transform(codes: Tensor, row_scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        hadamard(x, 0, False, half)
        return codes, row_scale

    def quantize(x: Tensor, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if a.hadamard == "none":
            return quantize_rows(x, _CLIP, bits, packed, static)
        return hadamard_quantize(x, 0, half, False, _CLIP, bits, packed, static)

    x = _input(a, device)
    if a.quantization == "none":
        return transform, (*_random_codes(a, bits, packed, device), x)
    return quantize, (x, torch.full((1,), 0.5, device=device)) if a.quantization == "static" else (x,)


def _random_codes(a: LinearArguments, bits: int, packed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    limit = 2 ** (bits - 1)
    shape = (a.tokens, padded(a.in_features, K_BLOCK))
    codes = torch.randint(-limit, limit, shape, dtype=torch.int8, device=device)
    return pack_rows(codes) if packed else codes, _scales(device, a.tokens)


def reads_bytes(device: torch.device) -> bool:
    """Whether 4-bit activations travel as one byte each: Hopper and newer have no 4-bit tensor cores."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def random_lut_weight(out_features: int, in_features: int, device: torch.device) -> lut.LutWeight:
    """Random 2-bit codes and sorted random levels."""
    codes = torch.randint(0, 4, (out_features, in_features), dtype=torch.uint8, device=device)
    table = torch.randn(out_features, in_features // GROUP_SIZE, 4, dtype=torch.float16, device=device)
    return lut.LutWeight.pack(codes, table.sort().values)


def _input(a: LinearArguments, device: torch.device, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(a.tokens, a.in_features, dtype=dtype, device=device)


def _weight(a: LinearArguments, device: torch.device, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(a.out_features, a.in_features, dtype=dtype, device=device)


def _scales(device: torch.device, *shape: int) -> Tensor:
    return torch.rand(shape, device=device) * 1e-2 + 1e-3


# The best baselines in torch without this library


def copy_case(x: Tensor) -> Case:
    """Reading and writing a tensor once, by which kernels that do as much are judged: a copy, or an elementwise kernel.

    On an H200 the copy is up to 3 % faster, but in a CUDA graph it reaches 2.7 instead of 4.2 TB/s at some sizes.
    """
    target = torch.empty_like(x)
    return fastest([Case(target.copy_, (x,)), Case(lambda x: torch.neg(x, out=target), (x,))])


def fp8_linear(x: Tensor, weight: Tensor, row_scale: Tensor, column_scale: Tensor) -> Tensor:
    """float8_e4m3fn [rows, in] and [out, in], float32 scales [rows, 1] and [1, out], or [1] -> bfloat16 [rows, out].

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


#: Elements of the float32 tensor that is copied or summed: its bytes are many times the L2 cache.
_ELEMENTS = 2**28
#: Elements that are summed at a time: of the readings tried, sums of rows were the fastest.
_ROW = 2**16
#: Rows, inputs and outputs of the product.
_PRODUCT = 8192


def ceiling(arguments: CeilingArguments) -> Measurements:
    """Seconds with the bytes (copy: read and written) or operations (products) of which they make a rate."""
    if arguments.what == "copy":
        return measure(copy_case(torch.randn(_ELEMENTS, device=gpu())))
    if arguments.what == "read":
        return measure(Case(lambda x: x.sum(dim=1), (torch.randn(_ELEMENTS // _ROW, _ROW, device=gpu()),)))
    size = dict.fromkeys(("tokens", "in_features", "out_features"), _PRODUCT)
    return linear(LinearArguments(**size, implementation=arguments.what))
