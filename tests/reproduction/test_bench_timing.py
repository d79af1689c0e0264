"""Timing on a GPU: every input set takes part, and replays repeat the work. How long anything takes is not asserted."""

import pytest
import torch

from reproduction.benchmarks.layers import copy_case, fp8_linear, int8_linear
from reproduction.benchmarks.timing import gpu, measure, power, rotations, time_gpu, time_single
from rotquant.foundation.errors import KernelError


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_timing_without_a_gpu_says_so() -> None:
    with pytest.raises(KernelError, match="timing needs an NVIDIA GPU"):
        time_gpu(lambda index: None)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False])
def test_every_set_is_used_equally_often(graph: bool) -> None:
    counts = torch.zeros(5, device=gpu())
    timing = time_gpu(lambda index: counts[index].add_(1), 5, replays=3, graph=graph)
    assert timing.low <= timing.value <= timing.high
    assert timing.calls_per_replay % 5 == 0
    replayed = counts.tolist()
    assert len(set(replayed)) == 1
    assert replayed[0] >= 3 * timing.calls_per_replay / 5


@pytest.mark.gpu
@pytest.mark.parametrize("dirty", [False, True])
def test_a_single_call_is_launched_as_a_graph(dirty: bool) -> None:
    """A host that takes long over a call would be timed with it: it calls to warm up and to capture, no more."""
    calls, x = [], torch.zeros(8, device=gpu())

    def call() -> None:
        calls.append(x.add_(1))

    timing = time_single(call, dirty=dirty)
    assert len(calls) == 4
    assert x[0].item() == 3 + timing.replays


@pytest.mark.gpu
def test_energy_is_of_replayed_calls() -> None:
    pytest.importorskip("pynvml")
    called, x = [], torch.zeros(2, 8, device=gpu())
    found = power(lambda index: called.append(x[index].add_(1)), 2, 1e-4)
    assert len(called) == 30  # those of one graph
    assert x[0, 0].item() == x[1, 0].item()
    assert found["joules"].value >= 0
    assert found["clock"].value > 0


@pytest.mark.gpu
def test_sets_together_exceed_the_cache() -> None:
    l2 = torch.cuda.get_device_properties(gpu()).L2_cache_size
    for size in (l2 // 50, l2 // 3, l2, 10 * l2):
        assert rotations(size, gpu()) * size > 2 * l2


@pytest.mark.gpu
def test_a_copy_counts_what_it_reads_and_writes() -> None:
    x = torch.randn(1000, 64, device=gpu(), dtype=torch.float16)
    assert measure(copy_case(x), replays=3)["bytes"].value == 2 * x.nbytes


@pytest.mark.gpu
def test_the_8_bit_baselines_compute_the_scaled_product() -> None:
    # Exact in both formats: small integers, sums below 2048 and scales that are powers of two; the result is rounded
    # to 16 bits (bfloat16 has 8 significant bits: one part in 256).
    x, weight = (torch.randint(-2, 3, (rows, 128), device=gpu()).float() for rows in (32, 48))
    row, column = (2.0 ** torch.randint(-3, 4, (n,), device=gpu()) for n in (32, 48))
    expected = (x @ weight.T) * row[:, None] * column
    fp8 = fp8_linear(x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn), row[:, None], column[None])
    int8 = int8_linear(x.to(torch.int8), weight.to(torch.int8), row[:, None], column)
    torch.testing.assert_close(fp8.float(), expected, rtol=2**-8, atol=0)
    torch.testing.assert_close(int8.float(), expected, rtol=2**-11, atol=0)
