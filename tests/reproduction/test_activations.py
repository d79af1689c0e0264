"""Activation magnitudes: read where the linear layers read, unchanged by looking, flattened by rotation, drawn."""

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from pydantic import ValidationError

from reproduction.frame import values as tables
from reproduction.metrics.magnitudes import magnitudes
from reproduction.metrics.settings import Magnitudes
from reproduction.render.figures import draw as figures
from reproduction.run.results import RunResult, write_result
from reproduction.sources import load_project
from reproduction.tables.project import Project
from rotquant.foundation.errors import CorpusError, ResultError
from rotquant.models.rotation.fusing import fuse_norms, rotate
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme
from rotquant.text import Tokens
from tests.helpers.circumstances import circumstances
from tests.helpers.models import FAMILIES, tiny_model, tiny_tokens
from tests.helpers.project import Copy, checkpoints_by_name

METRIC = Magnitudes(tokens=16)
TOKENS = tiny_tokens(1, 40)[0]
FIGURE = {
    "paper": "quarot",
    "title": "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs",
    "tables": [
        {
            "id": "quarot_figure1",
            "title": "magnitudes",
            "section": "1",
            "caption": "Magnitudes.",
            "metrics": [{"kind": "magnitudes", "tokens": 4}],
            "columns": ["Llama-2-7B", "Llama-2-13B"],
            "baseline": "Before",
            "rows": [{"name": "Before", "method": "baseline"}, {"name": "After", "method": "quarot-rtn"}],
            "claims": [],
            "figure": {"kind": "magnitudes", "caption": "Magnitudes."},
        }
    ],
}


def matrix(arrays: dict, panel: int = 0) -> torch.Tensor:
    return torch.tensor(arrays["panels"][panel]["matrix"])


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_what_the_feed_forward_block_reads_in_the_middle_layer(family: str) -> None:
    model = tiny_model(family, num_layers=3)
    norm_outputs = []
    middle = model.model.layers[1].post_attention_layernorm
    hook = middle.register_forward_hook(lambda _module, _inputs, output: norm_outputs.append(output))
    with torch.no_grad():
        model(TOKENS[None, :16])
    hook.remove()
    metrics, arrays = magnitudes(model, Tokens(TOKENS), METRIC)
    expected = norm_outputs[0][0].abs()
    (panel,) = arrays["panels"]
    assert panel["layer"] == 1
    assert panel["linear"] in ("mlp.gate_proj", "mlp.gate_up_proj")
    # Four significant digits: relative error at most half a unit of the fourth.
    torch.testing.assert_close(matrix(arrays), expected, rtol=5e-4, atol=0)
    torch.testing.assert_close(torch.tensor(panel["mean"]), expected.mean(0), rtol=5e-4, atol=0)
    torch.testing.assert_close(torch.tensor(panel["largest"]), expected.amax(0), rtol=5e-4, atol=0)
    assert metrics["largest"] == expected.max().item()
    assert metrics["median"] == expected.median().item()
    assert metrics["peak_ratio"] == panel["peak_ratio"] == pytest.approx(metrics["largest"] / metrics["median"])


def test_looking_leaves_the_model_as_it_was() -> None:
    model = tiny_model().train()
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    magnitudes(model, Tokens(TOKENS), METRIC)
    assert model.training
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == hooks


@pytest.mark.parametrize("site", ["attention_input", "attention_output", "mlp_input", "mlp_output"])
def test_every_site_has_its_width(site: str) -> None:
    _, arrays = magnitudes(tiny_model(), Tokens(TOKENS), Magnitudes(tokens=16, sites=(site,), depths=(0.0,)))
    assert matrix(arrays).shape == (16, 96 if site == "mlp_output" else 64)


def test_several_depths_and_sites_are_several_panels_and_the_worst_ratio_counts() -> None:
    metric = Magnitudes(tokens=16, sites=("attention_input", "mlp_input"), depths=(0, 0.3125, 0.625, 0.9375))
    metrics, arrays = magnitudes(tiny_model(num_layers=10), Tokens(TOKENS), metric)
    panels = arrays["panels"]
    # The first, eleventh, twenty-first and thirty-first of 32 layers, as shares of 10.
    assert [panel["layer"] for panel in panels] == [0, 0, 3, 3, 6, 6, 9, 9]
    assert [panel["linear"] for panel in panels[:2]] == ["self_attn.q_proj", "mlp.gate_proj"]
    assert metrics["peak_ratio"] == max(panel["peak_ratio"] for panel in panels)
    assert len(magnitudes(tiny_model(), Tokens(TOKENS), metric)[1]["panels"]) == 4  # two layers: no place comes twice


def test_weights_are_output_by_input_feature() -> None:
    model = tiny_model()
    _, arrays = magnitudes(model, Tokens(TOKENS), Magnitudes(tensor="weights", sites=("mlp_output",), depths=(0.5,)))
    expected = model.model.layers[1].mlp.down_proj.weight.abs()
    torch.testing.assert_close(matrix(arrays), expected.detach(), rtol=5e-4, atol=0)


def test_weights_have_the_gain_of_their_norm_whether_it_is_fused_or_not() -> None:
    """So a figure before and after rotation differs by the rotation alone."""
    model, metric = tiny_model(), Magnitudes(tensor="weights", sites=("attention_input", "mlp_input"), depths=(0.0,))
    assert not torch.equal(model.model.layers[0].input_layernorm.weight, torch.ones(model.config.hidden_size))
    before = magnitudes(model, Tokens(TOKENS), metric)
    fuse_norms(model)
    assert magnitudes(model, Tokens(TOKENS), metric)[0] == pytest.approx(before[0])


def test_a_row_alone_is_set_against_its_own_median() -> None:
    model = tiny_model()
    fuse_norms(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[3] *= 100
    asked = {"tensor": "weights", "sites": ("attention_input",), "depths": (0.0,)}
    weight = model.model.layers[0].self_attn.q_proj.weight.detach().abs()
    expected = {"matrix": weight.max() / weight.median(), "row": max(row.max() / row.median() for row in weight)}
    found = {
        within: magnitudes(model, Tokens(TOKENS), Magnitudes(**asked, within=within))[0]["peak_ratio"]
        for within in expected
    }
    assert found == {within: ratio.item() for within, ratio in expected.items()}
    assert found["row"] < 10 < 100 < found["matrix"]


def test_large_matrices_keep_their_outliers() -> None:
    model = tiny_model(intermediate_size=1200)
    fuse_norms(model)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3, 1023] = 77.0
        model.model.layers[0].mlp.gate_proj.weight[1023, 3] = 77.0
    sites = {"mlp_output": (64, 400), "mlp_input": (400, 64)}  # three neighbours each
    for site, shape in sites.items():
        metric = Magnitudes(tensor="weights", sites=(site,), depths=(0.0,))
        found = matrix(magnitudes(model, Tokens(TOKENS), metric)[1])
        assert found.shape == shape
        assert found.max() == 77.0
        assert found.argmax() == (3 * 400 + 341 if site == "mlp_output" else 341 * 64 + 3)


def test_rotation_turns_the_input_and_takes_the_outlier_channel_away() -> None:
    model = tiny_model()
    with torch.no_grad():  # one loud channel of the residual stream, as trained models have
        model.model.embed_tokens.weight[:, 5] = 40.0
    fuse_norms(model)  # so that both readings differ by Q alone
    before, loud = magnitudes(model, Tokens(TOKENS), METRIC)
    rotate(model, RotationScheme(), seed=0)
    with wrap(model, RuntimeQuantization(transforms=RotationScheme().transforms)):
        after, flat = magnitudes(model, Tokens(TOKENS), METRIC)
    assert matrix(loud).argmax(dim=1).unique().tolist() == [5]
    # An orthogonal Q keeps each token's norm; the rounding is 5e-4 at most.
    torch.testing.assert_close(matrix(loud).norm(dim=1), matrix(flat).norm(dim=1), rtol=1e-3, atol=0)
    assert after["peak_ratio"] < before["peak_ratio"] / 5


def test_a_quantizer_before_the_site_is_seen() -> None:
    model = tiny_model()
    with wrap(model, RuntimeQuantization(activations=QuantizationScheme(bits=4))):
        _, arrays = magnitudes(model, Tokens(TOKENS), METRIC)
    assert all(len(row.unique()) <= 9 for row in matrix(arrays))  # |-8| to |7|


def test_a_broken_network_is_a_result() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[TOKENS[3]] = math.inf
    metrics, _ = magnitudes(model, Tokens(TOKENS), METRIC)
    assert math.isnan(metrics["peak_ratio"])


def test_bad_requests_are_one_sentence() -> None:
    with pytest.raises(ValidationError, match="Input should be 'attention_input', "):
        Magnitudes(sites=("ffn",))
    with pytest.raises(ValidationError, match="less than 1"):
        Magnitudes(depths=(1.0,))
    with pytest.raises(CorpusError, match="40 tokens, fewer than one window of 64"):
        magnitudes(tiny_model(), Tokens(TOKENS), METRIC.model_copy(update={"tokens": 64}))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    checkpoints_by_name(monkeypatch)
    Copy(tmp_path).set_tables(FIGURE)
    return load_project(root=tmp_path)


def compute(project: Project, arrays: dict) -> None:
    """Write the figure's run files, all with the same arrays."""
    numbers = {"peak_ratio": 8.0, "largest": 4.0, "median": 0.5}
    for run in project.runs.values():
        record = {**circumstances(), "code_digest": "0123456789abcdef", "seconds": 1.0}
        write_result(project.results.run(run.key), RunResult(run, numbers, record, None, arrays))


def draw(project: Project) -> bytes:
    table, path = project.table("quarot_figure1"), project.root / "figure.svg"
    figures.draw(project, table, tables.collect(project, table)[0], path)
    return path.read_bytes()


def panel(layer: int = 1) -> dict:
    numbers = {"matrix": [[0.5, 4.0, 0.4], [0.1, 3.9, math.nan]], "mean": [0.3, 3.95, 0.4], "largest": [0.5, 4.0, 0.4]}
    return {"layer": layer, "linear": "mlp.gate_proj", "peak_ratio": 8.0, **numbers}


def images(svg: bytes) -> int:
    return len(list(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}image")))


def test_the_figure_has_a_panel_per_cell_and_is_the_same_for_the_same_data(project: Project) -> None:
    compute(project, {"panels": [panel()]})
    first = draw(project)
    assert draw(project) == first
    assert images(first) == 4 + 2  # and a colour bar for each column


def test_places_have_colour_bars_of_their_own_and_rows_may_be_left_out(project: Project) -> None:
    compute(project, {"panels": [panel(layer) for layer in range(4)]})
    assert images(draw(project)) == 16 + 8
    table = project.tables["quarot_figure1"]
    figure = table.figure.model_copy(update={"rows": ("After",)})
    project.tables["quarot_figure1"] = table.model_copy(update={"figure": figure})
    assert images(draw(project)) == 8 + 8


def test_a_run_file_without_magnitudes_is_named(project: Project) -> None:
    compute(project, {})
    with pytest.raises(ResultError, match="holds no panels"):
        draw(project)


def test_a_map_whose_values_stand_for_neighbours_is_as_wide_as_the_model() -> None:
    from reproduction.render.figures.heatmaps import HeatmapPanel, _draw

    pairs = np.ma.masked_invalid(np.arange(288.0))
    panel = HeatmapPanel(("column", 0, None), "title", (128, 576), np.ma.vstack([pairs] * 128), pairs, pairs)
    strip, axis = Figure().subplots(2)
    image = _draw(strip, axis, panel, 288.0)
    assert strip.get_xlim() == (-0.5, 575.5)
    assert tuple(image.get_extent()) == (-0.5, 575.5, 127.5, -0.5)
    assert strip.collections[0].get_paths()[0].vertices[:, 0].max() == pytest.approx(575.0, abs=1.5)
