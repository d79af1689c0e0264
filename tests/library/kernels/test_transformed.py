"""Norm, transform and quantization in one kernel, and floats of low bits as outputs: references, arithmetic, kernels.

On the CPU references are held against the simulation's quantizers, and the kernels' conversions, compiled for the CPU,
against the references. On a GPU kernels are held against the references.
"""

import ctypes
import shutil
import subprocess

import pytest
import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.hadamard.launch import RowNorm, launch_transform
from rotquant.kernels.launch.loading import SOURCES
from rotquant.kernels.launch.operators import references
from rotquant.kernels.layouts.codes import FloatRounding, RowFloats, unpack_pairs
from rotquant.kernels.layouts.weights import K_BLOCK, padded, unpack_rows
from rotquant.kernels.rows.activations import hadamard_quantize
from rotquant.kernels.rows.elementwise import gated
from rotquant.kernels.rows.transformed import (
    float_reference,
    hadamard_quantize_float,
    rms_norm_hadamard_quantize,
    rms_norm_hadamard_quantize_float,
)
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors import fp4
from rotquant.tensors.hadamard import hadamard_transform
from rotquant.tensors.quantization import QParams, choose_qparams, dequantize, fake_quantize, quantize
from tests.library.kernels.emulated import SHIMS, needs_compiler

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")

FORMATS = ["FP8", "MXFP4", "NVFP4"]
GROUPS = {"MXFP4": 32, "NVFP4": 16}
EPS = 1e-5


def scheme_of(kind: str, clip: float = 1.0) -> QuantizationScheme:
    if kind == "FP8":
        return QuantizationScheme(bits=8, type="float", granularity="token", clip_ratio=clip)
    return QuantizationScheme(bits=4, type="float", granularity="group", group_size=GROUPS[kind], clip_ratio=clip)


def scale_of_all(kind: str, y: Tensor) -> Tensor | None:
    """g of NVFP4 of float32 values, of the shape that operators take."""
    return fp4.global_scale(y.abs().amax()).reshape(1) if kind == "NVFP4" else None


def values_of(kind: str, codes: Tensor, scale: Tensor, whole: Tensor | None) -> Tensor:
    """What an operator's codes and scales stand for, float32 [rows, Kp]."""
    if kind == "FP8":
        return codes.float() * scale[:, None]
    scales = fp4.unpack_scales(scale[..., None], whole)
    return dequantize(unpack_pairs(codes), QParams(scales, global_scale=whole), scheme_of(kind), torch.float32)


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(x.shape[1], EPS)
    norm.weight = torch.nn.Parameter(weight)
    return norm(x).detach()


@pytest.mark.parametrize("clip", [1.0, 0.9])
@pytest.mark.parametrize("n", [64, 96, 160, 688])
@pytest.mark.parametrize("kind", FORMATS)
def test_codes_and_scales_are_those_of_the_simulation(kind: str, n: int, clip: float) -> None:
    x, scheme = torch.randn(5, n), scheme_of(kind, clip)
    y = hadamard_transform(x)
    whole = scale_of_all(kind, y)
    codes, scale = hadamard_quantize_float(x, 0, False, False, clip, kind, whole)
    qparams = choose_qparams(y, scheme, global_scale=whole)
    expected = quantize(y, qparams, scheme)
    if kind == "FP8":
        assert torch.equal(codes.view(torch.uint8)[:, :n], expected.view(torch.uint8))
        assert torch.equal(scale, qparams.scale.flatten())
    else:
        stored = fp4.pack_scales(qparams.scale, qparams.global_scale).squeeze(-1)
        assert torch.equal(unpack_pairs(codes)[:, :n], expected)
        assert torch.equal(scale[:, : stored.shape[1]].view(torch.uint8), stored.view(torch.uint8))
        assert scale.shape == (5, padded(n, K_BLOCK) // GROUPS[kind])
    values = values_of(kind, codes, scale, whole)
    assert torch.equal(values[:, :n], fake_quantize(y, scheme, qparams))
    assert not values[:, n:].any()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_gate_and_heads_come_before_the_transform(kind: str) -> None:
    x = torch.randn(3, 256)
    whole = torch.tensor([700.0]) if kind == "NVFP4" else None
    result = hadamard_quantize_float(x, 4, False, True, 1.0, kind, whole)
    transformed = hadamard_transform(gated(x).view(3, 4, 32).mT).mT.reshape(3, 128)
    for found, expected in zip(result, float_reference(transformed, FloatRounding(1.0, kind, whole)), strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_before_the_transform_is_that_of_transformers(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 96).to(dtype), torch.rand(96).to(dtype)
    normed = llama_norm(x, weight).float()
    rounding = (0.9, 4, True, None)
    found = rms_norm_hadamard_quantize(x, weight, EPS, *rounding)
    for a, b in zip(found, hadamard_quantize(normed, 0, False, False, *rounding), strict=True):
        assert torch.equal(a, b)
    for kind in FORMATS:
        whole = scale_of_all(kind, hadamard_transform(normed))
        found = rms_norm_hadamard_quantize_float(x, weight, EPS, 1.0, kind, whole)
        for a, b in zip(found, hadamard_quantize_float(normed, 0, False, False, 1.0, kind, whole), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.unflipped  # torch.library.opcheck has dispatch modes of its own
def test_the_operators_have_shape_rules() -> None:
    ops, x, weight = torch.ops.rotquant, torch.randn(3, 160), torch.rand(160)
    for packed in (False, True):
        torch.library.opcheck(ops.rms_norm_hadamard_quantize.default, (x, weight, EPS, 0.9, 4, packed, None))
    for kind, whole in (("FP8", None), ("MXFP4", None), ("NVFP4", torch.tensor([500.0]))):
        # opcheck's comparison has no arithmetic for float8
        rule = {"test_utils": ("test_schema", "test_faketensor")}
        torch.library.opcheck(ops.hadamard_quantize_float.default, (x, 0, False, True, 1.0, kind, whole), **rule)
        torch.library.opcheck(ops.rms_norm_hadamard_quantize_float.default, (x, None, EPS, 1.0, kind, whole), **rule)


def test_impossible_floats_are_refused() -> None:
    x = torch.randn(3, 64)
    for kind, whole in (("NVFP4", None), ("MXFP4", torch.ones(1)), ("FP8", torch.ones(1))):
        with pytest.raises(KernelError, match="NVFP4 takes a scale of the whole tensor"):
            hadamard_quantize_float(x, 0, False, False, 1.0, kind, whole)
    with pytest.raises(KernelError, match="one float32 number"):
        hadamard_quantize_float(x, 0, False, False, 1.0, "NVFP4", torch.ones(3))
    with pytest.raises(KernelError, match="not 'FP4'"):
        hadamard_quantize_float(x, 0, False, False, 1.0, "FP4", None)
    with pytest.raises(KernelError, match=r"\[rows, n\]"):
        rms_norm_hadamard_quantize_float(x[0], None, EPS, 1.0, "FP8", None)


# --- the kernels' conversions on a CPU ----------------------------------------------------------------------------

#: Every lane converts eight consecutive values, as after a transform; 32 lanes have 256.
CONVERSIONS = """
#include "warp.h"
#include "epilogue/floats.cuh"

template <Output Out>
void groups(const float* x, Codes q, float norm) {
    const int at = 256 * blockIdx.x + 8 * threadIdx.x;
    float v[8];
    for (int i = 0; i < 8; ++i) v[i] = x[at + i];
    const GroupRange<Out> range(q, norm);
    write_group<1>(range, v, static_cast<char*>(q.codes) + at / 2, reinterpret_cast<char*>(q.scale) + at / range.kSize,
                   at % range.kSize == 0, true);
}

extern "C" void quantize_groups(bool powers, const float* x, void* codes, void* scale, const float* whole, float clip,
                                float norm, int count) {
    Codes q{codes, static_cast<float*>(scale), whole, clip, 6};
    void* arguments[] = {&x, &q, &norm};
    warp::launch(powers ? groups<kMxfp4> : groups<kNvfp4>, arguments, count / 256, 32);
}

extern "C" void to_e4m3(const float* x, unsigned char* codes, int count) {
    for (int i = 0; i < count; ++i) codes[i] = e4m3_by_integers(x[i]);
}

extern "C" void from_e4m3(const unsigned char* codes, float* x, int count) {
    for (int i = 0; i < count; ++i) x[i] = e4m3_value(codes[i]);
}

extern "C" void to_e2m1(const float* x, unsigned char* codes, int count) {
    for (int i = 0; i < count; i += 2) {
        const u32 pair = e2m1_pair(Float16<__half>::pack(x[i] / 2, x[i + 1] / 2));
        codes[i] = pair & 0xFF, codes[i + 1] = pair >> 16 & 0xFF;
    }
}
"""


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """epilogue/floats.cuh as a C++ compiler reads it, a warp's lanes as coroutines."""
    folder = tmp_path_factory.mktemp("conversions")
    for headers in (SOURCES / "include", SHIMS):
        shutil.copytree(headers, folder, dirs_exist_ok=True)
    source, library = folder / "conversions.cpp", folder / "conversions.so"
    source.write_text(CONVERSIONS)
    compiler = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))))
    flags = ("-std=c++17", "-O0", "-ffp-contract=off", "-w", "-shared", "-fPIC", f"-I{folder}")
    done = subprocess.run(
        (str(compiler), *flags, str(source), "-o", str(library)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if x is None else x.data_ptr())


def around(levels: Tensor) -> Tensor:
    """Levels, the ties between neighbours, and the float32 numbers next to all of these; of both signs."""
    marks = torch.cat([levels, (levels[1:] + levels[:-1]) / 2])
    near = torch.cat([marks, marks.nextafter(torch.tensor(torch.inf)), marks.nextafter(torch.tensor(-torch.inf))])
    return torch.cat([near, -near])


@needs_compiler
def test_e4m3_is_rounded_as_torch_rounds_it(conversions: ctypes.CDLL) -> None:
    """All bytes, all ties and their neighbours, numbers of many sizes, and what saturates."""
    bytes_ = torch.arange(127, dtype=torch.uint8)
    levels = bytes_.view(torch.float8_e4m3fn).float()
    back = torch.empty(127)
    conversions.from_e4m3(pointer(bytes_), pointer(back), 127)
    assert torch.equal(back, levels)
    x = torch.cat([around(levels), torch.randn(5000) * torch.exp(3 * torch.randn(5000)), torch.tensor([1e30, -1e30])])
    codes = torch.empty(len(x), dtype=torch.uint8)
    conversions.to_e4m3(pointer(x), pointer(codes), len(x))
    assert torch.equal(codes, x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


@needs_compiler
def test_e2m1_is_rounded_to_the_nearest_and_to_even(conversions: ctypes.CDLL) -> None:
    """Of values that float16 holds codes are exact; others are rounded to it first, and a tie's neighbours meet it."""
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    x = torch.cat([around(levels), torch.randn(4096) * 3, torch.tensor([1e9, -1e9])]).half().float()
    codes = torch.empty(len(x), dtype=torch.uint8)
    conversions.to_e2m1(pointer(x), pointer(codes), len(x))
    expected = fp4.round_e2m1(x.clamp(-6, 6))
    assert torch.equal(fp4.decode(codes, torch.float32), expected)
    assert torch.equal(codes >> 3, torch.signbit(x).to(torch.uint8))


@needs_compiler
@pytest.mark.parametrize("clip", [1.0, 0.9])
@pytest.mark.parametrize("kind", list(GROUPS))
@pytest.mark.parametrize("size", [1.0, 1e-5, 1e-30, 1e4, 0.0])
def test_the_conversion_of_groups_is_the_references(
    kind: str, size: float, clip: float, conversions: ctypes.CDLL
) -> None:
    """Equal scales of powers of two; those of E4M3 by one step where a product rounds across a border.

    Codes: values are rounded to float16 before E2M1, which moves those within 2^-12 of a tie, three in ten thousand.
    """
    x = torch.randn(64, 1024) * torch.exp(torch.randn(64, 1024)) * size
    norm = 1 / 64  # a power of two, which rounds nothing
    y = x * norm
    whole = scale_of_all(kind, y)
    codes, scale = float_reference(y, FloatRounding(clip, kind, whole))
    found_codes, found_scale = torch.empty_like(codes), torch.empty_like(scale)
    conversions.quantize_groups(
        ctypes.c_bool(kind == "MXFP4"),
        *map(pointer, (x, found_codes, found_scale, whole)),
        ctypes.c_float(clip),
        ctypes.c_float(norm),
        x.numel(),
    )
    check_floats(kind, (found_codes, found_scale), (codes, scale), codes_off=1e-3, scales_off=1e-3)
    if kind == "MXFP4":
        assert torch.equal(found_scale, scale)


# --- on a GPU -----------------------------------------------------------------------------------------------------


def steps(kind: str, codes: Tensor) -> Tensor:
    """Codes as integers that count numbers of the format from zero, so that neighbours differ by one."""
    bytes_ = codes.view(torch.uint8) if kind == "FP8" else unpack_pairs(codes)
    sign = 0x80 if kind == "FP8" else 8
    sizes = (bytes_ & (sign - 1)).int()
    return torch.where(bytes_ >= sign, -sizes, sizes)


#: Codes that may move by chance in a tensor of a thousand, of which less than one is expected to.
_FEW = 5


def check_floats(
    kind: str,
    result: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    *,
    codes_off: float,
    scales_off: float,
    close: float = 2e-6,
    near: float = 1e-6,
) -> None:
    """Scales equal but for a share that moved to the next one, and codes of equal scales but for a share by one.

    A float32 scale of FP8 differs by its rounding, `close`. Its steps near zero are a 200,000th of the largest value,
    so that an error of all values, `near` of the largest, is several of them there.
    """
    difference = (steps(kind, result[0]) - steps(kind, expected[0])).abs()
    if kind == "FP8":
        torch.testing.assert_close(result[1], expected[1], rtol=close, atol=0)
        distance = (result[0].float() - expected[0].float()).abs()
        difference = torch.where(distance <= near * 448, difference.clamp(max=1), difference)
    else:
        moved = (result[1].view(torch.uint8).int() - expected[1].view(torch.uint8).int()).abs()
        assert moved.max() <= 1
        few = max(_FEW, scales_off * moved.numel())
        assert (moved > 0).sum() <= few, f"{int((moved > 0).sum())} scales moved"
        difference = difference[(moved == 0).repeat_interleave(GROUPS[kind], dim=1)]
    assert difference.max() <= 1
    few = max(_FEW, codes_off * difference.numel())
    assert (difference > 0).sum() <= few, f"{int((difference > 0).sum())} codes moved"


def held(codes: Tensor) -> Tensor:
    """Integers one to a byte."""
    return unpack_rows(codes) if codes.dtype == torch.uint8 else codes


#: Strips, dense and across, several rows to a block, shared memory, and sizes whose rows are padded.
SIZES = [64, 96, 448, 512, 688, 1024, 2048, 2560, 3072, 3584, 4096, 5120, 8192, 11008, 13824, 14336, 28672]
#: Every size in float16, and some of each kernel in other types and after SwiGLU: dtype, SwiGLU, n.
CASES = [
    *((torch.float16, False, n) for n in SIZES),
    *((torch.float16, True, n) for n in (512, 2048, 4096, 11008)),
    *((torch.bfloat16, False, n) for n in (448, 3072, 8192, 13824)),
    *((torch.float32, True, n) for n in (96, 4096)),
]
#: The same without a gate.
NORM_CASES = [
    *((torch.float16, n) for n in SIZES),
    *((torch.bfloat16, n) for n in (448, 2048, 4096, 5120, 11008)),
    *((torch.float32, n) for n in (96, 4096)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "swiglu", "n"), CASES)
@pytest.mark.parametrize("kind", FORMATS)
def test_the_transform_becomes_floats(kind: str, dtype: torch.dtype, swiglu: bool, n: int) -> None:
    """Float32 sums in another order move values by 1e-6 of a scale, and E2M1 comes after a rounding to float16.

    That moves codes within 2^-12 of a tie. With SwiGLU the exponential is the hardware's: a gated value may round to
    the neighbouring 16-bit number, one in thousands of a row, which moves all transformed values by less than a
    thousandth of their rounding.
    """
    for rows in (1, 17, 300):
        x = torch.randn(rows, 2 * n if swiglu else n, device="cuda").to(dtype)
        y = hadamard_transform((gated(x) if swiglu else x).float())
        arguments = (x, 0, False, swiglu, 0.9, kind, scale_of_all(kind, y))
        result = hadamard_quantize_float(*arguments)
        with references():
            expected = hadamard_quantize_float(*arguments)
        off, close = (2e-2, 1e-3) if swiglu else (2e-3, 2e-6)
        check_floats(kind, result, expected, codes_off=off, scales_off=off, close=close, near=close)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("heads", "head_dim"), [(32, 128), (40, 128), (64, 128), (32, 64), (4, 32)])
def test_mixed_heads_become_floats(heads: int, head_dim: int, kind: str) -> None:
    x = torch.randn(17, heads * head_dim, device="cuda").half()
    whole = torch.tensor([600.0], device="cuda") if kind == "NVFP4" else None
    result = hadamard_quantize_float(x, heads, False, False, 1.0, kind, whole)
    with references():
        expected = hadamard_quantize_float(x, heads, False, False, 1.0, kind, whole)
    check_floats(kind, result, expected, codes_off=2e-3, scales_off=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("n", [1024, 4096, 14336])
def test_floats_of_float16_arithmetic(n: int, kind: str) -> None:
    """Errors of 6e-4 of a typical value move one code in ten at most to a neighbour, and as many scales."""
    x = torch.randn(17, n, device="cuda").half()
    whole = scale_of_all(kind, hadamard_transform(x.float()))
    result = hadamard_quantize_float(x, 0, True, False, 1.0, kind, whole)
    with references():
        expected = hadamard_quantize_float(x.float(), 0, False, False, 1.0, kind, whole)
    check_floats(kind, result, expected, codes_off=1e-1, scales_off=5e-2, close=3e-3, near=3e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("magnitude", [0.0, 1e-6, 1e-3, 300.0])
@pytest.mark.parametrize("n", [96, 2048, 4096, 11008])
def test_rows_of_any_magnitude_become_floats(n: int, magnitude: float, kind: str) -> None:
    """Zeros, subnormal inputs, and a scale of the whole tensor that values exceed three times: codes saturate.

    Subnormal inputs are whole multiples of 2^-24, and so is 96^0.5 times their transform: 49 / 96^0.5 = 5.001, say, is
    a tie in float16. All codes of such a value move, one in a hundred at most.
    """
    x = (torch.randn(150, n, device="cuda") * magnitude).half()
    x[::7] = 0
    whole = scale_of_all(kind, hadamard_transform(x.float()))
    for factor in (1.0, 3.0):
        given = None if whole is None else whole * factor
        result = hadamard_quantize_float(x, 0, False, False, 1.0, kind, given)
        with references():
            expected = hadamard_quantize_float(x, 0, False, False, 1.0, kind, given)
        check_floats(kind, result, expected, codes_off=1e-2 if magnitude == 1e-6 else 2e-3, scales_off=2e-3)
        assert not steps(kind, result[0])[::7].any()


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("dtype", "n"), NORM_CASES)
def test_norm_and_transform_are_quantized(dtype: torch.dtype, n: int, weighted: bool) -> None:
    """A sum of squares in another order may move a normalized value to the neighbouring number of its type.

    A step of bfloat16 is 2^-7 of a value, and a few of them in a row move all transformed values by a thousandth of
    the rounding of 8 bits. One feature is a thousand times as large as others, as in models.
    """
    for rows in (1, 17, 300):
        x = torch.randn(rows, n, device="cuda")
        x[:, n // 3] *= 1000
        x, weight = x.to(dtype), torch.rand(n, device="cuda").to(dtype) if weighted else None
        for bits, packed in ((4, True), (8, False)):
            result = rms_norm_hadamard_quantize(x, weight, EPS, 0.9, bits, packed, None)
            with references():
                expected = rms_norm_hadamard_quantize(x, weight, EPS, 0.9, bits, packed, None)
            torch.testing.assert_close(result[1], expected[1], rtol=8e-3, atol=0)
            difference = (held(result[0]).int() - held(expected[0]).int()).abs()
            assert difference.max() <= 1
            assert difference.float().mean() <= 5e-2


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("dtype", "n"), NORM_CASES)
@pytest.mark.parametrize("kind", FORMATS)
def test_norm_and_transform_become_floats(kind: str, dtype: torch.dtype, n: int, weighted: bool) -> None:
    """As above."""
    for rows in (1, 17, 300):
        x = (torch.randn(rows, n, device="cuda") * 7).to(dtype)
        weight = torch.rand(n, device="cuda").to(dtype) if weighted else None
        whole = torch.tensor([500.0], device="cuda") if kind == "NVFP4" else None
        result = rms_norm_hadamard_quantize_float(x, weight, EPS, 1.0, kind, whole)
        with references():
            expected = rms_norm_hadamard_quantize_float(x, weight, EPS, 1.0, kind, whole)
        check_floats(kind, result, expected, codes_off=3e-2, scales_off=3e-2, close=8e-3, near=1e-3)


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("output", [*FORMATS, "INT8", "INT4"])
@pytest.mark.parametrize("n", [2048, 4096, 5120, 8192, 11008, 13824, 14336, 28672])
def test_many_rows_to_a_block_are_the_rows_that_few_are(n: int, output: str, norm: bool) -> None:
    """Blocks fill slots of their rings again many times, and no warp waits for one that waits for it."""
    rows, at_once = 12000, 100
    x = torch.randn(rows, n, device="cuda").half()
    weight = torch.rand(n, device="cuda").half()

    def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
        if output in ("INT8", "INT4"):
            rest = (0.9, int(output[3:]), output == "INT4", None)
            if norm:
                return rms_norm_hadamard_quantize(x, weight, EPS, *rest)
            return hadamard_quantize(x, 0, False, False, *rest)
        rest = (1.0, output, torch.tensor([500.0], device="cuda") if output == "NVFP4" else None)
        if norm:
            return rms_norm_hadamard_quantize_float(x, weight, EPS, *rest)
        return hadamard_quantize_float(x, 0, False, False, *rest)

    whole = quantized(x)
    for first in (0, 3000, rows - at_once):
        part = slice(first, first + at_once)
        for found, expected in zip(whole, quantized(x[part].clone()), strict=True):
            assert torch.equal(found[part].view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [2048, 4096, 13824])
def test_the_norm_is_of_each_row_alone(n: int) -> None:
    """Rows of very different sizes, taken in any order by blocks, have the codes that they have alone."""
    x = torch.randn(1037, n, device="cuda") * torch.exp(2 * torch.randn(1037, 1, device="cuda"))
    x = x.half()
    codes, scale = rms_norm_hadamard_quantize(x, None, EPS, 1.0, 8, False, None)
    for row in (0, 1, 131, 132, 700, 1036):
        alone = rms_norm_hadamard_quantize(x[row : row + 1].clone(), None, EPS, 1.0, 8, False, None)
        assert torch.equal(codes[row : row + 1], alone[0])
        assert torch.equal(scale[row : row + 1], alone[1])


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("n", [64, 2048, 4096, 8192, 11008, 13824, 14336, 28672])
def test_every_float_is_written_and_none_beyond(n: int, kind: str, norm: bool) -> None:
    """Codes and scales lie in the middle of poisoned buffers, over rows that no block divides, and come out alike."""
    rows, guard = 301, 4096
    x = torch.randn(rows, n, device="cuda").half()
    whole = torch.tensor([500.0], device="cuda") if kind == "NVFP4" else None
    room = RowFloats.empty(x, FloatRounding(1.0, kind, whole))
    written = []
    for poison in (0x5A, 0xA5):
        parts = []
        for part in (room.codes, room.scale):
            size = part.numel() * part.element_size()
            buffer = torch.full((2 * guard + size,), poison, device="cuda", dtype=torch.uint8)
            parts.append((buffer, buffer[guard : guard + size].view(part.dtype).view(part.shape)))
        out = RowFloats(parts[0][1], parts[1][1], room.rounding)
        launch_transform(x, out, heads=0, norm=RowNorm(None, EPS) if norm else None)
        for buffer, _ in parts:
            assert (buffer[:guard] == poison).all()
            assert (buffer[-guard:] == poison).all()
        written.append([buffer[guard:-guard] for buffer, _ in parts])
    for first, second in zip(*written, strict=True):
        assert torch.equal(first, second)


@pytest.mark.gpu
def test_weights_that_do_not_fit_are_refused() -> None:
    x = torch.randn(4, 4096, device="cuda").half()
    for weight, match in ((torch.ones(4096, device="cuda"), "gain is float32"), (x[0, :64].clone(), "gain has shape")):
        with pytest.raises(KernelError, match=match):
            rms_norm_hadamard_quantize(x, weight, EPS, 1.0, 4, True, None)
    with pytest.raises(KernelError, match="not contiguous"):
        hadamard_quantize_float(x[:, ::2], 0, False, False, 1.0, "FP8", None)


@pytest.mark.gpu
@pytest.mark.captures
def test_the_operators_are_captured_in_a_graph() -> None:
    x = torch.randn(17, 4096, device="cuda").half()
    expected = rms_norm_hadamard_quantize_float(x, None, EPS, 1.0, "MXFP4", None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codes, scale = rms_norm_hadamard_quantize_float(x, None, EPS, 1.0, "MXFP4", None)
    codes.zero_()
    graph.replay()
    assert torch.equal(codes, expected[0])
    assert torch.equal(scale, expected[1])
