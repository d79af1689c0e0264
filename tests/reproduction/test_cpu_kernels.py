"""W4A8 products, transforms and attention of one token on a CPU: what the compiled code computes is what torch says.

Integers agree bit for bit, with every set of instructions that this processor has; what is summed in floating point
agrees up to the order of the sums.
"""

import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reproduction.benchmarks.cpu_kernels import compiling, layout, operators, reference
from reproduction.benchmarks.cpu_kernels.layout import DotWeight, unpack
from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import PRELUDE
from rotquant.kernels.launch.operators import references
from rotquant.tensors.hadamard import HadamardSizeError, hadamard_transform

compiled = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler, and this machine has none"
)

#: (tokens, in, out): Llama-2's and Llama-3's inputs, and sizes that fill neither a block of 128 nor a strip of 4 rows.
SHAPES = ((1, 4096, 12), (2, 11008, 33), (1, 13824, 7), (1, 14336, 4), (3, 200, 5), (1, 129, 4), (2, 1, 1), (1, 5, 9))

#: Instructions of x86 processors by what Linux calls them: flags that ask for no more.
_X86 = {"avx2": ("-mavx2",), "avx_vnni": ("-mavx2", "-mavxvnni"), "avx512_vnni": ("-mavx512bw", "-mavx512vnni")}


def targets() -> dict[str, tuple[str, ...]]:
    """Flags for every path of decoding.cpp that this processor can run."""
    found = {"any processor": (), "this processor": compiling.NATIVE}
    if platform.machine() == "x86_64" and Path("/proc/cpuinfo").exists():
        known = set(Path("/proc/cpuinfo").read_text().split())
        found |= {name: flags for name, flags in _X86.items() if name in known}
    return found


def random_weight(out_features: int, in_features: int, generator: torch.Generator) -> tuple[Tensor, DotWeight]:
    """Codes -8 to 7 with both ends among them, and packed."""
    codes = torch.randint(-8, 8, (out_features, in_features), dtype=torch.int8, generator=generator)
    codes[0, :2] = torch.tensor([-8, 7], dtype=torch.int8)[: codes.shape[1]]
    return codes, DotWeight.pack(codes, torch.rand(out_features, 1, generator=generator) + 0.1)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(6)


@pytest.mark.parametrize(("tokens", "in_features", "out_features"), SHAPES)
def test_packing_loses_nothing(tokens: int, in_features: int, out_features: int, generator: torch.Generator) -> None:
    codes, weight = random_weight(out_features, in_features, generator)
    assert torch.equal(unpack(weight.codes, weight.shape), codes)
    assert torch.equal(weight.sums.long(), codes.long().sum(1))


@compiled
@pytest.mark.parametrize("target", targets().values(), ids=targets().keys())
@pytest.mark.parametrize(("tokens", "in_features", "out_features"), SHAPES)
def test_sums_of_products_are_exact_with_every_instruction(
    target: tuple[str, ...], tokens: int, in_features: int, out_features: int, generator: torch.Generator
) -> None:
    codes, weight = random_weight(out_features, in_features, generator)
    x = torch.randint(0, 256, (tokens, in_features), dtype=torch.uint8, generator=generator)
    zero_point = torch.randint(0, 256, (tokens,), dtype=torch.int32, generator=generator)
    y = torch.empty(tokens, out_features, dtype=torch.int32)
    pointers = (weight.codes.data_ptr(), weight.sums.data_ptr(), out_features, y.data_ptr())
    compiling.functions(target).product(x.data_ptr(), zero_point.data_ptr(), *x.shape, *pointers)
    assert torch.equal(y.long(), (x.long() - zero_point.long()[:, None]) @ codes.long().T)


@compiled
def test_the_largest_sums_do_not_overflow() -> None:
    """28672 products of -8 with 255: the down projection of a 70B model at its worst."""
    weight = DotWeight.pack(torch.full((4, 28672), -8, dtype=torch.int8), torch.ones(4))
    x, zero_point = torch.full((1, 28672), 255, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    assert operators.product(x, zero_point, weight.codes, weight.sums).eq(-8 * 255 * 28672).all()


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "in_features", "out_features"), SHAPES)
def test_a_layer_is_its_reference_bit_for_bit(
    dtype: torch.dtype, tokens: int, in_features: int, out_features: int, generator: torch.Generator
) -> None:
    _, weight = random_weight(out_features, in_features, generator)
    x = (3 * torch.randn(tokens, in_features, generator=generator) + 1).to(dtype)
    for ours, expected in zip(operators.quantize(x), reference.quantize(x), strict=True):
        assert torch.equal(ours, expected)
    assert torch.equal(
        operators.linear(x, weight), reference.linear(x, weight.codes, weight.scale, weight.sums)
    )  # sums are integers, and the two factors come in one order


@compiled
@pytest.mark.parametrize("value", [0.0, 2.5, -2.5])
def test_constant_rows_are_quantized_as_by_the_library(value: float) -> None:
    x = torch.full((1, 130), value)
    for ours, expected in zip(operators.quantize(x), reference.quantize(x), strict=True):
        assert torch.equal(ours, expected)


@compiled
@pytest.mark.parametrize("n", [1, 2, 8, 12, 40, 64, 128, 28 * 4, 28 * 512, 172 * 64, 108 * 128])
def test_the_transform_is_the_library_s(n: int, generator: torch.Generator) -> None:
    x = torch.randn(3, n, generator=generator)
    # A sum of n terms of both signs in another order: a few units in the last place of values of order one.
    torch.testing.assert_close(operators.hadamard(x), hadamard_transform(x), rtol=0, atol=1e-5)
    rounded = operators.hadamard(x.bfloat16())
    torch.testing.assert_close(rounded.float(), hadamard_transform(x.bfloat16().float()), rtol=2**-8, atol=1e-5)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [2, 6, 8, 14])
def test_attention_is_softmax_attention_to_the_tokens_so_far(
    dtype: torch.dtype, heads: int, generator: torch.Generator
) -> None:
    queries = torch.randn(heads, 32, generator=generator).to(dtype)
    keys, values = torch.randn(2, 2, 300, 32, generator=generator).to(dtype)
    expected = reference.attention(queries, keys, values, 290)
    # Both sum in float32 and round once.
    torch.testing.assert_close(operators.attention(queries, keys, values, 290), expected, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(
        operators.attention(queries, keys, values, 1), values[:, 0].repeat_interleave(heads // 2, 0)
    )
    # One key that outweighs all others by far: their weights are nothing, and no overflow.
    keys[:, 7] = 1e4 * queries[0]
    torch.testing.assert_close(operators.attention(queries, keys, values, 290)[0], values[0, 7])


@compiled
@pytest.mark.parametrize("target", targets().values(), ids=targets().keys())
@pytest.mark.parametrize(("tokens", "in_features", "out_features"), SHAPES)
def test_products_of_16_bit_weights(
    target: tuple[str, ...], tokens: int, in_features: int, out_features: int, generator: torch.Generator
) -> None:
    x = torch.randn(tokens, in_features, generator=generator).bfloat16()
    weight = torch.randn(out_features, in_features, generator=generator).bfloat16()
    # Both sum in float32 and round once; sums of n products of deviation one are of order sqrt(n).
    y = torch.empty(tokens, out_features, dtype=torch.bfloat16)
    compiling.functions(target).linear16(x.data_ptr(), *x.shape, weight.data_ptr(), out_features, y.data_ptr())
    error = (y.float() - x.float() @ weight.float().T).abs().max()
    assert error <= 2**-8 * 5 * in_features**0.5


@compiled
@pytest.mark.unflipped  # torch.library.opcheck has dispatch modes of its own
def test_operators_have_shape_rules_and_references(generator: torch.Generator) -> None:
    _, weight = random_weight(9, 130, generator)
    x = torch.randn(2, 130, generator=generator)
    codes, _, zero_point = operators.quantize(x)
    calls: list[tuple[Callable, tuple]] = [
        (torch.ops.rotquant.w4a8_quantize, (x,)),
        (torch.ops.rotquant.w4a8_product, (codes, zero_point, weight.codes, weight.sums)),
        (torch.ops.rotquant.w4a8_linear, (x, weight.codes, weight.scale, weight.sums)),
        (torch.ops.rotquant.cpu_hadamard, (x[:, :128].contiguous(),)),
        (torch.ops.rotquant.cpu_linear16, (x.bfloat16(), x.bfloat16())),
        (torch.ops.rotquant.cpu_attention, (x[:, :32].contiguous(), *torch.randn(2, 2, 4, 32), 3)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))
        with references():
            expected = operator(*arguments)
        torch.testing.assert_close(operator(*arguments), expected, rtol=2**-8, atol=1e-5)


@compiled
def test_what_a_function_cannot_read_is_refused_in_a_sentence(generator: torch.Generator) -> None:
    _, weight = random_weight(8, 128, generator)
    with pytest.raises(KernelError, match="x is float64, and the kernel takes bfloat16 or float32"):
        operators.linear(torch.zeros(1, 128, dtype=torch.float64), weight)
    with pytest.raises(KernelError, match=r"weight has shape .* needs \(2, 2, 4, 64\)"):
        operators.linear(torch.zeros(1, 200), weight)
    with pytest.raises(KernelError, match="contiguous"):
        operators.quantize(torch.zeros(128, 2).T)
    with pytest.raises(KernelError, match="cannot attend to 9 tokens"):
        operators.attention(torch.zeros(4, 16), *torch.zeros(2, 2, 8, 16), 9)
    with pytest.raises(KernelError, match="multiple of 1024 bytes, not 100"):
        operators.read(torch.zeros(100, dtype=torch.uint8))
    with pytest.raises(HadamardSizeError):
        operators.hadamard(torch.zeros(1, 7))


CPP_TYPES = {
    ctypes.c_int: "int",
    ctypes.c_int64: "int64_t",
    ctypes.c_uint64: "uint64_t",
    ctypes.c_void_p: "void*",
    ctypes.c_char_p: "void*",
    None: "void",
}


@compiled
@pytest.mark.parametrize(
    ("wrong", "strip"),
    [(None, layout.STRIP), (None, 2 * layout.STRIP), ("linear", layout.STRIP), ("read", layout.STRIP)],
)
def test_functions_take_what_python_passes(wrong: str | None, strip: int, tmp_path: Path) -> None:
    """Their parameters, and the sizes by which weights are laid out; one of another type or value does not compile."""
    sizes = {"kStrip": strip, "kBlock": layout.BLOCK, "kLanes": operators._LANES}
    lines = [f"static_assert({name} == {value});" for name, value in sizes.items()]
    for name, (result, arguments) in compiling._SIGNATURES.items():
        passed = ", ".join(CPP_TYPES[kind] for kind in (*arguments, *[ctypes.c_int] * (name == wrong)))
        taken = f"host::Parameters<decltype(&rotquant_{name})>"
        lines.append(f"static_assert(host::same<{taken}, {CPP_TYPES[result]}({passed})>);")
    check = tmp_path / "check.cpp"
    check.write_text("\n".join([f'#include "{compiling.SOURCE}"', PRELUDE, *lines]))
    done = subprocess.run(
        [compiling._compiler(), "-std=c++17", "-fsyntax-only", check], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == (wrong is None and strip == layout.STRIP), done.stderr


@compiled
def test_code_is_compiled_once_and_lies_whole_under_a_digest_of_what_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    path = compiling.compile_source(folder=cache)
    assert [path] == list(cache.iterdir())
    written = path.stat().st_mtime_ns
    assert compiling.compile_source(folder=cache) == path
    assert path.stat().st_mtime_ns == written
    sources = shutil.copytree(compiling.SOURCE.parent, tmp_path / "cpu")
    monkeypatch.setattr(compiling, "SOURCE", sources / "decoding.cpp")
    assert compiling.compile_source(folder=cache) == path
    with (sources / "dot.h").open("a") as header:
        header.write("// another\n")
    assert compiling.compile_source(folder=cache) != path


def test_without_a_compiler_there_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    with pytest.raises(KernelError, match=r"need a C\+\+ compiler, and there is no c\+\+, g\+\+ or clang\+\+"):
        compiling.compile_source(folder=tmp_path)
    monkeypatch.setenv("CXX", "my-compiler")
    with pytest.raises(KernelError, match="there is no my-compiler on this machine"):
        compiling.compile_source(folder=tmp_path)


@compiled
def test_what_does_not_compile_is_reported_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("int f() { return nothing; }")
    monkeypatch.setattr(compiling, "SOURCE", broken)
    with pytest.raises(KernelError, match=r"(?s)does not compile broken\.cpp:\n.*nothing"):
        compiling.compile_source(folder=tmp_path)
    assert list(tmp_path.iterdir()) == [broken]
