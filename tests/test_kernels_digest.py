"""The digest beside a measured time covers the CUDA and C++ sources that its benchmark can reach, and no others."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rotquant.bench.registry import BENCHMARKS
from rotquant.study.digests import SOURCES
from rotquant.study.sources import Sources

ENTRY = BENCHMARKS["transform"].entry


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., str]:
    """The digest of a benchmark after something was added to one of the CUDA sources, a statement or a comment."""
    shutil.copytree(SOURCES.kernels, tmp_path / "kernels")
    (tmp_path / "rotquant").symlink_to(SOURCES.package)

    def edit(name: str, text: str = "constexpr int kEdited = 1;") -> str:
        with (tmp_path / "kernels" / name).open("a") as file:
            file.write(f"{text}\n")
        return Sources(tmp_path / "rotquant", SOURCES.aside).digest(ENTRY)

    return edit


def named(*entries: str) -> set[str]:
    """The sources that entries reach, by their paths under kernels/."""
    return {str(path.relative_to(SOURCES.kernels)) for path in SOURCES.kernel_sources(SOURCES.reached(*entries))}


def test_sources_are_those_that_definitions_name_and_what_these_include() -> None:
    assert {"activations_16.cu", "hadamard_strips.cu", "include/rows.cuh", "include/quantize.cuh"} <= named(
        BENCHMARKS["quantize"].entry
    )
    assert not {"gemv.cu", "include/gemv_ring.cuh", "activations_16.cu"} & named(ENTRY)


def test_an_edit_changes_the_digest_of_what_it_reaches(edited: Callable[..., str]) -> None:
    before = SOURCES.digest(ENTRY)
    assert edited("gemv.cu") == edited("include/gemv_ring.cuh") == before
    assert edited("hadamard_strips.cu", "// a comment, and /* another */") == before
    assert edited("hadamard_strips.cu") != before
    after = edited("gemv.cu")
    assert edited("include/quantize.cuh") != after


def test_every_source_and_header_belongs_to_a_benchmark() -> None:
    reached = named(*(benchmark.entry for benchmark in BENCHMARKS.values()))
    paths = [path for pattern in ("*.cu", "include/*.cuh", "cpu/*") for path in SOURCES.kernels.glob(pattern)]
    assert reached == {str(path.relative_to(SOURCES.kernels)) for path in paths}
