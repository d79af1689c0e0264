"""Launches overlap only where asked for and possible, and change no result."""

import re

import pytest
import torch

from rotquant.kernels.launch.loading import SOURCES
from rotquant.kernels.launch.operators import references
from rotquant.kernels.launch.overlap import overlapping_launches, overlaps
from rotquant.kernels.layouts.weights import pack_rows
from rotquant.kernels.products.linear import PackedWeight, quantized_linear


@pytest.mark.parametrize(
    ("capability", "possible"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)]
)
def test_launches_overlap_where_asked_for_and_possible(
    capability: tuple[int, int], possible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert not overlaps(device)
    with overlapping_launches():
        assert overlaps(device) == possible
    assert not overlaps(device)


#: Files of kernels that `launch_waiting` starts, but for these, which `launch` does; products wait further below.
WAITING = ("activations*", "elementwise", "hadamard_*", "kv_append", "kv_attention")
ORDINARY = {"kv_rotate", "kv_dequantize"}
#: A kernel's name and the first statement of its body.
_KERNEL = re.compile(r"__global__[^{]*?(\w+)\((?:[^()]|\([^()]*\))*\)\s*\{\s*([^\n]*)")


def test_kernels_that_may_start_early_wait_first() -> None:
    """A kernel that reads or writes before it waits meets what its predecessor has not written yet."""
    waiting, found = "ptx::follow_previous_launch();", set[str]()
    for file in (file for pattern in WAITING for file in SOURCES.glob(f"{pattern}.cu")):
        for name, first in _KERNEL.findall(file.read_text()):
            found.add(name)
            assert (first == waiting) == (name not in ORDINARY), (file.name, name, first)
    assert {"quantize_rows_16", "rope_append", "hadamard_across", "kv_append", "kv_attention"} <= found
    assert len(found) == 13


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.captures
def test_a_graph_of_overlapping_products_gives_the_same_results(rows: int) -> None:
    size, layers = 4096, 6
    weights = [
        PackedWeight.pack(torch.randint(-8, 8, (size, size), dtype=torch.int8), torch.rand(size) / 400)
        for _ in range(layers)
    ]
    weights = [PackedWeight(w.codes.cuda(), w.scale.cuda(), w.shape) for w in weights]
    first = torch.zeros(rows, size, dtype=torch.int8, device="cuda")
    one = torch.ones(1, device="cuda")

    def run() -> torch.Tensor:
        codes = first  # every product reads what the launch just before it wrote
        for weight in weights:
            y = quantized_linear(pack_rows(codes), one, weight, dtype=torch.float32)
            codes = y.round().clamp(-8, 7).to(torch.int8)
        return y

    run()
    graph = torch.cuda.CUDAGraph()
    with overlapping_launches(), torch.cuda.graph(graph):
        y = run()
    for _ in range(20):
        first.random_(-8, 8)
        graph.replay()
        with references():
            assert torch.equal(y, run())
