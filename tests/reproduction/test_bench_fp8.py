"""The benchmark of the float8 network on the CPU, at a tiny shape: what it runs and returns, never how fast."""

from collections.abc import Callable

import pytest
import torch

from reproduction.benchmarks import fp8
from reproduction.benchmarks.arguments import Fp8NetworkArguments
from reproduction.benchmarks.fp8 import random_fp8_decoder
from reproduction.benchmarks.records import Measurement
from reproduction.benchmarks.shapes import SHAPES, decoder_config
from tests.helpers.models import TINY_SHAPE

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny shape on the CPU; a call takes a second, a captured one a millisecond."""

    def time_gpu(call: Callable[[int], object], *, settle: float) -> Measurement:
        call(0)
        return Measurement(1e-3, "s", 1e-3, 1e-3, 5, 1)

    def elapsed(run: Callable[[], torch.Tensor]) -> float:
        assert run().isfinite().all()
        return 1.0

    monkeypatch.setitem(SHAPES, "tiny", TINY_SHAPE)
    monkeypatch.setattr(fp8, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(fp8, "time_gpu", time_gpu)
    monkeypatch.setattr(fp8, "elapsed", elapsed)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)


@pytest.mark.parametrize("hadamard", [False, True])
def test_both_times_of_a_network_are_measured(hadamard: bool) -> None:
    arguments = Fp8NetworkArguments(shape="tiny", batch=4, tokens=6, together=2, hadamard=hadamard)
    measured = fp8.fp8_network(arguments)
    assert measured["first_token_seconds"].value == 1.0
    assert measured["first_token_seconds"].replays == 8
    assert measured["token_seconds"].value == 1e-3
    assert measured["peak_bytes"].value == 7


def test_texts_pass_the_network_in_parts_with_the_same_result() -> None:
    decoder = random_fp8_decoder(decoder_config("tiny"), rotate=True, dtype="float64", device="cpu")
    prompt = torch.randint(decoder.config.vocabulary, (5, 6))
    whole, parts = decoder.new_cache(5, 6), decoder.new_cache(5, 6)
    expected = decoder.prefill(prompt, whole)
    logits = fp8._prefill(decoder, parts, prompt, together=2)()
    torch.testing.assert_close(logits, expected)
    assert parts.length == whole.length == 6
    assert torch.equal(parts.lengths, whole.lengths)
    for one, other in zip(parts.layers, whole.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys)
        torch.testing.assert_close(one.values, other.values)


def test_a_prefill_that_takes_long_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "elapsed", lambda run: 20.0)
    measured = fp8._repeated(lambda: torch.zeros(1))
    assert (measured.value, measured.low, measured.high, measured.replays) == (20.0, 20.0, 20.0, 1)
