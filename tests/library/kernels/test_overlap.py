"""Launches overlap only where asked for and possible, and change no result."""

import pytest
import torch

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
