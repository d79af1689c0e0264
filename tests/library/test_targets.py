"""What an export refuses is refused before anything is quantized, by one function; what passes it is exported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rotquant.commands.formats import TARGETS, check_target
from rotquant.decoder import convert
from rotquant.formats import gguf as gguf_export
from rotquant.formats.export import export_compressed, export_plain
from rotquant.formats.gguf import export_gguf
from rotquant.foundation.errors import CheckpointError, RecipeError
from rotquant.models.architectures import architecture_of
from rotquant.models.fitting import check_fits, fitted
from rotquant.models.folders import check_kind
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.weights.build import build_weights
from rotquant.weights.storage import save_quantized
from tests.helpers.cases import each_once
from tests.helpers.commands import rotquant
from tests.helpers.models import tiny_model, tiny_tokens
from tests.library.test_gguf import byte_level

ALONE: dict[str, Any] = dict.fromkeys(("activations", "attention_output", "keys", "values"))


def weights(**scheme: Any) -> dict[str, Any]:
    return {"weights": {"scheme": scheme}}


#: Recipes in which each exporter finds something else: presets with changes.
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "simulated": ("quarot-rtn", {}),
    "weights alone": ("rtn", ALONE),
    "fused rotations": ("quarot-rtn", {**ALONE, "rotation": {"heads": False, "mlp": False}}),
    "W8A8": ("rtn", {**ALONE, **weights(bits=8), "activations": {"bits": 8, "clip_ratio": 1.0}}),
    "FP8": ("fp8", {}),
    "groups that divide": ("rtn", {**ALONE, **weights(granularity="group", group_size=32)}),
    "groups that do not": ("rtn", {**ALONE, **weights(granularity="group", group_size=128)}),
    "groups of the kernels": ("rtn", {**ALONE, **weights(granularity="group", group_size=64)}),
    "no blocks": ("rtn", {**ALONE, **weights(granularity="group", group_size=40)}),
    "asymmetric": ("rtn", {**ALONE, **weights(symmetric=False)}),
    "8 bits asymmetric": ("rtn", {**ALONE, **weights(symmetric=False, bits=8)}),
    "reordered groups": (
        "gptq",
        {**ALONE, **weights(granularity="group", group_size=64), "methods": {"gptq": {"act_order": True}}},
    ),
    "reordered rows": ("gptq", {**ALONE, "methods": {"gptq": {"act_order": True}}}),
    "outlier features": ("quik", {"methods": {"outliers": {"features": 8}}}),
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "hidden_size": 320, "intermediate_size": 384, "num_heads": 4, "num_kv_heads": 2},
    "biases": {"family": "llama", "hidden_size": 128, "intermediate_size": 256, "attention_bias": True},
    "qwen2": {"family": "qwen2", "hidden_size": 128, "intermediate_size": 160},
}


def exporters(folder: Path, out: Path) -> dict[str, Callable[[], object]]:
    packed = {
        name: lambda name=name: export_compressed(folder, out / name, name) for name in ("vllm", "transformers", "any")
    }
    return {
        **packed,
        "gguf": lambda: export_gguf(folder, out / "model.gguf"),
        "plain": lambda: export_plain(folder, out / "plain"),
        "decoder": lambda: convert(folder),
    }


def sentence(work: Callable[[], object]) -> str:
    """What work is refused by, empty where it is done."""
    try:
        work()
    except (RecipeError, CheckpointError) as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize(("name", "model"), each_once([*RECIPES], [*MODELS]))
def test_an_export_is_refused_before_quantizing_or_works(name: str, model: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    network = tiny_model(num_layers=1, **MODELS[model])
    architecture = architecture_of(network)
    start, changes = RECIPES[name]
    recipe: Recipe = fitted(override(preset(start), changes, "test"), architecture)[0]
    check_fits(recipe, architecture)
    samples = tiny_tokens(batch=4, tokens=16) if recipe.needs_calibration else None
    save_quantized(tmp_path / "quantized", build_weights(network, byte_level(), recipe, 0, samples, progress=False))
    assert exporters(tmp_path, tmp_path).keys() == {*TARGETS}
    for target, export in exporters(tmp_path / "quantized", tmp_path).items():
        refusal = sentence(lambda target=target: check_target(target, recipe, network.config, tmp_path / "quantized"))
        assert sentence(export) == refusal, target


def test_groups_that_do_not_divide_are_told_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """SmolLM2's 576 features in groups of 128: AWQ took minutes, and then vLLM's export refused it."""
    folder = tmp_path / "model"
    tiny_model(num_layers=1, hidden_size=192, intermediate_size=256).save_pretrained(folder)
    byte_level().save_pretrained(folder)
    monkeypatch.setattr("rotquant.weights.build.build_weights", lambda *_, **__: pytest.fail("it began"))
    for command in (
        ["quantize", str(folder), "-o", str(tmp_path / "out"), "--corpus", "wikitext2"],
        ["plan", str(folder)],
    ):
        arguments = [*command, "--method", "awq-128g", "--sequence-length", "32"]
        assert rotquant(monkeypatch, *arguments, "--for", "vllm") == 2
        assert "groups of 128 do not divide the 192 features of" in capsys.readouterr().err
    assert rotquant(monkeypatch, "plan", str(folder), "--method", "awq-128g", "--for", "gguf", "--device", "cpu") == 0
    assert rotquant(monkeypatch, "plan", str(folder), "--for", "onnx") == 2
    assert "nothing is exported for 'onnx': choose vllm" in capsys.readouterr().err


def test_an_export_is_neither_exported_nor_converted_again_and_the_advice_is_true(tmp_path: Path) -> None:
    recipe = override(preset("quarot-rtn"), ALONE, "test")
    save_quantized(tmp_path / "quantized", build_weights(tiny_model(num_layers=1), byte_level(), recipe, 0))
    for engine in ("transformers", "vllm"):
        export_compressed(tmp_path / "quantized", tmp_path / engine, engine)
        for use in (lambda folder: export_plain(folder, tmp_path / "out"), convert):
            with pytest.raises(CheckpointError, match=r"holds packed weights .* give the quantized folder that it was"):
                use(tmp_path / engine)
    check_kind(tmp_path / "quantized", "quantized")
    assert gguf_export.BLOCK == 32
