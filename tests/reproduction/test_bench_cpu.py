"""Decoding on a CPU (SpinQuant Table 6): the network that is timed is the one that the library simulates.

Times are never tested; what is measured, and from which answers a record is made, is.
"""

import copy
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from reproduction.benchmarks import cpu
from reproduction.benchmarks import timing as cpu_timing
from reproduction.benchmarks.arguments import CpuDecodeArguments, CpuLinearArguments, CpuTransformArguments
from reproduction.benchmarks.cpu import CpuCache, CpuDecoder, CpuLayer, random_cpu_decoder
from reproduction.benchmarks.cpu_kernels import operators
from reproduction.benchmarks.cpu_kernels.layout import DotWeight
from reproduction.benchmarks.records import Measurement
from reproduction.benchmarks.shapes import SHAPES, decoder_config
from reproduction.run.stages import speed as measuring
from reproduction.sources import load_tables
from rotquant import api
from rotquant.decoder.config import LINEARS, DecoderConfig
from rotquant.foundation.errors import ConfigError
from rotquant.kernels.launch.operators import references
from rotquant.models.architectures import architecture_of
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override
from tests.helpers.cases import each_once
from tests.helpers.checkpoints import with_few_layers
from tests.helpers.models import TINY_SHAPE
from tests.helpers.project import REPOSITORY, Copy
from tests.helpers.speed import SPEED

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler, and this machine has none"
)

#: W4A8 as Table 6 has it: R1 and R2 in the weights, inputs asymmetric per token, the KV cache as it is. The search of
#: scales, most of the time, decides nothing here.
EASY = override(
    preset("quarot-rtn"),
    {
        "weights": {"clip_search": False},
        "activations": {"bits": 8, "symmetric": False, "clip_ratio": 1.0},
        "keys": None,
        "values": None,
        "rotation": {"heads": False, "keys": False, "mlp": False},
    },
    "",
)
HARD = override(EASY, {"rotation": {"mlp": True}}, "")

#: Heads of 64, two for a key in the first; widths of the transform 896 = 28 * 32, 688 = 172 * 4, 864 = 108 * 8.
MODELS = ("rq-llama3", "rq-7b", "rq-13b")
TOKENS = 12


Quantized = Callable[[str, Recipe], api.Model]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """The first four layers of a shipped model, all of one kind, after a recipe, in float32."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def few_layers(name: str) -> Path:
        return with_few_layers(REPOSITORY / "workflow/resources/models" / name, 4, folder / name)

    @cache
    def made(name: str, recipe: Recipe) -> api.Model:
        return api.quantize(few_layers(name), recipe)

    return made


def logits(network: torch.nn.Module) -> Tensor:
    """Logits after every token of the text, [tokens, vocabulary]."""
    with torch.no_grad():
        return network(input_ids=text()[None], use_cache=False).logits[0]


def text() -> Tensor:
    return torch.randint(10, 4000, (TOKENS,), generator=torch.Generator().manual_seed(2))


def converted(model: api.Model, *, rotates: bool) -> CpuDecoder:
    """The decoder of Table 6 with a model's integers and scales, in float32."""
    config, shape, stored = model.network.config, architecture_of(model.network.config), model.stored.weights

    def layer(index: int) -> CpuLayer:
        packed = []
        for site in shape.sites:
            parts = [stored[f"model.layers.{index}.{part}.weight"] for part in site.linears]
            scales = torch.cat([part.qparams.scale for part in parts])
            packed.append(DotWeight.pack(torch.cat([part.codes for part in parts]), scales))
        return CpuLayer(*packed)

    return CpuDecoder(
        DecoderConfig.from_shape(
            config.to_dict(), rope_theta=config.rope_parameters["rope_theta"], norm_eps=config.rms_norm_eps
        ),
        model.network.get_input_embeddings().weight.detach(),
        tuple(map(layer, range(shape.num_layers))),
        model.network.get_output_embeddings().weight.detach(),
        rotates=rotates,
        product=torch.nn.functional.linear,
    )


def decoded(decoder: CpuDecoder) -> Tensor:
    """Logits after every token of the text, one token at a time."""
    cache = CpuCache(decoder.shape, TOKENS, decoder.embedding.dtype)
    return torch.stack([decoder.decode(int(token), cache) for token in text()])


@pytest.mark.parametrize(("name", "recipe"), each_once(MODELS, [EASY, HARD]))
def test_the_network_is_the_simulated_one(
    name: str, recipe: Recipe, quantized: Quantized, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, where no code flips; the operators' references, since compiled ones take no float64.

    transformers' norms are float32 whatever the model, and a code beside a rounding boundary would show it.
    """
    monkeypatch.setattr(
        LlamaRMSNorm,
        "forward",
        lambda self, x: self.weight * rms_norm(x, x.shape[-1:], eps=self.variance_epsilon),
    )
    model = quantized(name, recipe)
    network = copy.deepcopy(model.network).double()
    for weight_name, weight in model.stored.weights.items():
        network.get_parameter(weight_name).data = weight.codes.double() * weight.qparams.scale.double()
    decoder = converted(model, rotates=recipe is HARD)
    decoder = decoder.changed(embedding=decoder.embedding.double(), head=decoder.head.double())
    with references():
        ours = decoded(decoder)
    # Cosines and sines of the rotary embedding are float32 on both sides.
    torch.testing.assert_close(ours, logits(network), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", [EASY, HARD], ids=["easy", "hard"])
def test_the_compiled_network_is_as_near_as_flipped_codes_allow(
    name: str, recipe: Recipe, quantized: Quantized
) -> None:
    """In float32 sums come in another order, and a value between two codes may become either, which are 1/255 of its
    token's range apart. Such a flip and what follows changed the logits by 0.1 %, of whole models by 0.3 to 0.7 %; W4A8
    itself changes them by 8 to 22 %.
    """
    model, exact = quantized(name, recipe), logits(quantized(name, Recipe()).network)
    expected, ours = logits(model.network), decoded(converted(model, rotates=recipe is HARD))
    assert (ours - expected).norm() < 0.01 * expected.norm()
    assert (ours - expected).norm() < 0.1 * (expected - exact).norm()


def _small(**sizes: int) -> DecoderConfig:
    return decoder_config("llama-3.2-1b", head_dim=16, inverse_frequencies=(1.0, 0.1, 0.01, 0.001) * 2, **sizes)


def test_online_rotations_do_not_change_the_logits() -> None:
    """R3 cancels in their products, and R4 against its inverse in the weight of down_proj (Sec. 3.1)."""
    sizes = {"hidden": 64, "intermediate": 64, "heads": 4, "kv_heads": 2, "vocabulary": 4096, "layers": 2}
    decoder = random_cpu_decoder(_small(**sizes), "bf16", layers=2)
    wide = decoder.changed(
        embedding=torch.randn(4096, 64),
        layers=tuple(CpuLayer(*(weight.float() for weight in layer.weights)) for layer in decoder.layers),
        head=decoder.head.float(),
        product=torch.nn.functional.linear,
    )
    transform = operators.hadamard(torch.eye(64))
    undone = tuple(replace(layer, down=layer.down @ transform) for layer in wide.layers)
    torch.testing.assert_close(decoded(wide.changed(layers=undone, rotates=True)), decoded(wide))


def test_layers_that_are_missing_take_turns() -> None:
    sizes = {"hidden": 64, "intermediate": 64, "heads": 4, "kv_heads": 2, "vocabulary": 96, "layers": 5}
    decoder = random_cpu_decoder(_small(**sizes), "w4a8", layers=2)
    assert [decoder.layer(index) is decoder.layers[index % 2] for index in range(5)] == [True] * 5
    assert len(decoder.weights) == 5 * 4 + 1
    assert decoder.weights[0] is decoder.weights[8] is not decoder.weights[4]


def test_a_shape_is_that_of_its_name() -> None:
    shape = decoder_config("llama-3-8b")
    parameters = shape.layers * sum(math.prod(shape.features(name)) for name in LINEARS)
    assert parameters == 6_979_321_856  # 8.03 billion, less embedding, head and norms
    with pytest.raises(ConfigError, match="unknown shape 'llama-9'"):
        decoder_config("llama-9")


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing that calls every function once and says one millisecond; a tiny shape; little memory."""

    def time_cpu(*functions: Callable[[], object], seconds: float = 0.0) -> list[Measurement]:
        for function in functions:
            function()
        return [Measurement(1e-3, "s", 1e-3, 2e-3, 7, 1) for _ in functions]

    monkeypatch.setattr(cpu, "time_cpu", time_cpu)
    monkeypatch.setattr(cpu, "COLD_BYTES", 2**16)
    monkeypatch.setitem(SHAPES, "tiny", TINY_SHAPE)


@pytest.mark.usefixtures("stopped_clock")
def test_a_decoding_cell_times_every_network_and_reading_its_weights() -> None:
    found = cpu.cpu_decode(CpuDecodeArguments(shape="tiny", context=8, layers_in_memory=1))
    networks = ("bf16", "bf16_torch", "w4a8", "w4a8_hadamard", "bf16_read", "w4a8_read")
    assert all(found[f"{name}_seconds"].value == 1e-3 for name in networks)
    head, layers = 64 * 256, 2 * (256 * 512 + 256 * 256 + 768 * 256 + 256 * 384)
    assert found["bf16_bytes"].value == 2 * (head + layers)
    assert found["w4a8_bytes"].value == 2 * head + layers / 2


@pytest.mark.usefixtures("stopped_clock")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_linear_layers_of_every_kind_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for one that torch does not have here, which has no number then."""

    def absent(in_features: int, out_features: int) -> cpu.Layer:
        raise NotImplementedError("no such operator")

    monkeypatch.setitem(cpu._LAYERS, "absent", absent)
    found = cpu.cpu_linear(CpuLinearArguments(in_features=256, out_features=64))
    assert {"bf16_seconds", "bf16_torch_seconds", "w4a8_seconds"} <= set(found)
    assert "absent_seconds" not in found
    assert found["bf16_bytes"].value == 2 * 256 * 64
    assert found["w4a8_bytes"].value == 256 * 64 / 2 + 8 * 64  # a scale and a sum for each row


@pytest.mark.usefixtures("stopped_clock")
def test_a_transform_is_timed_per_call() -> None:
    found = cpu.cpu_transform(CpuTransformArguments(rows=2, features=64))
    assert found["ours_seconds"].value == found["torch_seconds"].value == 1e-3 / cpu._CALLS


def test_functions_are_timed_in_turns() -> None:
    calls: list[str] = []

    def slow() -> None:
        calls.append("slow")
        time.sleep(0.01)

    first, second = cpu_timing.time_cpu(slow, lambda: calls.append("fast"), seconds=0.0)
    assert calls[:4] == ["slow", "slow", "fast", "fast"]  # before it counts
    assert calls[4:].count("slow") == first.replays == second.replays == 7
    assert calls[4:].count("fast") == 7 * second.calls_per_replay > 7
    assert 0 <= second.low <= second.value <= second.high


def cpu_tables() -> dict[str, Any]:
    """One small table of a CPU's benchmark."""
    grid = {
        "name": "Transform",
        "benchmark": "cpu_transform",
        "axes": [{"name": "Features", "values": {64: {"features": 64, "rows": 1}}}],
        "rows": "{Features}",
        "columns": [{"name": name, "quantity": f"{name}_seconds"} for name in ("torch", "ours")],
        "baseline": "torch",
    }
    common = {key: SPEED["tables"][0][key] for key in ("id", "title", "section", "caption")}
    return {**SPEED, "tables": [{**common, "grids": [grid]}]}


@pytest.mark.usefixtures("stopped_clock")
def test_a_table_of_a_cpu_is_measured_without_a_gpu(tmp_path: Path) -> None:
    Copy(tmp_path).write("workflow/papers/quarot/speed.yaml", yaml.safe_dump(cpu_tables()))
    table = load_tables(tmp_path)["quarot_table14"]
    assert table.device == "cpu"
    record = measuring.measure(table, tmp_path / "record.json", note="A backup ran.")
    assert record.sittings[0].environment["note"] == "A backup ran."
    assert record.gpu == cpu_timing.cpu_label()
    assert [cell.quantities["ours_seconds"].value for cell in record.cells] == [1e-3 / cpu._CALLS]
    assert record.sittings[0].gpu_before["threads"] == torch.get_num_threads()


def test_a_table_is_of_one_device(tmp_path: Path) -> None:
    mixed = cpu_tables()
    transform = {"name": "GPU", "benchmark": "transform", "arguments": {"implementation": "copy"}}
    mixed["tables"][0]["grids"][0]["columns"].append(transform)
    Copy(tmp_path).write("workflow/papers/quarot/speed.yaml", yaml.safe_dump(mixed))
    with pytest.raises(ConfigError, match="its benchmarks measure cpu and gpu, and a record is of one"):
        load_tables(tmp_path)
