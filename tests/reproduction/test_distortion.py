"""Kurtosis, errors and signal-to-noise ratios are what their definitions say, for tensors, layers and networks."""

import math
from types import SimpleNamespace

import pytest
import torch

from reproduction.metrics.distortion import kurtosis, relative_error
from reproduction.metrics.outliers import READERS, outlier_statistics
from reproduction.metrics.settings import SNR, Outliers
from reproduction.metrics.snr import end_to_end_snr, window_snr
from rotquant.foundation.errors import CorpusError
from rotquant.models.architectures import architecture_of
from rotquant.models.rotation.fusing import fuse_norms, rotate
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme
from rotquant.tensors.quantization import decibel, fake_quantize, square_sum
from rotquant.text import Tokens
from tests.helpers.models import FAMILIES, tiny_model, tiny_tokens

TOKENS = tiny_tokens(1, 40)[0]
METRIC = Outliers(tokens=32)


def test_the_kurtosis_of_a_normal_distribution_is_three() -> None:
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    assert kurtosis(x) == pytest.approx(3.0, abs=0.03)  # six standard errors, sqrt(24 / n) each
    assert kurtosis(5.0 - 3.0 * x) == pytest.approx(kurtosis(x), rel=1e-4)
    assert kurtosis(torch.rand(100_000)) == pytest.approx(1.8, abs=0.05)  # of a uniform one 9/5
    assert kurtosis(torch.tensor([-1.0, 1.0])) == 1.0


def test_errors_are_relative_to_the_signal() -> None:
    x = torch.tensor([3.0, -4.0])
    assert relative_error(x, torch.tensor([3.0, -3.0])) == pytest.approx(1 / 25)
    assert relative_error(x, x) == 0.0
    assert square_sum(x).item() == 25.0
    assert decibel(torch.tensor(100.0), torch.tensor(1.0)) == pytest.approx(20.0)
    assert decibel(torch.tensor(1.0), torch.tensor(0.0)) == math.inf


class Table(torch.nn.Module):
    """A language model that is a table of logits by token."""

    def __init__(self, table: torch.Tensor):
        super().__init__()
        self.table = torch.nn.Parameter(table)
        self.config = SimpleNamespace(vocab_size=len(table))

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


def test_the_networks_ratio_is_the_mean_over_windows() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(11, 11, generator=generator)
    noise = 0.1 * torch.randn(11, 11, generator=generator)
    tokens = Tokens(torch.randint(11, (35,), generator=generator))
    expected = []
    for start in (0, 10, 20):  # the tail of five tokens is dropped
        window = tokens.ids[start : start + 10]
        ratio = exact[window].double().square().sum() / noise[window].double().square().sum()
        expected.append(10 * math.log10(ratio))
    result = end_to_end_snr(Table(exact + noise), Table(exact), tokens, SNR(sequence_length=10))
    # The difference of two float32 logits is known to about 1e-7 / 0.1 of the noise.
    assert result["snr"] == pytest.approx(sum(expected) / 3, abs=1e-4)
    assert result["windows"] == 3
    assert result["snr_standard_error"] == pytest.approx(torch.tensor(expected).std().item() / math.sqrt(3), rel=1e-3)
    one = end_to_end_snr(Table(exact + noise), Table(exact), tokens, SNR(sequence_length=10, max_windows=1))
    assert one["snr"] == pytest.approx(expected[0], abs=1e-4)
    assert math.isnan(one["snr_standard_error"])
    with pytest.raises(CorpusError, match="35 tokens, fewer than one window of 64"):
        end_to_end_snr(Table(exact), Table(exact), tokens, SNR(sequence_length=64))


def test_rotation_adds_no_noise_and_fewer_bits_add_more() -> None:
    reference = tiny_model(dtype=torch.float64)
    rotated = tiny_model(dtype=torch.float64)
    rotate(rotated, RotationScheme(), seed=0)
    with wrap(rotated, RuntimeQuantization(transforms=RotationScheme().transforms)):
        exact = window_snr(rotated, reference, TOKENS)
    assert exact > 100  # the ratio is taken in float32, whose precision is 2^-24 or 144 dB
    ratios = []
    for bits in (8, 6, 4):
        with wrap(reference, RuntimeQuantization(activations=QuantizationScheme(bits=bits))):
            ratios.append(window_snr(reference, tiny_model(dtype=torch.float64), TOKENS))
    assert exact > ratios[0] > ratios[1] > ratios[2]
    assert window_snr(reference, reference, TOKENS) == math.inf


def test_a_broken_network_has_no_ratio() -> None:
    broken = Table(torch.full((11, 11), math.nan))
    assert math.isnan(
        end_to_end_snr(broken, Table(torch.ones(11, 11)), Tokens(torch.arange(10)), SNR(sequence_length=5))["snr"]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_are_those_of_what_each_projection_reads(family: str) -> None:
    model = tiny_model(family)
    read = {}
    layer = model.model.layers[1]
    for site, norm in (("attention_input", layer.input_layernorm), ("mlp_input", layer.post_attention_layernorm)):
        norm.register_forward_hook(lambda _m, _i, output, site=site: read.update({site: output[0].detach()}))
    metrics, arrays = outlier_statistics(model, Tokens(TOKENS), METRIC)
    scheme = QuantizationScheme(bits=4, symmetric=False)
    for site, x in read.items():
        assert arrays["kurtosis"][site][1] == pytest.approx(kurtosis(x))
        assert arrays["activation_error"][site][1] == pytest.approx(100 * relative_error(x, fake_quantize(x, scheme)))
    assert {len(layers) for layers in arrays["weight_error"].values()} == {2}
    assert list(arrays["weight_error"]) == ["query", "key", "value", "gate", "up"]
    assert metrics["kurtosis"] == max(max(layers) for layers in arrays["kurtosis"].values())
    everything = [value for layers in arrays["weight_error"].values() for value in layers]
    assert metrics["weight_error"] == pytest.approx(sum(everything) / 10)


def test_fused_and_separate_projections_have_the_same_weights() -> None:
    """Phi-3's rows of q, k, v, gate and up are told apart."""
    model = tiny_model("phi3")
    rows = architecture_of(model).key.rows
    weight = model.model.layers[0].self_attn.qkv_proj.weight[slice(*rows)]
    expected = 100 * relative_error(weight, fake_quantize(weight, QuantizationScheme(bits=4, granularity="channel")))
    _, arrays = outlier_statistics(model, Tokens(TOKENS), METRIC)
    assert arrays["weight_error"]["key"][0] == pytest.approx(expected)


def test_rotation_makes_a_loud_channel_normal() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] = 40.0
    fuse_norms(model)
    before, _ = outlier_statistics(model, Tokens(TOKENS), METRIC)
    rotate(model, RotationScheme(), seed=0)
    after, arrays = outlier_statistics(model, Tokens(TOKENS), METRIC)
    assert before["mean_kurtosis"] > 20
    assert after["mean_kurtosis"] < 4
    assert after["activation_error"] < before["activation_error"]
    assert set(arrays["kurtosis"]) == set(READERS)


def test_a_kurtosis_that_is_not_a_number_is_not_hidden() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[TOKENS[3]] = math.inf
    assert math.isnan(outlier_statistics(model, Tokens(TOKENS), METRIC)[0]["kurtosis"])
