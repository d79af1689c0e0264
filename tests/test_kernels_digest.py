"""The digest beside a measured time covers the CUDA and C++ sources that its benchmark can reach, and no others."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rotquant.bench.registry import BENCHMARKS
from rotquant.study import digests as provenance
from rotquant.study.digests import kernel_sources

MODULE = "rotquant.bench.gpu.transforms"


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The digest of a benchmark after a comment was added to one of the CUDA sources."""
    shutil.copytree(provenance.KERNELS, tmp_path / "kernels")
    monkeypatch.setattr(provenance, "KERNELS", tmp_path / "kernels")

    def edit(name: str) -> str:
        with (tmp_path / "kernels" / name).open("a") as file:
            file.write("// edited\n")
        return provenance.kernels_digest.__wrapped__(MODULE)

    return edit


def test_sources_are_those_that_modules_name_and_what_these_include() -> None:
    sources = kernel_sources(MODULE)
    assert {"activations_16.cu", "hadamard_strips.cu", "include/rows.cuh", "include/quantize.cuh"} <= set(sources)
    assert not {"gemv.cu", "include/gemv_ring.cuh"} & set(sources)


def test_an_edit_changes_the_digest_of_what_it_reaches(edited: Callable[[str], str]) -> None:
    before = provenance.kernels_digest(MODULE)
    assert edited("gemv.cu") == edited("include/gemv_ring.cuh") == before
    assert edited("hadamard_strips.cu") != before
    after = edited("gemv.cu")
    assert edited("include/quantize.cuh") != after


def test_every_source_and_header_belongs_to_a_benchmark() -> None:
    reached = {source for benchmark in BENCHMARKS.values() for source in kernel_sources(benchmark.module)}
    paths = [path for pattern in ("*.cu", "include/*.cuh", "cpu/*") for path in provenance.KERNELS.glob(pattern)]
    assert reached == {str(path.relative_to(provenance.KERNELS)) for path in paths}
