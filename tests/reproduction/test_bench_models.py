"""Benchmarks of blocks and decoders on the CPU, at a tiny shape: what they run and what they return, never how fast."""

from collections.abc import Callable

import pytest
import torch

from reproduction.benchmarks import models
from reproduction.benchmarks.arguments import (
    BlockArguments,
    FirstTokenArguments,
    GenerateArguments,
    WholeDecoderArguments,
)
from reproduction.benchmarks.records import Measurement
from reproduction.benchmarks.shapes import SHAPES, decoder_config
from rotquant.foundation.errors import ConfigError
from tests.helpers.models import TINY_SHAPE

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny shape on the CPU; timing runs each call twice, as replays would."""

    def time_gpu(call: Callable[[int], object], sets: int = 1, *, replays: int = 1, settle: float = 0.0) -> Measurement:
        assert call(0).isfinite().all()
        assert call(0).isfinite().all()
        return Measurement(1e-3, "s", 1e-3, 1e-3, replays, sets)

    def elapsed(run: Callable[[], object]) -> float:
        run()
        return 1.0

    monkeypatch.setitem(SHAPES, "tiny", TINY_SHAPE)
    monkeypatch.setattr(models, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(models, "time_gpu", time_gpu)
    monkeypatch.setattr(models, "elapsed", elapsed)
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)


@pytest.mark.parametrize("implementation", ["fp16", "int4"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_block_runs_in_both_phases(implementation: str, phase: str) -> None:
    measured = models.block(BlockArguments(shape="tiny", batch=2, tokens=5, phase=phase, implementation=implementation))
    assert set(measured) == {"seconds", "peak_bytes"}


@pytest.mark.unflipped  # torch makes no CausalBias under a dispatch mode
@pytest.mark.parametrize("implementation", ["fp16", "quarot", "prefixquant"])
def test_the_first_token_of_a_whole_decoder(implementation: str) -> None:
    measured = models.first_token(FirstTokenArguments(shape="tiny", batch=2, tokens=5, implementation=implementation))
    assert measured["seconds"].value == 1e-3


@pytest.mark.unflipped  # torch makes no CausalBias under a dispatch mode
@pytest.mark.parametrize(
    ("activations", "cache", "prefix"),  # all pairs of the 4-bit values, and 16-bit models
    [
        ("dynamic", "float16", 0),
        ("static", "float16", 3),
        ("dynamic", "int4", 3),
        ("static", "int4", 0),
        ("dynamic", "int4-static", 0),
        ("static", "int4-static", 3),
        ("weights-alone", "float16", 0),
        ("none", "float16", 0),
    ],
)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_whole_decoder_runs_in_both_phases(phase: str, activations: str, cache: str, prefix: int) -> None:
    fields = {"shape": "tiny", "batch": 2, "tokens": 5, "activations": activations, "cache": cache, "prefix": prefix}
    measured = models.whole_decoder(WholeDecoderArguments(phase=phase, **fields))
    assert set(measured) == {"seconds", "peak_bytes"}


@pytest.mark.parametrize("implementation", ["bf16", "w2"])
def test_generation_counts_per_token(implementation: str) -> None:
    measured = models.generate(GenerateArguments(shape="tiny", prompt=4, tokens=3, implementation=implementation))
    assert measured["prefill_seconds_per_token"].value == pytest.approx(1e-3 / 4)
    assert measured["decode_seconds_per_token"].value == pytest.approx(1.0 / 3)
    assert measured["total_seconds_per_token"].value == pytest.approx(1e-3 / 4 + 1.0 / 3)


def test_an_unknown_shape_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown shape 'llama-2-8b'"):
        decoder_config("llama-2-8b")
