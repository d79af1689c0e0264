"""Every kernel compiles to machine code for every supported architecture, on a machine without a GPU."""

from itertools import chain
from pathlib import Path

import pytest

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import CudaFile
from rotquant.kernels.launch import loading
from rotquant.kernels.launch.loading import ARCHITECTURES, TranslationUnit, compile_source
from tests.library.kernels import owners


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("family", owners())
def test_every_kernel_compiles(family: str, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All instances and static assertions, the compiler told to hurry: a quarter of the time of launches' units."""
    monkeypatch.setattr(loading, "_OPTIONS", (*loading._OPTIONS, "--Ofast-compile=max"))
    sources = owners()[family].sources(architecture)
    assert sources
    for source in of_files(sources):
        compiled = compile_source(source, architecture)
        assert compiled.cubin.read_bytes()[:4] == b"\x7fELF"
        assert set(compiled.symbols) == set(source.instances)


@pytest.mark.parametrize("family", owners())
def test_a_unit_compiles_as_launches_ask_for_it(family: str) -> None:
    source = owners()[family].sources("sm_90a")[0]
    compiled = compile_source(source, "sm_90a")
    assert compiled.cubin.read_bytes()[:4] == b"\x7fELF"
    assert set(compiled.symbols) == set(source.instances)


def of_files(sources: list[TranslationUnit]) -> list[TranslationUnit]:
    """One unit for each file, with the instances and constants of all of its units; one without instances stays."""
    units: dict[CudaFile, list[TranslationUnit]] = {}
    for source in sources:
        units.setdefault(source.file, []).append(source)
    return [
        TranslationUnit(
            file,
            tuple(dict.fromkeys(chain.from_iterable(source.instances for source in own))),
            tuple(dict.fromkeys(chain.from_iterable(source.constants for source in own))),
        )
        for file, own in units.items()
    ]


def test_a_compiler_error_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "bad.cu").write_text("__global__ void kernel() { nonsense; }")
    monkeypatch.setattr(loading, "SOURCES", tmp_path)
    with pytest.raises(KernelError, match="nonsense"):
        compile_source(TranslationUnit(CudaFile("bad.cu")), "sm_80", tmp_path)


def test_an_edited_header_compiles_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tmp_path / "include" / "role" / "value.cuh"
    header.parent.mkdir(parents=True)
    (tmp_path / "k.cu").write_text('#include "role/value.cuh"\nextern "C" __global__ void k(int *x) { *x = VALUE; }')
    monkeypatch.setattr(loading, "SOURCES", tmp_path)
    cubins = []
    for value in (1, 2):
        header.write_text(f"#define VALUE {value}")
        cubins.append(compile_source(TranslationUnit(CudaFile("k.cu")), "sm_80", tmp_path / "cache").cubin)
    assert cubins[0] != cubins[1]
