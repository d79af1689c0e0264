"""What launches pass is what kernels take: declarations are held against the compiler, and a wrong one is refused."""

import dataclasses
import functools
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import FLOAT, INT, LONG, POINTER, CudaFile, Parameters, Structure
from rotquant.kernels.launch import loading
from rotquant.kernels.launch.loading import ARCHITECTURES, SOURCES, TranslationUnit, compile_source
from tests.library.kernels import owners

CPP = """
struct Inner { float* values; int count; };
struct Block { const void* x; Inner inner; long long elements; int rows; float norm; int last; };
constexpr int kTile = 16;
template <class T> __global__ void scale(const T* x, Block block, int n) {}
extern "C" __global__ void plain(const __grid_constant__ Block block) {}
"""
INNER = Structure("Inner", values=POINTER, count=INT)
FIELDS = {"x": POINTER, "inner": INNER, "elements": LONG, "rows": INT, "norm": FLOAT, "last": INT}
BLOCK = Structure("Block", **FIELDS)
SCALE = {"x": POINTER, "block": BLOCK, "n": INT}


@pytest.fixture
def compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> functools.partial:
    """Compile CPP with other declarations than the right ones."""
    (tmp_path / "k.cu").write_text(CPP)
    monkeypatch.setattr(loading, "SOURCES", tmp_path)

    def compile_with(scale: dict | None = None, block: Structure = BLOCK, **constants: int) -> None:
        kernels = {"scale": Parameters(**{**(scale or SCALE), "block": block}), "plain": Parameters(block=block)}
        file = CudaFile("k.cu", kernels, constants)
        for instances in ((), ("scale<float>",)):
            used = file if instances else dataclasses.replace(file, kernels={"plain": kernels["plain"]})
            compile_source(TranslationUnit(used, instances), "sm_80", tmp_path / "cache")

    return compile_with


def test_what_is_declared_right_compiles(compiles: functools.partial) -> None:
    compiles(kTile=16)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (FIELDS | {"norm": INT}, "Block::norm is int"),
        (FIELDS | {"rows": POINTER}, "Block::rows is void"),
        ({name: FIELDS[name] for name in list(FIELDS)[:-1]}, "host_fields|bind"),  # the last one fits in the padding
        ({"elements": LONG} | FIELDS, "x at byte 8"),
        (FIELDS | {"one_more": INT}, "one_more"),
        (FIELDS | {"inner": Structure("Inner", values=POINTER, count=LONG)}, "Inner::count is long long"),
    ],
)
def test_a_wrong_structure_does_not_compile(fields: dict, complaint: str, compiles: functools.partial) -> None:
    with pytest.raises(KernelError, match=complaint):
        compiles(block=Structure("Block", **fields))


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": POINTER, "block": BLOCK},
        {**SCALE, "one_more": INT},
        {**SCALE, "n": LONG},
        {**SCALE, "n": FLOAT},
        {**SCALE, "x": LONG},
    ],
)
def test_wrong_parameters_do_not_compile(wrong: dict, compiles: functools.partial) -> None:
    with pytest.raises(KernelError, match=r"a launch passes .* to scale<float>"):
        compiles(scale=wrong)


def test_a_constant_of_another_value_does_not_compile(compiles: functools.partial) -> None:
    with pytest.raises(KernelError, match="the host counts on kTile being 32"):
        compiles(kTile=32)


def test_a_structure_without_its_padding_does_not_compile(tmp_path: Path) -> None:
    """The case of `lut`: numpy's structures end with their last field unless they are told to align."""
    from rotquant.kernels.products import lut

    packed = Structure("Problem", **lut._PROBLEM.fields)
    packed.dtype = np.dtype([(name, kind.dtype) for name, kind in packed.fields.items()])
    assert (packed.dtype.itemsize, lut._PROBLEM.dtype.itemsize) == (76, 80)
    file = dataclasses.replace(lut._FILE, kernels={"lut_gemv": Parameters(problem=packed)})
    source = dataclasses.replace(lut.sources("sm_80")[0], file=file)
    with pytest.raises(KernelError, match="the host's Problem has 76 bytes"):
        compile_source(source, "sm_80", tmp_path)


@functools.cache
def declared() -> dict[str, CudaFile]:
    """What the launchers declare, by file."""
    sources = [source for module in owners().values() for name in ARCHITECTURES for source in module.sources(name)]
    return {source.file.name: source.file for source in sources}


def test_every_kernel_is_declared() -> None:
    for path in SOURCES.glob("*.cu"):
        text = re.sub(r"__(launch_bounds|cluster_dims)__\((?:[^()]|\([^()]*\))*\)", "", path.read_text())
        kernels = set(re.findall(r"__global__\s+void\s+(\w+)\(", text))
        assert len(kernels) == text.count("__global__")
        assert kernels == set(declared()[path.name].kernels)


def test_an_undeclared_kernel_is_refused() -> None:
    with pytest.raises(KernelError, match=r"other of kernels/gemv\.cu takes is not declared"):
        compile_source(TranslationUnit(declared()["gemv.cu"], ("other<1>",)), "sm_80")


def test_nothing_is_laid_out_or_launched_elsewhere() -> None:
    """One door: structures are made in `arguments`, kernels loaded in `loading` and launched in two places."""
    doors = {
        r"align=True|np\.dtype\(\[": {"arguments.py"},
        r"RawModule|RawKernel|ElementwiseKernel": {"loading.py"},
        r"kernel\.function\b|cuLaunchKernel": {"operators.py", "overlap.py", "launch.py"},
    }
    modules = [*Path(loading.__file__).parents[2].rglob("*.py")]
    for pattern, names in doors.items():
        found = {path.name for path in modules if re.search(pattern, path.read_text())}
        assert found == names


def test_values_are_packed_as_declared() -> None:
    x = torch.zeros(4)
    block = BLOCK.of(x=x, inner={"values": None, "count": True}, elements=2**40, rows=-3, norm=0.5, last=7)
    assert block.tobytes()[:36] == np.array([x.data_ptr(), 0, 1, 2**40], "u8").tobytes() + np.int32(-3).tobytes()
    packed = Parameters(**SCALE).pack((x, block, 5))
    assert [value.nbytes for value in packed] == [8, BLOCK.dtype.itemsize, 4]
    assert packed[0] == x.data_ptr()


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"n": 2**31}, KernelError),
        ({"n": 0.5}, TypeError),
        ({"block": INNER.of(values=None, count=0)}, TypeError),
        ({"more": 0}, ValueError),
    ],
)
def test_what_does_not_fit_its_parameter_is_refused(values: dict, error: type[Exception]) -> None:
    block = BLOCK.of(x=None, inner={"values": None, "count": 0}, elements=0, rows=0, norm=0, last=0)
    with pytest.raises(error):
        Parameters(**SCALE).pack(tuple(({"x": None, "block": block, "n": 1} | values).values()))


@pytest.mark.parametrize("fields", [{"count": 1}, {"values": None, "count": 1, "more": 2}])
def test_a_structure_takes_all_of_its_fields_and_no_others(fields: dict) -> None:
    with pytest.raises(TypeError, match="Inner has the fields values, count"):
        INNER.of(**fields)


def test_a_number_too_large_for_its_field_is_refused() -> None:
    with pytest.raises(KernelError, match="too large for Inner"):
        INNER.of(values=None, count=2**31)
